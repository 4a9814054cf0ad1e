"""Targets: met, missed and not on record; the newest launch that holds all a row needs; file and grids agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from harness.builders import H200, held_up, kernel_record, serving_record
from prefixbench import store
from prefixbench.config import config_dir
from prefixbench.config import kernels as kernels_config
from prefixbench.errors import UsageError
from prefixbench.jobs import kernels as kernels_runner
from prefixbench.measures.kernel import registry
from prefixbench.record import Failure, Record
from prefixbench.targets import engine as targets_engine
from prefixbench.targets import kernels as targets_kernels
from prefixbench.targets.table import Cells, EngineTarget, KernelShape, KernelTarget, Targets, read_targets
from prefixbench.verbs import targets as targets_cli

SHAPE = KernelShape(8192, 0, 256, 32, 8, 128, 16, "bfloat16", "shared-contiguous")
ROW = KernelTarget("prefix", SHAPE, ("dense",), ("flashinfer-single-fa2", "flashinfer-single-fa3"), ratio_at_most=0.62)


def launch(number: int, **samples_us: float) -> list[Record]:
    names = {"dense": "dense", "fa2": "flashinfer-single-fa2", "fa3": "flashinfer-single-fa3"}
    return [kernel_record(names[name], number, (us, us, us)) for name, us in samples_us.items()]


@pytest.fixture(scope="module")
def targets() -> Targets:
    return read_targets(config_dir() / "targets.yaml")


def test_a_ratio_is_to_the_fastest_peer_of_the_same_launch() -> None:
    row = targets_kernels.judge(ROW, launch(0, dense=54, fa2=97, fa3=93))
    assert row.measured == pytest.approx(54 / 93)
    assert (row.verdict, row.bound) == ("met", "<= 0.62x")
    assert row.detail == "dense 54.0 us, flashinfer-single-fa3 93.0 us"
    assert targets_kernels.judge(ROW, launch(0, dense=58, fa2=97, fa3=93)).verdict == "missed"


def test_the_newest_launch_that_holds_every_peer_counts() -> None:
    records = [*launch(1, dense=80, fa2=97, fa3=93), *launch(0, dense=50, fa2=97, fa3=93), *launch(2, dense=10, fa2=97)]
    row = targets_kernels.judge(ROW, records)
    assert row.measured == pytest.approx(80 / 93)


def test_ratios_never_cross_launches() -> None:
    row = targets_kernels.judge(ROW, [*launch(0, dense=54), *launch(1, fa2=97, fa3=93)])
    assert (row.verdict, row.measured) == ("no record", None)


def test_a_wrong_or_failed_result_is_no_record_and_says_why() -> None:
    ours, fa2, fa3 = launch(0, dense=10, fa2=97, fa3=93)
    wrong = replace(ours, status="failed", failure=Failure("wrong-result", "largest error 1"))
    row = targets_kernels.judge(ROW, [wrong, fa2, fa3])
    assert (row.verdict, row.detail) == ("no record", "dense is recorded as failed: largest error 1")
    row = targets_kernels.judge(ROW, [ours, fa2, replace(fa3, status="oom")])
    assert (row.verdict, row.detail) == ("no record", "flashinfer-single-fa3 is recorded as oom")


def test_cpu_records_and_cold_timings_do_not_count() -> None:
    on_cpu = [replace(record, labels=("cpu",)) for record in launch(0, dense=54, fa2=97, fa3=93)]
    assert targets_kernels.judge(ROW, on_cpu).verdict == "no record"
    names = ("dense", *ROW.against)
    cold = [kernel_record(name, 0, (10.0,), l2="cold") for name in names]
    assert targets_kernels.judge(ROW, cold).verdict == "no record"


def test_bandwidth_share_and_flags() -> None:
    shape = replace(SHAPE, prefix_tokens=0, suffix_tokens=256)
    target = KernelTarget("suffix", shape, ("paged",), bandwidth_share_at_least=0.88)
    record = kernel_record("paged", 0, (70.0,), prefix_tokens=0, suffix_tokens=256)
    measurement = replace(record.measurement, model_bytes=268_435_456)  # type: ignore[type-var]
    record = replace(record, measurement=measurement, notes={"flags": "clock fell: GPU 0"})
    row = targets_kernels.judge(target, [record])
    assert row.measured == pytest.approx(268_435_456 / 70e-6 / 4.233e12)
    assert row.verdict == "met"
    assert row.detail.endswith("clock fell: GPU 0")


def test_every_kernel_row_has_a_grid_that_measures_it(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_config.register_schema()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = kernels_config.load(compose("kernels", overrides=["kernels=[targets,claims]", "run_id=x"]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    cells = {cell.shape: cell.names for cell in kernels_runner.plan_cells(kernels_config.requests(config), gpu)}
    for target in targets.kernels:
        names = next(names for shape, names in cells.items() if KernelShape(*shape) == target.shape)
        assert {*target.ours, *target.against} <= set(names), target.name
    for shape, names in cells.items():
        for name in names:
            assert registry.named(name).unsupported(shape, gpu) is None, (name, shape)


CELLS = Cells(("llama-3.1-8b",), ("shared-prefix",), (1,), (16384,), (8,))
ENGINE = EngineTarget("headline", CELLS, ("full", "auto"), 5.0)


def serve(path: str, step_s: float, launches: Sequence[int] = (0, 1, 2), **changes: Any) -> list[Record]:
    changes = {"workload": "shared-prefix", "plugin": path != "stock", **changes}
    return [serving_record(path, number, step_s * (1 + number / 1000), **changes) for number in launches]


def test_the_best_of_ours_over_the_best_stock_server() -> None:
    records = [
        *serve("full", 0.014),
        *serve("auto", 0.013),
        *serve("stock", 0.0910, stock_backend="fa3", launches=(3, 4, 5)),
        *serve("stock", 0.0726, launches=(6, 7, 8)),
    ]
    row = targets_engine.judge(ENGINE, records)
    assert row.measured == pytest.approx(0.0726 / 0.013, rel=0.01)
    assert row.verdict == "met"
    assert row.detail.startswith("auto ")
    assert "stock flashinfer" in row.detail
    assert "95% interval" in row.detail


def test_one_launch_has_no_interval_and_the_plugins_own_stock_is_no_baseline() -> None:
    row = targets_engine.judge(ENGINE, [*serve("auto", 0.02, (0,)), *serve("stock", 0.07, (1,))])
    assert row.verdict == "missed"
    assert row.detail.endswith("n = 1, no interval")
    row = targets_engine.judge(ENGINE, [*serve("auto", 0.02), *serve("stock", 0.2, plugin=True)])
    assert row.verdict == "no record"


def test_the_lowest_cell_counts_and_a_missing_cell_leaves_no_figure() -> None:
    target = replace(ENGINE, cells=replace(CELLS, prefix_tokens=(512, 16384)), ours=("auto",), ratio_at_least=0.99)
    both = [*serve("auto", 0.01), *serve("stock", 0.07)]
    row = targets_engine.judge(target, both)
    assert (row.verdict, row.measured) == ("no record", None)
    assert row.detail == "1 of 2 cells lack ours or stock: 512 x 8; lowest of the others: 7.000 at 16384 x 8"
    slower = [*serve("auto", 0.0102, prefix_tokens=512), *serve("stock", 0.0100, prefix_tokens=512)]
    row = targets_engine.judge(target, [*both, *slower])
    assert row.measured == pytest.approx(100 / 102, rel=0.001)
    assert row.verdict == "missed"
    assert "at 512 x 8, the lowest of 2" in row.detail


def test_a_launch_that_was_held_up_counts_and_is_named() -> None:
    ours = serve("auto", 0.01)
    quiet = targets_engine.judge(ENGINE, [*ours, *serve("stock", 0.07)])
    assert "held up" not in quiet.detail
    row = targets_engine.judge(ENGINE, [*ours[:2], held_up(ours[2], 1.3, 0.5), *serve("stock", 0.07)])
    assert "tok/s (held up in 1 of 3 launches), stock" in row.detail
    assert row.measured is not None
    assert quiet.measured is not None
    assert row.measured < quiet.measured


def test_a_cell_in_which_fewer_were_in_flight_is_not_compared() -> None:
    fewer = serve("auto", 0.01, counter_changes={"batch_histogram": {7: 100}})
    row = targets_engine.judge(ENGINE, [*fewer, *serve("stock", 0.07)])
    assert (row.verdict, row.measured) == ("no record", None)
    assert row.detail == "1 of 1 cells lack ours or stock: 16384 x 8 (in flight 7, with stock 8)"


def test_other_sizes_other_devices_and_older_code_do_not_count() -> None:
    a100 = replace(H200, gpus=(replace(H200.gpus[0], name="NVIDIA A100"),))
    stock = serve("stock", 0.07)
    assert targets_engine.judge(ENGINE, [*serve("auto", 0.01, environment=a100), *stock]).verdict == "no record"
    assert targets_engine.judge(ENGINE, [*serve("auto", 0.01, output_tokens=9), *stock]).verdict == "no record"
    old = [replace(record, notes={"plugin_source": "old"}) for record in serve("auto", 0.01, (0, 1))]
    new = [replace(record, notes={"plugin_source": "new"}) for record in serve("auto", 0.02, (5, 6))]
    row = targets_engine.judge(ENGINE, [*old, *new, *stock])
    assert row.measured == pytest.approx(0.07 / 0.02, rel=0.01)


def test_unlisted_sizes_mean_every_one_on_record(targets: Targets) -> None:
    (target,) = [target for target in targets.engine if target.cells.workload == ("distinct",)]
    assert targets_engine.judge(target, []).verdict == "no record"
    changes = {"workload": "distinct", "prefix_tokens": 2048}
    records = [*serve("auto", 0.01, **changes), *serve("stock", 0.01, **changes)]
    assert targets_engine.judge(target, records).verdict == "met"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernels: []\nengin: []\n", "engine: Field required"),
        ("kernels: [{name: a, ours: [dense], against: [x], ratio: 1}]\nengine: []\n", "kernels.0"),
        ("kernels: [", "targets.yaml"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refusal:
        read_targets(path)
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_verb_fails_while_a_row_is_missed_and_passes_when_all_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(
        "kernels:\n  - name: prefix\n    shape: {prefix_tokens: 8192, suffix_tokens: 0, batch: 256, q_heads: 32,\n"
        "      kv_heads: 8, head_dim: 128, page_size: 16, dtype: bfloat16, layout: shared-contiguous}\n"
        "    ours: [dense]\n    against: [flashinfer-single-fa2]\n    ratio_at_most: 0.62\nengine: []\n"
    )
    runs = tmp_path / "runs"
    arguments = ["--runs", str(runs), "--file", str(path)]
    assert targets_cli.main(["kernels", *arguments]) == 1
    assert "no record" in capsys.readouterr().out
    for record in launch(0, dense=54, fa2=97):
        store.save(record, runs / "reference", {})
    assert targets_cli.main(["kernels", *arguments]) == 0
    assert "met          0.557   <= 0.62x  prefix" in capsys.readouterr().out
    assert targets_cli.main(["engine", *arguments]) == 1, "an empty table proves nothing"
    for record in launch(1, dense=70, fa2=97):
        store.save(record, runs / "reference", {})
    assert targets_cli.main(["kernels", *arguments]) == 1
