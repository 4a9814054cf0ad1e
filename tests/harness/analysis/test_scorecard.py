"""Verdicts: from the right hardware only, never blank, and each of the three can be reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.builders import CPU, kernel_record, serving_record
from prefixbench.analysis.claims.evidence import Finding
from prefixbench.analysis.claims.reported import CLAIM_IDS, load_claims
from prefixbench.analysis.claims.scorecard import VERDICTS, scorecard
from prefixbench.errors import UsageError
from prefixbench.record import PlacementTrace, RadixEvent, Record, Traffic

PREFIX_BYTES = 2 * 8192 * 8 * 128 * 2
HEADLINE = {"concurrency": 256, "output_tokens": 9}


def judge(claim_id: str, records: list[Record]) -> Finding:
    return next(row.finding for row in scorecard(records) if row.claim_id == claim_id)


def headline(rates: dict[str, float], launches: int = 3, **changes: object) -> list[Record]:
    """Decode tok/s by path at the claimed point, 0.5% apart from launch to launch."""
    settings = HEADLINE | changes
    return [
        serving_record(path, launch, 256 / rate * (1 + 0.005 * launch * weight), plugin=path != "stock", **settings)  # type: ignore[arg-type]
        for weight, (path, rate) in enumerate(rates.items(), start=1)
        for launch in range(launches)
    ]


def counted(layout: str, reads: float, **changes: object) -> Record:
    traffic = (Traffic("ncu", int(reads * PREFIX_BYTES), 0, None),)
    name = str(changes.pop("implementation", "dense"))
    return kernel_record(name, traffic=traffic, layout=layout, **changes)  # type: ignore[arg-type]


def trace(*events: RadixEvent) -> PlacementTrace:
    return PlacementTrace(1, 1, {}, events, 0, 100, (), ())


def test_every_claim_has_a_verdict_and_a_reason_without_any_record() -> None:
    rows = scorecard([])
    assert [row.claim_id for row in rows] == list(CLAIM_IDS)
    assert {row.verdict for row in rows} == {"not run here"}
    assert all(row.finding.why and row.claim.reported and row.claim.formula for row in rows)


def test_the_reported_point_is_reproduced() -> None:
    records = headline({"stock": 1360, "cascade": 2800, "full": 2943})
    r1, r2 = judge("R1", records), judge("R2", records)
    assert r1.verdict == r2.verdict == "reproduced"
    assert "2.1" in (r1.measured or "")
    assert r1.estimate is not None
    assert r1.estimate.low is not None
    assert r2.estimate is not None
    assert r2.estimate.estimate == pytest.approx(0.91, abs=0.01)
    assert "(time per token)" in (r2.measured or "")
    assert len(r1.record_ids) == 9
    assert r1.hardware == "NVIDIA H200"


def test_less_than_reported_differs() -> None:
    records = headline({"stock": 1360, "cascade": 1700, "full": 2300})
    assert judge("R1", records).verdict == "differs"
    assert judge("R2", records).verdict == "differs"


def test_a_cpu_reproduces_no_gpu_claim_and_is_shown_as_what_it_is() -> None:
    records = headline({"stock": 1360, "cascade": 2800, "full": 2943}, environment=CPU, model="tiny")
    finding = judge("R1", records)
    assert finding.verdict == "not run here"
    assert "claim about a GPU" in finding.why
    assert finding.measured is not None
    assert (finding.hardware or "").startswith("CPU")


def test_another_point_is_not_the_claimed_one() -> None:
    records = headline({"stock": 1360, "cascade": 2800, "full": 2943}, prefix_tokens=8192)
    finding = judge("R1", records)
    assert finding.verdict == "not run here"
    assert "the claimed point was not measured; shown: llama-3.1-8b, prefix 8192" in finding.why


def test_a_fake_engine_is_no_evidence() -> None:
    records = headline({"stock": 1360, "cascade": 2800, "full": 2943}, labels=("fake-engine",))
    assert judge("R1", records).measured is None


def test_no_credit_without_the_kernel_having_run() -> None:
    records = headline({"stock": 1360, "full": 2943})
    records += headline({"cascade": 2800}, ran={"stock": 8})
    finding = judge("R2", records)
    assert finding.verdict == "not run here"
    assert "cascade active on 0% of steps" in finding.why


def test_spread() -> None:
    quiet = headline({"stock": 1360, "cascade": 2800, "full": 2943})
    assert judge("R3", quiet).verdict == "differs"
    wide = [
        serving_record(p, i, 0.1 * f, **HEADLINE)
        for p in ("stock", "cascade", "full")
        for i, f in enumerate((0.94, 1.0, 1.06))
    ]  # type: ignore[arg-type]
    assert judge("R3", wide).verdict == "reproduced"
    once = [serving_record(p, 9, 0.1, **HEADLINE | {"concurrency": 512}) for p in ("stock", "cascade", "full")]
    finding = judge("R3", [*wide, *once])
    assert "256 in flight" in finding.why, "a larger point with one launch has no spread"


@pytest.mark.parametrize(("share", "verdict"), [(0.6, "reproduced"), (0.3, "differs")])
def test_attention_share(share: float, verdict: str) -> None:
    step = 0.1
    faster = step * (1 - share) + step * share / 12
    records = []
    for launch in range(3):
        for path, seconds, attention in (("stock", step, share * step), ("full", faster, share * step / 12)):
            timed = {"attention_s": 8 * attention, "decode_s": 8 * seconds}
            records.append(serving_record(path, launch, seconds, counter_changes=timed, **HEADLINE))  # type: ignore[arg-type]
    finding = judge("A1", records)
    assert finding.verdict == verdict
    assert f"{share:.1%}" in (finding.measured or "")


def test_short_prefixes() -> None:
    slower = headline({"stock": 2000, "cascade": 1600, "full": 1700, "auto": 2010}, prefix_tokens=512)
    finding = judge("S1", slower)
    assert finding.verdict == "reproduced"
    assert "cascade at 512 tokens" in (finding.measured or "")
    assert "auto at worst 0.99x" in (finding.measured or "")
    faster = headline({"stock": 2000, "cascade": 2100, "full": 2200}, prefix_tokens=512)
    assert judge("S1", faster).verdict == "differs"
    assert judge("S1", headline({"stock": 2000, "cascade": 2100, "full": 2200})).verdict == "not run here"


def test_models_need_their_gpus() -> None:
    llama = headline({"stock": 1360, "cascade": 2800, "full": 2943})
    finding = judge("A2", llama)
    assert finding.verdict == "not run here"
    assert "qwen2.5-14b on 2 GPUs, qwen2.5-32b on 4 GPUs" in finding.why
    everything = [
        r
        for model, count in (("llama-3.1-8b", 1), ("qwen2.5-14b", 2), ("qwen2.5-32b", 4))
        for r in headline({"stock": 1000, "full": 2000}, model=model, tensor_parallel=count)
    ]
    assert judge("A2", everything).verdict == "reproduced"


def test_one_cell_of_dense_and_cascade() -> None:
    assert judge("D3", headline({"cascade": 4000, "dense": 6100})).verdict == "reproduced"
    assert judge("D3", headline({"cascade": 4000, "dense": 4100})).verdict == "differs"


def test_a_path_that_was_dense_in_every_step_stands_for_dense() -> None:
    cascade = headline({"cascade": 4000})
    assert judge("D3", [*cascade, *headline({"full": 6100})]).verdict == "reproduced"
    mixed = headline({"full": 6100}, ran={"dense": 7, "cascade": 1})
    assert judge("D3", [*cascade, *mixed]).verdict == "not run here"


def test_placement_holds_on_any_machine_and_a_moved_node_is_seen() -> None:
    kept = (RadixEvent(0, "place", 7, 512, "contiguous", ""), RadixEvent(1, "split", 7, 256, "contiguous", ""))
    again = (*kept, RadixEvent(2, "evict", 7, 256, None, ""), RadixEvent(3, "place", 7, 64, "paged", ""))
    moved = (*kept, RadixEvent(2, "place", 7, 256, "paged", ""))
    assert judge("P1", [serving_record("full", environment=CPU, placement=trace(*again))]).verdict == "reproduced"
    finding = judge("P1", [serving_record("full", environment=CPU, placement=trace(*moved))])
    assert finding.verdict == "differs"
    assert "node 7" in finding.why


def test_traffic_from_hardware_counters() -> None:
    good = [counted("unique", 256.0, implementation="paged"), counted("shared-contiguous", 1.06)]
    assert judge("K1", good).verdict == "reproduced"
    assert judge("K2", good).verdict == "reproduced"
    rereading = [good[0], counted("shared-contiguous", 3.0)]
    assert judge("K1", rereading).verdict == "differs"
    assert judge("K2", rereading).verdict == "differs"


def test_modelled_traffic_is_no_measurement() -> None:
    modelled = [kernel_record("paged", layout="unique"), kernel_record("dense")]
    assert judge("K1", modelled).verdict == "not run here"
    assert judge("K2", modelled).verdict == "not run here"
    served = judge("K1", headline({"stock": 1360, "cascade": 2800, "full": 2943}, environment=CPU))
    assert served.verdict == "not run here"
    assert "256.0 prefix tokens read by stock for each one read here" in (served.measured or "")


def test_latency_of_one_kernel_on_two_layouts() -> None:
    fast = [kernel_record("dense", i, [449.0 + i]) for i in range(3)]
    slow = [kernel_record("dense", i, [7000.0 + i], layout="unique") for i in range(3)]
    finding = judge("K3", fast + slow)
    assert finding.verdict == "reproduced"
    assert "450 us" in (finding.measured or "")
    near = [kernel_record("dense", i, [2000.0 + i], layout="unique") for i in range(3)]
    assert judge("K3", fast + near).verdict == "differs"
    small = [kernel_record("dense", batch=64, layout=layout) for layout in ("unique", "shared-contiguous")]
    assert "claimed shape was not timed" in judge("K3", small).why


@pytest.mark.parametrize(("rate", "verdict"), [(0.79, "reproduced"), (0.5, "differs")])
def test_headroom_of_the_paged_kernel(rate: float, verdict: str) -> None:
    microseconds = 256 * PREFIX_BYTES / (rate * 4.233e12) * 1e6
    records = [kernel_record("paged", i, [microseconds], layout="unique") for i in range(3)]
    finding = judge("K4", records)
    assert finding.verdict == verdict
    assert f"{rate:.0%} of the copy bandwidth" in (finding.measured or "")


def test_threshold_is_fitted_with_an_interval() -> None:
    records = []
    for batch, cascade, dense in ((64, 20.0, 30.0), (128, 40.0, 45.0), (256, 80.0, 60.0), (512, 160.0, 100.0)):
        for name, us, layout in (("cascade", cascade, "shared-slots"), ("dense", dense, "shared-contiguous")):
            records.append(kernel_record(name, samples_us=[us], batch=batch, layout=layout))
    finding = judge("D1", records)
    assert finding.verdict == "reproduced"
    assert finding.estimate is not None
    assert finding.estimate.estimate == 1024
    assert (finding.measured or "").startswith("dense pays from M_eff 1,024 (")
    assert "stock was not timed" in (finding.measured or "")
    late = [r for r in records if r.case.batch in (64, 128)]  # type: ignore[union-attr]
    assert "never paid up to M_eff 512" in judge("D1", late).why
    always = [
        kernel_record(name, samples_us=[us], batch=batch)
        for batch in (4, 8, 16, 32, 64, 128)
        for name, us in (("cascade", 9.0), ("dense", 8.0))
    ]
    assert judge("D1", always).verdict == "differs"


def test_planning_that_a_server_counted_is_shown_but_does_not_settle_the_decision() -> None:
    planned = serving_record("full", counter_changes={"plan_s": 64 * 20e-6}, environment=CPU)
    finding = judge("D2", [planned])
    assert finding.verdict == "not run here"
    assert "20 us of planning per step" in (finding.measured or "")


def test_kernels_of_a_cpu_are_not_judged() -> None:
    records = [kernel_record("dense", layout=layout, environment=CPU) for layout in ("unique", "shared-contiguous")]
    assert judge("K3", records).verdict == "not run here"


def test_the_claims_file_is_complete(tmp_path: Path) -> None:
    assert tuple(claim.claim_id for claim in load_claims()) == CLAIM_IDS
    file = tmp_path / "claims.yaml"
    file.write_text("source: x\nclaims: {K1: {}}\n")
    with pytest.raises(UsageError, match="are missing or unknown"):
        load_claims(file)
    assert set(VERDICTS) == {"reproduced", "differs", "not run here"}
