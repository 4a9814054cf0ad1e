"""outside: both clients are kept pair by pair; neither a real difference nor a wide interval counts as agreement."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from harness.builders import SERVING, block, request, wrap
from prefixbench import store
from prefixbench.analysis.outside import agreements, judge, speed_ups, tpot_ms
from prefixbench.analysis.stats import mean_interval
from prefixbench.case import OutsideCase, ServingCase
from prefixbench.engines import bench_serving, tokenizer
from prefixbench.engines.base import ServerFailedError
from prefixbench.engines.bench_serving import BenchServing, Load, arguments, read_block
from prefixbench.errors import UsageError
from prefixbench.record import OutsideBlock, OutsideMeasurement, OutsidePair, Record
from prefixbench.verbs import outside as outside_cli
from prefixbench.workloads import PromptSpec

TOKENS = 65


def theirs(step_s: float, wall_s: float, count: int = 8) -> OutsideBlock:
    spans = (step_s * (TOKENS - 1),) * count
    return OutsideBlock(0, wall_s, 100, (TOKENS,) * count, (1.0,) * count, spans, count * TOKENS / wall_s, 1e3 * step_s)


def record(path: str, plugin: bool, slower: Sequence[float], step_s: float = 0.01) -> Record:
    """One pair for each factor by which the other client's block took longer than ours."""
    requests = [request(1.0, step_s, TOKENS, per_chunk=8)] * 8
    wall_s = 1.0 + step_s * (TOKENS - 1)
    pairs = tuple(OutsidePair(block(requests), theirs(step_s * by, wall_s * by), None) for by in slower)
    serving = ServingCase(**{**vars(SERVING), "path": path, "plugin": plugin})
    return wrap(OutsideCase(serving, bench_serving.MODULE, "autobench"), OutsideMeasurement(pairs))


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [
        ([1.01, 1.0, 0.99], "agree"),
        ([1.12, 1.11, 1.13], "differ"),
        ([1.2, 0.9, 1.0], "undecided"),
        ([1.0], "undecided"),
    ],
)
def test_agreement_needs_a_narrow_interval_around_one(slower: list[float], verdict: str) -> None:
    found = agreements([record("full", True, slower)])
    assert [agreement.figure for agreement in found] == ["output tok/s", "ms per output token"]
    assert {agreement.verdict for agreement in found} == {verdict}
    assert found[1].ours == pytest.approx(10.0)


def test_a_ratio_within_the_tolerance_is_not_enough_when_its_interval_is_not() -> None:
    assert judge(mean_interval([1.02, 1.021, 1.019]), 0.05) == "agree"
    assert judge(mean_interval([1.02, 1.08, 0.96]), 0.05) == "undecided"


def test_time_per_token_counts_the_tokens_between_first_and_last_chunk() -> None:
    assert tpot_ms(block([request(1.0, 0.02, TOKENS, per_chunk=8), request(3.0, 0.04, TOKENS)])) == pytest.approx(30.0)


def test_both_clients_have_a_speed_up_of_their_own() -> None:
    stock, full = record("stock", False, [1.0, 1.01], step_s=0.02), record("full", True, [1.0, 0.99])
    (gain,) = speed_ups([stock, full])
    assert gain.case.serving.path == "full"
    assert gain.ours.estimate == pytest.approx((1.0 + 1.28) / (1.0 + 0.64))
    assert gain.theirs.estimate == pytest.approx(gain.ours.estimate, rel=0.02)
    assert gain.theirs.method == "Fieller, unpaired", "blocks of two servers are not pairs"


class FakeClient:
    """Reports what it was asked for; `fails` says what happens instead."""

    def __init__(self, fails: str | None = None) -> None:
        self.loads: list[Load] = []
        self.fails = fails

    def run(self, url: str, model: Path, load: Load, position: int, timeout_s: float) -> OutsideBlock:
        self.loads.append(load)
        if self.fails is not None:
            raise ServerFailedError(self.fails)
        return theirs(0.01, 1.0, len(load.requests))


