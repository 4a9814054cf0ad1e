"""ShareGPT turns behind a shared prefix: from the user's file, or with lengths drawn from a stated distribution."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefixbench.case import Settings
from prefixbench.errors import UsageError
from prefixbench.workloads.base import Draft, PromptSpec, Sizes, Tokens
from prefixbench.workloads.sharegpt_file import Rejection, Turn, read_sharegpt

_PIECE = re.compile(r"\w{1,4}|[^\w\s]")


@dataclass(frozen=True)
class ShareGptOptions:
    """`file` None draws log-normal lengths instead; the default means are those published for ShareGPT by vLLM.

    `tokenizer`: a Hugging Face tokenizer (folder or hub id); None cuts words into pieces of four letters and hashes
    each, which keeps lengths and repetitions realistic without a vocabulary. `outputs`: "fixed" gives every request
    `output_tokens`; "reply" gives the reply's own length, `output_tokens` at most. `requests` None: as many as are in
    flight; `allow_fewer` accepts a file with fewer usable rows.
    """

    file: str | None = None
    tokenizer: str | None = None
    outputs: str = "fixed"
    requests: int | None = None
    allow_fewer: bool = False
    prompt_mean_tokens: float = 161.0
    prompt_sigma: float = 1.0
    reply_mean_tokens: float = 338.0
    reply_sigma: float = 0.8


@dataclass(frozen=True, slots=True)
class _Exchange:
    prompt: tuple[int, ...]
    reply_tokens: int


def sharegpt(sizes: Sizes, options: ShareGptOptions, tokens: Tokens) -> Draft:
    """`prefix_tokens` of random tokens shared by all, then one ShareGPT prompt each, `suffix_tokens` at most."""
    wanted = sizes.concurrency if options.requests is None else options.requests
    if wanted < 1 or sizes.suffix_tokens < 1:
        raise UsageError("workload sharegpt: requests and suffix_tokens (the longest prompt) must be at least 1")
    if options.outputs not in ("fixed", "reply"):
        raise UsageError(f"workload sharegpt: outputs={options.outputs!r}; allowed: fixed, reply")
    drawn = _from_file if options.file is not None else _from_distribution
    exchanges, note = drawn(sizes, options, tokens, wanted)
    prefix = tokens.text(sizes.prefix_tokens)
    is_fixed = options.outputs == "fixed"
    requests = tuple(
        PromptSpec(
            prefix + exchange.prompt,
            sizes.output_tokens if is_fixed else max(1, min(exchange.reply_tokens, sizes.output_tokens)),
            prefix_id=0 if prefix else None,
        )
        for exchange in exchanges
    )
    return Draft(requests, (prefix,) if prefix else (), note)


def _from_distribution(
    sizes: Sizes, options: ShareGptOptions, tokens: Tokens, wanted: int
) -> tuple[list[_Exchange], Settings]:
    if min(options.prompt_mean_tokens, options.reply_mean_tokens, options.prompt_sigma, options.reply_sigma) <= 0:
        raise UsageError("workload sharegpt: means and sigmas must be positive")
    prompts = _lengths(tokens.rng, options.prompt_mean_tokens, options.prompt_sigma, wanted)
    replies = _lengths(tokens.rng, options.reply_mean_tokens, options.reply_sigma, wanted)
    texts = tokens.texts([min(length, sizes.suffix_tokens) for length in prompts])
    note: Settings = {
        "label": "synthetic-lengths",
        "length_distribution": "log-normal, cut at suffix_tokens and output_tokens",
        "prompt_mean_tokens": options.prompt_mean_tokens,
        "prompt_sigma": options.prompt_sigma,
        "reply_mean_tokens": options.reply_mean_tokens,
        "reply_sigma": options.reply_sigma,
    }
    return [_Exchange(text, reply) for text, reply in zip(texts, replies, strict=True)], note


def _lengths(rng: np.random.Generator, mean: float, sigma: float, count: int) -> list[int]:
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, size=count)
    return [max(1, round(float(length))) for length in drawn]


def _from_file(sizes: Sizes, options: ShareGptOptions, tokens: Tokens, wanted: int) -> tuple[list[_Exchange], Settings]:
    path = Path(str(options.file))
    rows = read_sharegpt(path)
    encode = _encoder(options.tokenizer, tokens)
    usable: list[tuple[Turn, _Exchange]] = []
    rejected = list(rows.rejected)
    for turn in rows.accepted:
        prompt = encode(turn.prompt)
        if 0 < len(prompt) <= sizes.suffix_tokens:
            usable.append((turn, _Exchange(prompt, len(encode(turn.reply)))))
        else:
            reason = "prompt is longer than suffix_tokens" if prompt else "prompt has no tokens"
            rejected.append(Rejection(turn.row, reason))
    if not usable or (len(usable) < wanted and not options.allow_fewer):
        raise UsageError(
            f"ShareGPT file {path}: {wanted} prompts were asked for, {len(usable)} of its "
            f"{len(rows.accepted) + len(rows.rejected)} rows are usable ({_reasons(rejected)}); "
            "ask for fewer or set allow_fewer=true"
        )
    order = tokens.rng.permutation(len(usable))[:wanted]
    chosen = [usable[int(i)] for i in order]
    note: Settings = {
        "file": path.name,
        "tokenizer": options.tokenizer or "hashed pieces of four letters",
        "rows": len(rows.accepted) + len(rows.rejected),
        "rows_accepted": len(usable),
        "rows_rejected": len(rejected),
        "rows_duplicate": sum(turn.is_duplicate for turn, _ in usable),
        "rejected": _reasons(rejected),
        "prompts": f"{len(chosen)} of {wanted}",
    }
    return [exchange for _, exchange in chosen], note


def _reasons(rejected: list[Rejection]) -> str:
    counts = Counter(rejection.reason for rejection in rejected)
    return "; ".join(f"{reason}: {count}" for reason, count in sorted(counts.items())) or "none rejected"


def _encoder(tokenizer: str | None, tokens: Tokens) -> Callable[[str], tuple[int, ...]]:
    if tokenizer is None:
        room = tokens.high - tokens.low
        return lambda text: tuple(tokens.low + zlib.crc32(piece.encode()) % room for piece in _PIECE.findall(text))
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UsageError(f"workload sharegpt: tokenizer={tokenizer!r} does not load: {first_line}") from error
    return lambda text: tuple(int(token) for token in loaded.encode(text, add_special_tokens=False))
