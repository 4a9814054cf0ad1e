"""`prefixbench numerics` around a server that is not there: what is asked, what counts as proof, what is recorded."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from prefixbench import store
from prefixbench.analysis.numerics import verdicts
from prefixbench.case import NumericsCase
from prefixbench.config import config_dir
from prefixbench.config import numerics as numerics_config
from prefixbench.config.numerics import NO_FAULT, NumericsConfig, cases, server_config
from prefixbench.engines import sglang
from prefixbench.engines.base import ServerFailedError
from prefixbench.errors import UsageError
from prefixbench.measures.numerics import not_proven
from prefixbench.record import Record, StepCounters
from prefixbench.verbs import numerics as numerics_cli

NOTHING = StepCounters({}, 0, 0, 0, 0, 0, {})


def load(*overrides: str) -> NumericsConfig:
    numerics_config.register_schema()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return numerics_config.load(compose("numerics", overrides=list(overrides)))


def planned(config: NumericsConfig, fault: str = NO_FAULT) -> tuple[NumericsCase, ...]:
    return cases(config, server_config(config, fault), fault)


def test_the_paths_and_the_control_are_asked_of_servers_that_differ_in_the_fault() -> None:
    config = load("numerics=one-gpu", "paths=[cascade,full]", "control=[full]")
    clean, control = planned(config), planned(config, "zero-prefix")
    assert [(c.role, c.path, c.concurrency) for c in clean] == [
        ("reference", "stock", 64),
        ("noise", "stock", 8),
        ("path", "cascade", 64),
        ("path", "full", 64),
    ]
    assert [(c.role, c.path) for c in control] == [("reference", "stock"), ("noise", "stock"), ("path", "full")]
    assert {c.fault for c in clean} == {"none"}
    assert {c.fault for c in control} == {"zero-prefix"}
    # The fault reaches only kernels that are handed their K/V anew, so the control runs without graphs.
    assert {c.engine_settings["cuda_graph_max_bs"] for c in clean} == {64}
    assert {c.engine_settings["cuda_graph_max_bs"] for c in control} == {0}
    assert all("--enable-custom-logit-processor" in str(c.engine_settings["extra_args"]) for c in (*clean, *control))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("paths=[fast]", "paths 'fast' is unknown"),
        ("paths=[]", "paths=.*allowed are one or more of"),
        ("control=[stock]", "a fault in the plugin cannot reach stock"),
        ("control_fault=sleep-us", "control_fault 'sleep-us' is unknown"),
        ("model=llama-3.1-8b", "dummy weights, under which attention does not reach the output"),
        ("engine=fake", "log-probabilities need a real model"),
        ("noise_concurrency=3", "must divide concurrency=16"),
        ("noise_concurrency=16", "and be smaller"),
        ("concurrency=8", "concurrency=8: must be at least 10"),
        ("prefix_len=40000", "tiny takes 32768"),
        ("gpus.count=2", "tensor parallelism needs GPUs"),
    ],
)
def test_what_cannot_prove_anything_is_refused_in_one_line(override: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        load(override)


CASE = replace(planned(load())[2], path="full")
PROOF = StepCounters({"dense": 65, "stock": 0}, 65 * 16, 65, 0, 0, 0, {16: 65})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"steps": {"dense": 60, "stock": 5}}, "served by stock on 5 steps"),
        ({"batch_histogram": {16: 64, 15: 1}}, "the batch was 15, 16 where 16 was asked for"),
        ({"batch_histogram": {}}, "never decoded"),
        ({"steps": {"dense": 63}}, "63 decode steps were counted, 64 were compared"),
    ],
)
def test_counters_must_prove_that_the_path_decoded_everything(changes: dict[str, Any], why: str | None) -> None:
    said = not_proven(CASE, replace(PROOF, **changes))
    assert said is None if why is None else why in str(said)


class Pretender:
    """In place of a server: log-probabilities are noise around a function of the tokens; a fault shifts our paths."""

    startup_s, command = 1.0, ("pretended",)

    def __init__(self, fault: str | None, dies_on: str | None) -> None:
        self.fault, self.dies_on = fault, dies_on
        self.path = ""
        self.counted = NOTHING
        self.noise = random.Random(1)

    def set_path(self, path: str) -> None:
        self.path = path
        if path == self.dies_on:
            raise ServerFailedError("the server ended with code -9: it was killed")

    def flush(self) -> bool:
        return True

    def prime(self, prompt: Sequence[int]) -> None:
        assert len(prompt) == 512

    def counters(self) -> StepCounters:
        return self.counted

    def stop(self) -> None: ...

    def generate(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        prompts = body["input_ids"]
        if "custom_logit_processor" not in body:
            return [{"output_ids": list(range(100, 100 + body["sampling_params"]["max_new_tokens"]))} for _ in prompts]
        rows = [sampling["custom_params"]["forced"] for sampling in body["sampling_params"]]
        ran = {"full": "dense", "auto": "dense"}.get(self.path, self.path)
        steps = len(rows[0]) - 1
        before = self.counted
        self.counted = replace(
            before,
            steps={**before.steps, ran: before.steps.get(ran, 0) + steps},
            batch_histogram={
                **before.batch_histogram,
                len(rows): before.batch_histogram.get(len(rows), 0) + steps,
            },
        )
        return [{"output_ids": row, "meta_info": {"output_token_ids_logprobs": self._reports(row)}} for row in rows]

    def _reports(self, row: Sequence[int]) -> list[list[tuple[float, int, None]]]:
        shift = 2.0 if self.fault and self.path != "stock" else 0.0
        logprobs = [-0.01 * token - shift + self.noise.gauss(0.0, 0.001) - 1.0 for token in row]
        return [[(p * 2**20 - 128, 0, None), (-7.0 - 128, 0, None)] for p in logprobs]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[Record]]]:
    def run(*overrides: str, dies_on: str | None = None, is_deaf: bool = False) -> tuple[int, list[Record]]:
        def start(self: object, plugin: bool, seed: int, log: Path, fault: str | None = None) -> Pretender:
            assert plugin
            return Pretender(None if is_deaf else fault, dies_on)

        monkeypatch.setattr(sglang.SglangEngine, "start", start)
        monkeypatch.setattr(sglang.SglangEngine, "check", lambda self: None)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        code = numerics_cli.main([f"runs={tmp_path}/runs", *overrides])
        return code, store.load("latest", tmp_path / "runs")

    return run


def test_every_case_becomes_a_record_and_the_control_a_failed_one(
    pretend: Callable[..., tuple[int, list[Record]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, records = pretend("paths=[cascade,full]")
    assert code == 0
    assert len(records) == 2 * 4
    failed = [r for r in records if r.status != "ok"]
    assert {(r.case.path, r.case.fault) for r in failed} == {("cascade", "zero-prefix"), ("full", "zero-prefix")}
    assert all("zero-prefix is planted, so this is what must happen" in str(r.failure) for r in failed)
    assert all({"cpu", "random-weights", "synthetic-prompts"} == set(r.labels) for r in records)
    assert [v.said for v in verdicts(records)] == ["inside", "inside", *["outside, as it must be"] * 2]
    shown = capsys.readouterr().out
    assert "stock, its noise" in shown
    assert "FAULT PLANTED: zero-prefix" in shown
    assert "8 cases recorded, 4 of 4 verdicts as they must be" in shown


def test_a_control_that_nobody_notices_is_an_error(pretend: Callable[..., tuple[int, list[Record]]]) -> None:
    code, records = pretend("paths=[cascade]", "control=[cascade]", is_deaf=True)
    assert code == 1
    assert verdicts(records)[-1].said == "inside, though it must not be"


def test_a_server_that_dies_leaves_records_of_what_it_had_not_reached(
    pretend: Callable[..., tuple[int, list[Record]]],
) -> None:
    code, records = pretend("paths=[cascade,full,auto]", "control=[]", dies_on="full")
    assert code == 1
    found = {r.case.path: r.status for r in records if r.case.role == "path"}
    assert found == {"cascade": "ok", "full": "failed", "auto": "failed"}