def run_with(client: FakeClient, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(outside_cli, "BenchServing", lambda: nullcontext(client))
    return outside_cli.main(["engine=fake", 'engine.extra_args=["latency_s=0.01"]', "--tolerance", "1e9", *words])


def test_clients_take_turns_on_servers_with_and_without_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client, runs = FakeClient(), f"runs={tmp_path}"
    assert run_with(client, monkeypatch, runs, "concurrency=8") == 0
    records = store.load("latest", tmp_path)
    cases = {(r.case.serving.path, r.case.serving.plugin) for r in records if isinstance(r.case, OutsideCase)}
    assert cases == {("stock", False), ("full", True)}
    for made in records:
        assert isinstance(made.measurement, OutsideMeasurement)
        assert len(made.measurement.pairs) == 3
        assert len({pair.ours.position for pair in made.measurement.pairs}) == 3
        for pair in made.measurement.pairs:
            assert (pair.counters is not None) is made.case.serving.plugin
            assert all(r.cached_tokens for r in pair.ours.requests), "ours was primed"
    sent = client.loads[0]
    assert (len(sent.requests), sent.in_flight, sent.prefix_tokens) == (8, 8, 2048)
    assert "times stock without the plugin" in capsys.readouterr().out
    assert run_with(client, monkeypatch, runs, "concurrency=8") == 0
    assert len(client.loads) == 6, "a second run measures nothing again"


def test_a_client_that_fails_is_a_record_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(FakeClient("no such data set"), monkeypatch, f"runs={tmp_path}") == 1
    records = store.load("latest", tmp_path)
    assert [(made.status, made.measurement) for made in records] == [("failed", None)]
    assert records[0].failure is not None
    assert "no such data set" in records[0].failure.message
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("workload=churn",), "arrival times"),
        (("workload=distinct", "--data-set", "generated-shared-prefix"), "workload=shared-prefix"),
        (("engine.tokenizer=false",), "engine.tokenizer=true"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=told):
        run_with(FakeClient(), monkeypatch, f"runs={tmp_path}", *words)


@pytest.mark.parametrize("data_set", bench_serving.DATA_SETS)
def test_every_option_is_one_that_sglang_takes(data_set: str, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "benchmark" / "serving.py").read_text()
    load = Load(data_set, (PromptSpec((1,) * 20, 5),) * 3, 16, 3, 1)
    words = arguments(load, "http://x", tmp_path, tmp_path / "p", tmp_path / "o")
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in source] == []
    assert f'"{data_set}"' in source
    told = dict(itertools.pairwise(words))
    if load.primes_itself:
        assert (told["--gsp-system-prompt-len"], told["--gsp-question-len"]) == ("16", "4")
    else:
        assert told["--dataset-path"] == str(tmp_path / "p")


def test_a_block_with_a_failed_request_is_no_block() -> None:
    data = {
        "errors": ["", ""],
        "duration": 2.0,
        "total_input_tokens": 40,
        "output_lens": [5, 5],
        "ttfts": [0.5, 0.6],
        "itls": [[0.1] * 4, [0.2] * 4],
        "output_throughput": 5.0,
        "mean_tpot_ms": 150.0,
    }
    made = read_block(data, 3)
    assert made.decode_s == (pytest.approx(0.4), pytest.approx(0.8))
    with pytest.raises(ServerFailedError, match="1 of 2 requests"):
        read_block({**data, "errors": ["", "HTTP 500"]}, 3)


def test_the_words_of_sglang_s_client_explain_its_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = Load("autobench", (PromptSpec((1, 2), 5),), 1, 1, 1)
    failing = 'import json, sys; sys.stdin.readline(); print("#failed " + json.dumps("A\\nValueError: no model"))'
    monkeypatch.setattr(bench_serving, "_DRIVER", failing)
    with BenchServing() as client, pytest.raises(ServerFailedError, match="ValueError: no model"):
        client.run("http://x", tmp_path, load, 0, 300.0)
    monkeypatch.setattr(bench_serving, "_DRIVER", "import time; time.sleep(60)")
    with BenchServing() as client, pytest.raises(ServerFailedError, match="without a word"):
        client.run("http://x", tmp_path, load, 0, 0.2)


def test_text_of_the_written_tokenizer_comes_back_as_the_same_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer.ensure(tmp_path, 100)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [0, 99, 7, 7, 42]
    assert loaded.encode(f"{loaded.decode(ids)}\n\n{loaded.decode(ids)}").ids == ids * 2
    before = (tmp_path / "tokenizer.json").stat().st_mtime_ns
    tokenizer.ensure(tmp_path, 50)
    assert (tmp_path / "tokenizer.json").stat().st_mtime_ns == before, "a checkpoint's own tokenizer is left alone"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["unk_token"] == "t0"


def test_an_undecided_comparison_says_what_narrows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert outside_cli.report([record("full", True, [1.2, 0.9, 1.0])], 0.05, Console()) == 0
    assert "measure.blocks" in capsys.readouterr().out
    assert outside_cli.report([record("full", True, [1.2, 1.2, 1.21])], 0.05, Console()) == 1
