"""f and s from kernel records: the shape that was served and no other, exact where it was timed, else between two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

from harness.builders import H200, kernel_record, serving_record
from prefixbench.analysis import frame
from prefixbench.analysis.amdahl import AmdahlCheck
from prefixbench.analysis.claims.scorecard import scorecard
from prefixbench.analysis.kernel_share import derive, kernel_times, measured_or_derived
from prefixbench.config import config_dir
from prefixbench.record import Record
from prefixbench.report.material import Material
from prefixbench.report.sections.amdahl import amdahl_section
from prefixbench.report.view import Note

LLAMA = {"layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
SERVED = {
    "workload": "shared-prefix",
    "concurrency": 4,
    "suffix_tokens": 64,
    "output_tokens": 128,
    "model_settings": LLAMA,
}
SHAPE = {"prefix_tokens": 16384, "batch": 4, "page_size": 1, "suffix_tokens": 128}
_PRESET = "kernels/claims.yaml"
STEP_S, SAVED_S = 0.0726, 32 * (2e-3 - 1.5e-4)


def served(path: str, step_s: float, launch: int = 0, **changes: object) -> Record:
    return serving_record(path, launch, step_s, plugin=path != "stock", **(SERVED | changes))  # type: ignore[arg-type]


def kernels(stock_us: float = 2000, dense_us: float = 150, **changes: object) -> list[Record]:
    """Stock's decode kernel and ours at 128 own tokens, in one kernel launch."""
    timed = (("flashinfer-decode", stock_us), ("dense", dense_us))
    return [kernel_record(name, 7, [us], **(SHAPE | changes)) for name, us in timed]  # type: ignore[arg-type]


def servers(launches: int = 3, **changes: object) -> list[Record]:
    times = (("stock", STEP_S), ("full", STEP_S - SAVED_S))
    return [served(path, s * (0.999 + 0.001 * i), i, **changes) for i in range(launches) for path, s in times]


def derived(records: list[Record], path: str = "full") -> AmdahlCheck | str:
    (point,) = frame.points(frame.launches(frame.blocks(records)))
    return derive(point, path, "stock", kernel_times(frame.kernels(records)))


def test_everything_but_attention_takes_eight_milliseconds_of_the_step() -> None:
    """64 of 72.6 ms are 32 layers of 2 ms each; ours takes 0.15 ms instead."""
    found = derived([*servers(), *kernels()])
    assert isinstance(found, AmdahlCheck)
    assert found.share.estimate == pytest.approx(64 / 72.6)
    assert found.kernel_speedup.estimate == pytest.approx(2000 / 150)
    assert found.predicted.estimate == pytest.approx(STEP_S / (STEP_S - SAVED_S))
    assert found.predicted.estimate == pytest.approx(found.measured.estimate)
    assert found.contradiction is None
    assert found.origin == "derived from kernel records with 128 own tokens"
    assert len(found.record_ids) == 2
    assert found.share.low is None, "one kernel launch has no error bar"


def test_two_kernel_launches_have_an_interval() -> None:
    again = [kernel_record(name, 8, [us], **SHAPE) for name, us in (("flashinfer-decode", 2010), ("dense", 151))]  # type: ignore[arg-type]
    found = derived([*servers(), *kernels(), *again])
    assert isinstance(found, AmdahlCheck)
    assert found.share.low is not None
    assert found.share.contains(32 * 2.005e-3 / STEP_S)


def test_between_two_timed_numbers_of_own_tokens_lies_a_line() -> None:
    cells = [*kernels(1900, 130, suffix_tokens=64), *kernels(2100, 170, suffix_tokens=192)]
    found, exact = derived([*servers(), *cells]), derived([*servers(), *kernels()])
    assert isinstance(found, AmdahlCheck)
    assert isinstance(exact, AmdahlCheck)
    assert found.share.estimate == pytest.approx(exact.share.estimate)
    assert found.predicted.estimate == pytest.approx(exact.predicted.estimate)
    assert found.detail == "with 64 and 192 own tokens"
    one_side = derived([*servers(), *cells[:2]])
    assert "needs 128 own tokens (there are records with 64 own tokens)" in str(one_side)
    far = [*kernels(1900, 130, suffix_tokens=0), *kernels(2100, 170, suffix_tokens=192)]
    assert "no kernel record of this shape" in str(derived([*servers(), *far])), "no own tokens is another launch"


