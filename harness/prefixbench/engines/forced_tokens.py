"""Teacher forcing inside SGLang's sampler: decodes given tokens and reports what the model thought of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# The last ids of the vocabulary carry the report, so they cannot be forced.
REPORT_IDS = 2
# Powers of two keep every bit of the fp32 log-probability; below the offset no report adds to the softmax's sum.
_SCALE = float(2**20)
_OFFSET = 128.0
_NEVER = -1e30


class ForcedTokens:
    """A custom logit processor of SGLang, named in the request and imported by the server.

    `custom_params` of a request: {"forced": [token, ...]}, one for each step. The returned row is no distribution of
    the model: the forced token has all the probability, and the last two ids carry the log-probability that the model
    gave it and the token it would have chosen. SGLang's own log-softmax leaves such a row as it is.
    """

    def __call__(self, logits: Tensor, custom_param_list: Sequence[dict[str, Any]]) -> Tensor:
        """`logits` fp32 [rows, vocab]. SGLang calls this once per step, so the position is counted here: with overlap
        scheduling the request's own list of tokens lags behind."""
        forced = []
        for params in custom_param_list:
            position = params.get("position", 0)
            # A request that ends can run one step more, whose result nobody sees.
            forced.append(params["forced"][min(position, len(params["forced"]) - 1)])
            params["position"] = position + 1
        wanted = logits.new_tensor(forced).long().unsqueeze(1)
        logprob = logits.log_softmax(dim=-1).gather(1, wanted)
        chosen = logits.argmax(dim=-1, keepdim=True).to(logits.dtype)
        answer = logits.new_full(logits.shape, _NEVER)
        answer[:, -2:-1] = logprob * _SCALE - _OFFSET
        answer[:, -1:] = -chosen - _OFFSET
        return answer.scatter_(1, wanted, 0.0)


def processor() -> str:
    """How a request names the processor: SGLang's format, a pickled class in JSON."""
    return json.dumps({"callable": pickle.dumps(ForcedTokens).hex()})


def report_ids(vocab: int) -> list[int]:
    """The ids whose log-probabilities a request has to ask for."""
    return [vocab - 2, vocab - 1]


def decode_report(values: Sequence[float | None]) -> tuple[float, int] | None:
    """(log-probability of the forced token, token the model would have chosen) from the values at `report_ids`; None
    when the model's own were not finite."""
    reported, chosen = values
    if reported is None or chosen is None or not -1e30 < reported <= 0.0:
        return None
    return (reported + _OFFSET) / _SCALE, round(-chosen - _OFFSET)
