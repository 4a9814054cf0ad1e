"""The client's side of teacher forcing: draws the tokens to force, and scores them on a running server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prefixbench.engines.base import ServerFailedError
from prefixbench.engines.forced_tokens import REPORT_IDS, decode_report, processor, report_ids

SERVER_ARGS = ("--enable-custom-logit-processor",)

Tokens = tuple[tuple[int, ...], ...]


class Generates(Protocol):
    def generate(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """SGLang's /generate for a batch of prompts, answered as a whole."""


@dataclass(frozen=True)
class Scores:
    """`[requests][decode tokens]`: natural log-probability of each forced token, and what would have been chosen."""

    logprobs: tuple[tuple[float, ...], ...]
    argmax: Tokens


def draw(server: Generates, prompts: Sequence[Sequence[int]], tokens: int, vocab: int) -> Tokens:
    """`tokens` that the model itself says after each prompt, at temperature 1: where a user's tokens would lie."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    answers = server.generate({"input_ids": [list(p) for p in prompts], "sampling_params": sampling})
    last = vocab - REPORT_IDS
    return tuple(tuple(t if t < last else t - REPORT_IDS for t in answer["output_ids"]) for answer in answers)


def score(server: Generates, prompts: Sequence[Sequence[int]], forced: Tokens, vocab: int) -> Scores:
    """Decodes `forced` after the prompts, all requests in one batch. The first token is the prefill's and left out.

    ServerFailedError when the server said other tokens than it was told to, or values that are not finite.
    """
    sampling = [
        {"temperature": 0, "max_new_tokens": len(row), "ignore_eos": True, "custom_params": {"forced": list(row)}}
        for row in forced
    ]
    answers = server.generate(
        {
            "input_ids": [list(p) for p in prompts],
            "sampling_params": sampling,
            "return_logprob": True,
            "token_ids_logprob": report_ids(vocab),
            "custom_logit_processor": processor(),
        }
    )
    rows = [_reports(answer, row) for answer, row in zip(answers, forced, strict=True)]
    return Scores(tuple(tuple(p for p, _ in row) for row in rows), tuple(tuple(c for _, c in row) for row in rows))


def _reports(answer: Mapping[str, Any], forced: Sequence[int]) -> list[tuple[float, int]]:
    if tuple(answer["output_ids"]) != tuple(forced):
        raise ServerFailedError("the server decoded other tokens than the forced ones; nothing can be compared")
    steps = answer["meta_info"]["output_token_ids_logprobs"][1:]
    found = [decode_report([value for value, *_ in step]) for step in steps]
    reports = [report for report in found if report is not None]
    if len(reports) != len(forced) - 1:
        raise ServerFailedError(
            f"{len(forced) - 1 - len(reports)} of {len(forced) - 1} log-probabilities of a request are not finite"
        )
    return reports
