"""Teacher forcing without a server: what the logit processor reports is what the model's own logits say."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from prefixbench.engines import forcing
from prefixbench.engines.base import ServerFailedError
from prefixbench.engines.forced_tokens import ForcedTokens, decode_report, processor, report_ids

VOCAB = 96


def logits(seed: int, rows: int = 5, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sampled(row: torch.Tensor) -> tuple[int, list[float]]:
    """What SGLang's greedy sampler makes of a processed row: the token, and the log-probabilities at the report ids."""
    return int(row.argmax()), row.log_softmax(-1)[report_ids(VOCAB)].tolist()


@pytest.mark.parametrize("scale", [0.0, 0.01, 4.0, 60.0])
def test_a_report_is_the_model_s_own_log_probability_to_the_last_bit(scale: float) -> None:
    model = logits(1, scale=scale)
    forced = [3, 90, 41, 0, 7]
    answer = ForcedTokens()(model.clone(), [{"forced": [token]} for token in forced])
    for row, token in enumerate(forced):
        said, values = sampled(answer[row])
        report = decode_report(values)
        assert said == token
        assert report is not None
        truth = float(model[row].log_softmax(-1)[token])
        assert report[0] == pytest.approx(truth, rel=2e-7, abs=1e-10)
        assert report[1] == int(model[row].argmax())


def test_each_request_has_its_own_place_whatever_rows_share_its_batch() -> None:
    first, second = {"forced": [11, 12, 13]}, {"forced": [21, 22]}
    batches = [[first], [first, second], [second, first], [second]]
    said = [
        [sampled(row)[0] for row in ForcedTokens()(logits(step, len(batch)), batch)]
        for step, batch in enumerate(batches)
    ]
    # The last step is beyond the second request's end, as overlap scheduling runs it.
    assert said == [[11], [12, 21], [22, 13], [22]]


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_no_report(broken: float) -> None:
    model = logits(2, 1)
    model[0, 5] = broken
    answer = torch.nan_to_num(ForcedTokens()(model, [{"forced": [5]}]), nan=-1e30, posinf=1e30, neginf=-1e30)
    assert decode_report(sampled(answer[0])[1]) is None
    assert decode_report([None, -130.0]) is None


def test_the_request_names_the_class_in_sglang_s_format() -> None:
    named = json.loads(processor())["callable"]
    assert pickle.loads(bytes.fromhex(named)) is ForcedTokens


class Parrot:
    """A server whose model is a table of logits by (request, step); `slip` makes it say another token."""

    def __init__(self, slip: bool = False) -> None:
        self.slip = slip
        self.bodies: list[Mapping[str, Any]] = []

    def generate(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        self.bodies.append(body)
        if "custom_logit_processor" not in body:
            length = body["sampling_params"]["max_new_tokens"]
            return [{"output_ids": [VOCAB - 1, VOCAB - 2, *range(length - 2)]} for _ in body["input_ids"]]
        params = [dict(sampling["custom_params"]) for sampling in body["sampling_params"]]
        force, answers = ForcedTokens(), [([], []) for _ in params]
        for step in range(body["sampling_params"][0]["max_new_tokens"]):
            for (ids, reports), row in zip(answers, force(logits(step, len(params)), params), strict=True):
                said, values = sampled(row)
                ids.append(said + self.slip)
                reports.append([(v, i, None) for v, i in zip(values, body["token_ids_logprob"], strict=True)])
        return [{"output_ids": ids, "meta_info": {"output_token_ids_logprobs": r}} for ids, r in answers]


def test_scores_leave_out_the_prefill_s_token() -> None:
    forced = ((1, 2, 3), (4, 5, 6))
    scores = forcing.score(Parrot(), [(7,), (8,)], forced, VOCAB)
    for request, row in enumerate(forced):
        for step, token in enumerate(row[1:], start=1):
            truth = logits(step, 2)[request]
            assert scores.logprobs[request][step - 1] == pytest.approx(float(truth.log_softmax(-1)[token]), rel=2e-7)
            assert scores.argmax[request][step - 1] == int(truth.argmax())
    assert [len(row) for row in scores.logprobs] == [2, 2]


def test_a_server_that_says_other_tokens_is_not_believed() -> None:
    with pytest.raises(ServerFailedError, match="other tokens than the forced ones"):
        forcing.score(Parrot(slip=True), [(7,)], ((1, 2, 3),), VOCAB)


def test_drawn_tokens_never_need_the_ids_that_carry_reports() -> None:
    server = Parrot()
    assert forcing.draw(server, [(7,), (8,)], 4, VOCAB) == ((VOCAB - 3, VOCAB - 4, 0, 1),) * 2
    assert server.bodies[0]["sampling_params"]["temperature"] == 1.0