@pytest.mark.parametrize(
    "other",
    [
        {"page_size": 16},
        {"batch": 8},
        {"prefix_tokens": 8192},
        {"q_heads": 16},
        {"head_dim": 64},
        {"dtype": "float16"},
        {"layout": "unique"},
        {"environment": replace(H200, gpus=())},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_kernel_of_another_shape_or_chip_is_not_taken(other: dict[str, object]) -> None:
    found = derived([*servers(), *kernels(**other)])
    assert "no kernel record of this shape" in str(found)
    command = "kernels=axes prefix_len=16384 suffix_len=128 batch=4 q_heads=32 kv_heads=8 head_dim=128 dtype=bfloat16"
    assert f"{command} page_size=[1] implementation=[flashinfer-decode,dense]" in str(found)
    assert ("(there are records at page size 16)" in str(found)) is ("page_size" in other)
    beside = derived([*servers(), *kernels(stock_us=1000, **other), *kernels()])
    assert isinstance(beside, AmdahlCheck)
    assert beside.share.estimate == pytest.approx(64 / 72.6)


def test_heads_are_those_of_one_gpu_and_the_count_of_gpus_is_no_other_chip() -> None:
    pair = replace(H200, gpus=H200.gpus * 2)
    records = servers(tensor_parallel=2, environment=pair)
    assert isinstance(derived([*records, *kernels(q_heads=16, kv_heads=4)]), AmdahlCheck)
    assert isinstance(derived([*records, *kernels()]), str)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": "rollouts"}, "rollouts is not one prefix shared by all"),
        ({"stock_backend": "fa3"}, "no kernel of the stock backend fa3"),
        ({"model_settings": {}}, "do not say the shape of the model"),
        ({"ran": {"dense": 70, "cascade": 57}}, "no single kernel served full: dense 55%"),
        ({"ran": {"stock": 127}}, "stock served 100% of the steps of full"),
    ],
)
def test_what_no_kernel_can_stand_for_is_said(changes: dict[str, object], words: str) -> None:
    assert words in str(derived([*servers(**changes), *kernels()]))


def test_timers_in_the_server_come_first() -> None:
    timed = {"attention_s": 0.5 * 127 * STEP_S, "decode_s": 127 * STEP_S}
    records = [
        serving_record(path, launch, STEP_S, counter_changes=timed, **SERVED)  # type: ignore[arg-type]
        for path in ("stock", "full")
        for launch in range(2)
    ]
    (point,) = frame.points(frame.launches(frame.blocks(records)))
    found = measured_or_derived(point, "full", "stock+plugin", kernel_times(frame.kernels(kernels())))
    assert isinstance(found, AmdahlCheck)
    assert not found.is_derived
    assert found.share.estimate == pytest.approx(0.5)


def test_more_attention_than_step_is_a_contradiction() -> None:
    found = derived([*servers(), *kernels(stock_us=2500)])
    assert isinstance(found, AmdahlCheck)
    assert found.contradiction == "attention alone would take 110% of the step"


def test_scorecard_and_report_say_that_it_is_derived() -> None:
    records = [*servers(), *kernels()]
    finding = next(row.finding for row in scorecard(records) if row.claim_id == "A1")
    assert "derived from kernel records with 128 own tokens" in (finding.measured or "")
    assert {r.record_id for r in kernels()} <= set(finding.record_ids)
    section = amdahl_section(Material(records, ""))
    assert "attention was 88.2% of a stock step and full made it 13.3× faster, by kernel records" in section.finding
    assert any("were not timed in the server" in b.text for b in section.blocks if isinstance(b, Note))
    without = amdahl_section(Material(servers(), ""))
    assert any("recorded by `prefixbench kernels" in b.text for b in without.blocks if isinstance(b, Note))
    assert "no kernel record" in next(r.finding.why for r in scorecard(servers()) if r.claim_id == "A1")


def test_the_preset_times_the_mean_step_of_the_sweep_that_it_is_for() -> None:
    served, timed = (yaml.safe_load((config_dir() / name).read_text()) for name in ("sweep/grid.yaml", _PRESET))
    cells = timed["grids"]["share-of-a-step"]
    assert set(served["prefix_len"]) <= set(cells["prefix_len"])
    assert cells["batch"] in np.atleast_1d(served["concurrency"])
    assert served["suffix_len"] + served["output_len"] / 2 in cells["suffix_len"]
    assert (cells["page_size"], {"dense", "flashinfer-decode"} <= set(cells["implementation"])) == (1, True)
