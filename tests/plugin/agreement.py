"""Do two runs of the same requests agree? Log-probabilities along the tokens both runs chose, never texts.

Greedy decoding of one model is its own teacher: as long as two runs chose the same tokens they saw the same context,
so their log-probabilities must be equal up to rounding. The first step at which they chose differently still has the
same context and is still compared (a near-tie may fall either way, its log-probabilities may not); steps after it are
not. Too few comparable steps is a failure, not a pass.
"""

import random
from dataclasses import dataclass

from prefixonce.step import Mode

TOP = 8
# Rounding of fp32 log-probabilities of size ~10 over a few hundred keys, when a run happens to repeat bit for bit.
FLOOR = 1e-5
# Stock's noise is one sample of the largest of many differences.
MARGIN = 3.0


@dataclass(frozen=True)
class Agreement:
    largest: float
    compared: int
    total: int

    def within(self, noise: "Agreement") -> bool:
        return self.compared >= 0.9 * self.total and self.largest <= MARGIN * max(noise.largest, FLOOR)


def agreement(reference, candidate) -> Agreement:
    """Over the `top` log-probabilities of every comparable step."""
    largest, compared, total = 0.0, 0, 0
    for one, other in zip(reference, candidate, strict=True):
        steps = min(len(one["tokens"]), len(other["tokens"]))
        total += steps
        # SGLang itself sometimes loses the log-probabilities of one step when it retracts a request.
        if any(len(answer["top"]) != len(answer["tokens"]) for answer in (one, other)):
            continue
        for step in range(steps):
            pairs = zip(one["top"][step], other["top"][step], strict=True)
            largest = max(largest, *(abs(a - b) for a, b in pairs))
            compared += 1
            if one["tokens"][step] != other["tokens"][step]:
                break
    return Agreement(largest, compared, total)


def prompt(seed, tokens, *, vocab=4096):
    """Random token ids, the same for the same seed."""
    numbers = random.Random(seed)
    return [numbers.randrange(10, vocab) for _ in range(tokens)]


def request(input_ids, max_new_tokens, **more):
    return {"input_ids": input_ids, "max_new_tokens": max_new_tokens, "top": TOP, **more}


def run(engine, mode, requests, *prefixes):
    """Answers and counters of one path, from an empty cache, so that every path meets the same tree.

    Each prefix is cached by a request of its own that is answered before the others are sent.
    """
    engine.flush()
    assert engine.steer(prefixonce_path=mode.value)
    for prefix in prefixes:
        engine.generate([request(prefix, 1)])
    assert engine.steer(prefixonce_reset=1)
    answers = engine.generate(requests)
    return answers, engine.counters()


def noise_of(engine, reference, requests, *prefixes):
    """Stock's own difference between serving requests together and one by one, from every third of them."""
    engine.flush()
    assert engine.steer(prefixonce_path=Mode.STOCK.value)
    for prefix in prefixes:
        engine.generate([request(prefix, 1)])
    alone = [engine.generate([{**one, "after_s": 0}])[0] for one in requests[::3]]
    return agreement(reference[::3], alone)
