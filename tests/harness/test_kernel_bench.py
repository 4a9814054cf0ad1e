"""The kernel bench without a GPU: inputs, oracle, order of launches, failures, records; planted faults must show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from prefixbench import store
from prefixbench.config import kernels as kernels_config
from prefixbench.config.kernels import KernelsConfig, Request, requests
from prefixbench.errors import EngineError, UsageError
from prefixbench.jobs import kernels as kernels_runner
from prefixbench.measures.kernel import registry
from prefixbench.measures.kernel.cell import Outcome, measure_cell
from prefixbench.measures.kernel.implementation import Implementation, Prepared, Result, work_of
from prefixbench.measures.kernel.inputs import LAYOUTS, Inputs, Shape, make_inputs, sets_for_cold_l2
from prefixbench.measures.kernel.oracle import judge, lse_bound, oracle
from prefixbench.measures.kernel.timing import HostClock, Replay, TimingPlan, launch_order, time_in_turns
from prefixbench.record import KernelMeasurement
from prefixbench.verbs import kernels as kernels_cli
from prefixonce import Path as StepPath

CPU = torch.device("cpu")
SHAPE = Shape(64, 10, 4, 4, 2, 16, 16, "bfloat16", "shared-contiguous")


class Unwatched(nullcontext[Any]):
    def __enter__(self) -> Any:
        return self

    def telemetry(self) -> tuple[()]:
        return ()


class ScriptedClock:
    """Gives out readings in microseconds and notes what ran, in order."""

    name = "scripted"

    def __init__(self, readings_us: Sequence[float]) -> None:
        self.readings = iter(readings_us)
        self.settled = False

    def record(self, run: Callable[[int], object], order: Sequence[int]) -> Replay:
        return lambda: [run(i) for i in order]

    def time_us(self, replay: Replay) -> Callable[[], float]:
        replay()
        value = next(self.readings)

        def read() -> float:
            assert self.settled, "a reading is valid only after settle"
            return value

        return read

    def settle(self) -> None:
        self.settled = True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("prefix", "suffix"), [(64, 10), (64, 0), (0, 10)])
@pytest.mark.parametrize("name", ["paged", "cascade", "dense"])
def test_our_paths_agree_with_the_oracle_in_every_layout(layout: str, prefix: int, suffix: int, name: str) -> None:
    shape = SHAPE._replace(layout=layout, prefix_tokens=prefix, suffix_tokens=suffix)
    found = registry.named(name)
    if found.unsupported(shape, CPU):
        assert prefix == 0 or (name, layout) == ("dense", "shared-slots")
        return
    inputs = make_inputs(shape, sets=2, device=CPU, seed=3)
    prepared = found.prepare(inputs)
    verdict = judge(prepared.result(prepared.run(0)), oracle(inputs), shape.keys)
    assert verdict.passed, verdict
    assert prepared.note["path_ran"] == name


@given(
    layout=st.sampled_from(LAYOUTS),
    pages=st.integers(1, 3),
    suffix=st.integers(0, 20),
    batch=st.integers(1, 4),
    page=st.sampled_from([1, 4, 16]),
)
@settings(max_examples=30, deadline=None)
def test_every_slot_has_one_owner_and_page_zero_none(
    layout: str, pages: int, suffix: int, batch: int, page: int
) -> None:
    shape = Shape(pages * page, suffix, batch, 2, 1, 8, page, "float16", layout)
    inputs = make_inputs(shape, sets=1, device=CPU, seed=0)
    owned = torch.cat([inputs.prefix_slots.flatten(), inputs.suffix_slots.flatten()])
    assert len(owned) == len(set(owned.tolist()))
    assert not len(owned) or (int(owned.min()) >= page and int(owned.max()) < len(inputs.k[0]))
    if layout != "shared-slots":
        assert (inputs.prefix_slots.diff(dim=1) == 1).all()
    assert inputs.row_slots.shape == (batch, shape.prefix_tokens + suffix)


def test_scattered_slots_are_scattered_and_sets_differ() -> None:
    shape = SHAPE._replace(layout="shared-slots", prefix_tokens=512)
    inputs = make_inputs(shape, sets=2, device=CPU, seed=0)
    assert not (inputs.prefix_slots.diff(dim=1) == 1).all()
    assert not torch.equal(inputs.k[0], inputs.k[1])
    assert torch.equal(inputs.k[0], make_inputs(shape, sets=2, device=CPU, seed=0).k[0])


def test_cold_rotation_passes_twice_the_l2_between_two_uses() -> None:
    l2_bytes = 50 << 20
    for prefix, batch in ((512, 8), (4096, 8), (8192, 256), (16, 1)):
        shape = Shape(prefix, 0, batch, 32, 8, 128, 16, "bfloat16", "shared-contiguous")
        sets = sets_for_cold_l2(shape, l2_bytes)
        assert (sets - 1) * shape.pool_bytes >= 2 * l2_bytes or sets == 512
    huge = Shape(8192, 0, 256, 32, 8, 128, 16, "bfloat16", "unique")
    assert huge.pool_bytes == 256 * 33_554_432
    assert sets_for_cold_l2(huge, l2_bytes) == 1


def test_launch_order_is_whole_rotations_or_one_set() -> None:
    assert launch_order("warm", 4, 10) == (0,) * 10
    assert launch_order("cold", 4, 10) == (0, 1, 2, 3) * 3
    assert launch_order("cold", 20, 10) == tuple(range(20))


@pytest.mark.parametrize("fault", ["lost page", "doubled row", "nan", "rounded twice"])
def test_the_judge_sees_planted_faults_and_forgives_rounding(fault: str) -> None:
    inputs = make_inputs(SHAPE._replace(prefix_tokens=512), sets=1, device=CPU, seed=1)
    truth, keys = oracle(inputs), inputs.shape.keys
    good = Result(truth.out.to(torch.bfloat16), truth.lse.float())
    assert judge(good, truth, keys).passed
    if fault == "lost page":
        short = replace(inputs, prefix_slots=inputs.prefix_slots[:, 16:])
        bad = Result(oracle(short).out.to(torch.bfloat16), None)
    elif fault == "doubled row":
        bad = Result(good.out[[0, 0, 2, 3]], None)
    elif fault == "nan":
        out = good.out.clone()
        out[1, 1, 1] = torch.nan
        bad = Result(out, None)
    else:
        noisy = truth.out * (1 + 2**-9 * torch.sign(torch.randn_like(truth.out)))
        assert judge(Result(noisy.to(torch.bfloat16), good.lse), truth, keys).passed
        return
    verdict = judge(bad, truth, keys)
    assert not verdict.passed
    # A record cannot hold NaN: what is not finite is None, and what is wrong says by how much.
    assert (verdict.max_abs_error is None) is (fault == "nan")


@pytest.mark.parametrize("prefix", [64, 16384])
@pytest.mark.parametrize("fault", ["lost page", "doubled page", "base 2", "rounded weights"])
def test_the_judge_of_an_lse_forgives_rounded_weights_and_nothing_else(prefix: int, fault: str) -> None:
    """The output is the right one throughout: the LSE alone decides."""
    inputs = make_inputs(SHAPE._replace(prefix_tokens=prefix), sets=1, device=CPU, seed=1)
    truth, shape = oracle(inputs), inputs.shape
    slots = inputs.prefix_slots
    if fault == "lost page":
        lse = oracle(replace(inputs, prefix_slots=slots[:, shape.page_size :])).lse
    elif fault == "doubled page":
        lse = oracle(replace(inputs, prefix_slots=torch.cat([slots, slots[:, : shape.page_size]], dim=1))).lse
    elif fault == "base 2":
        lse = truth.lse / math.log(2)
    else:
        lse = truth.lse + _rounded_sum_error(inputs)
    verdict = judge(Result(truth.out.to(torch.bfloat16), lse.float()), truth, shape.keys)
    assert verdict.max_abs_error is not None
    assert verdict.max_abs_error <= verdict.bound
    assert verdict.lse_error is not None
    assert verdict.passed is (fault == "rounded weights")
    assert verdict.lse_bound == lse_bound(torch.bfloat16, shape.keys)
    if fault == "rounded weights":
        assert verdict.lse_error > 1e-5, "the rounding is there"


def _rounded_sum_error(inputs: Inputs) -> torch.Tensor:
    """What summing weights that were rounded to bfloat16 does to the LSE, [batch, q_heads]."""
    shape = inputs.shape
    q = inputs.q[0].double().unflatten(1, (shape.kv_heads, -1))
    keys = inputs.k[0].double()[inputs.row_slots]
    scores = torch.einsum("bhgd,bnhd->bhgn", q, keys) * inputs.scale
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights.bfloat16().double().sum(-1) / weights.sum(-1)).log().flatten(1)


def test_implementations_take_turns_and_samples_are_per_launch() -> None:
    ran: list[str] = []
    clock = ScriptedClock([100.0, 200.0, 110.0, 220.0])
    replays = {name: clock.record(lambda _, name=name: ran.append(name), (0,) * 10) for name in ("a", "b")}
    timings = time_in_turns(clock, replays, 10, "warm", TimingPlan(10, warmup=1, repetitions=2))
    assert (timings["a"].samples_us, timings["b"].samples_us) == ((10.0, 11.0), (20.0, 22.0))
    assert (timings["a"].clock, timings["a"].graph_launches, timings["a"].warmup) == ("scripted", 10, 1)
    turns = [ran[i] for i in range(0, len(ran), 10)]
    assert turns == ["a", "b", "a", "a", "b", "b", "a", "a", "b", "b"]  # warm-up, then untimed and timed in turn


def failing(stage: str, error: Exception) -> Implementation:
    calls = 0

    def prepare(inputs: Any) -> Prepared:
        def run(i: int) -> object:
            nonlocal calls
            calls += 1
            if stage == "timing" and calls > 1:
                raise error
            return inputs

        def result(_: object) -> Result:
            return Result(*oracle(inputs))

        if stage == "prepare":
            raise error
        return Prepared(run, result)

    return Implementation("peer", StepPath.CASCADE, lambda shape, device: None, prepare)


def measure(*implementations: Implementation, **options: Any) -> dict[str, Outcome]:
    return measure_cell(
        make_inputs(SHAPE, sets=1, device=CPU, seed=0),
        implementations,
        clock=HostClock(),
        plan=TimingPlan(1, 0, 2),
        watch=Unwatched,
        **{"l2": ("warm",), **options},
    )


def test_a_second_clock_times_one_implementation_and_fails_none() -> None:
    asked: list[TimingPlan] = []

    def clock(us: float) -> Callable[[Callable[[int], object], TimingPlan], float]:
        def timed(run: Callable[[int], object], plan: TimingPlan) -> float:
            run(0)
            asked.append(plan)
            return us

        return timed

    pair = (failing("prepare", ValueError("boom")), registry.named("dense"), registry.named("paged"))
    outcomes = measure(*pair, second_clock=clock(12.5))
    assert asked == [TimingPlan(1, 0, 2)]
    assert [outcome.note.get("flashinfer_clock_us") for outcome in outcomes.values()] == [None, 12.5, None]
    for broken, words in ((clock(math.nan), "it gave nan us"), (lambda *_: 1 / 0, "division by zero")):
        dense = measure(*pair, second_clock=broken)["dense"]
        assert dense.failure is None
        assert dense.timings[0].samples_us
        assert dense.note["flashinfer_clock_failed"] == words
        assert "flashinfer_clock_us" not in dense.note
    asked.clear()
    measure(registry.named("dense"), l2=("cold",), second_clock=clock(12.5))
    assert not asked, "it times a warm L2 alone"


def test_a_peer_that_cannot_be_prepared_leaves_the_others_alone() -> None:
    outcomes = measure(failing("prepare", torch.OutOfMemoryError("CUDA out of memory\nmore")), registry.named("dense"))
    failure = outcomes["peer"].failure
    assert failure is not None
    assert (failure.kind, failure.message) == ("oom", "CUDA out of memory")
    assert outcomes["dense"].failure is None
    assert len(outcomes["dense"].timings[0].samples_us) == 2


def test_a_fault_while_taking_turns_fails_all_but_keeps_what_was_learnt() -> None:
    outcomes = measure(failing("timing", ValueError("boom")), registry.named("dense"))
    assert {name: outcome.failure is not None for name, outcome in outcomes.items()} == {"peer": True, "dense": True}
    assert outcomes["dense"].correctness is not None


def test_an_implementation_that_cannot_serve_the_shape_says_why() -> None:
    (outcome,) = measure(registry.named("flashinfer-decode")).values()
    assert outcome.failure is not None
    assert outcome.failure.message == "flashinfer-decode: it needs a CUDA GPU"


def test_modelled_work_of_the_published_launch() -> None:
    """One shared prefix of 8192 tokens against a copy for each of 256 requests: 37.7 MB and 8.6 GB."""
    shared = Shape(8192, 0, 256, 32, 8, 128, 16, "bfloat16", "shared-contiguous")
    once, each = work_of(shared, StepPath.DENSE), work_of(shared, StepPath.STOCK)
    unique = work_of(shared._replace(layout="unique"), StepPath.DENSE)
    assert once.kv_bytes == 33_554_432
    assert once.kv_bytes + once.qo_bytes == pytest.approx(37.7e6, rel=0.01)
    assert each.kv_bytes == unique.kv_bytes == 256 * 33_554_432
    assert once.flops == each.flops == unique.flops == 4 * 256 * 32 * 8192 * 128


def config(**changes: Any) -> KernelsConfig:
    kernels_config.register_schema()
    axes = {
        "prefix_len": 64,
        "suffix_len": 0,
        "batch": 4,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "page_size": 16,
        "dtype": "bfloat16",
        "layout": "shared-contiguous",
        "implementation": "all",
    }
    rest = {
        "device": "cpu",
        "l2": ["warm", "cold"],
        "launches_per_graph": 10,
        "warmup": 0,
        "repetitions": 2,
        "counters": True,
        "counters_budget_s": 5.0,
        "compile_ahead": True,
        "budget_s": 60.0,
        "telemetry_interval_s": 0.05,
        "seed": 1,
        "runs": "runs",
        "run_id": "r",
    }
    merged = OmegaConf.merge(OmegaConf.structured(KernelsConfig), {**axes, **rest, **changes})
    assert OmegaConf.is_dict(merged)
    return kernels_config.load(merged)  # type: ignore[arg-type]


def test_grids_replace_the_axes_they_name_and_points_are_unique() -> None:
    grids = {"a": {"batch": [4, 8]}, "b": {"batch": 8, "implementation": ["dense", "paged"]}, "again": {"batch": [4]}}
    points = requests(config(grids=grids, prefix_len=[64, 128]))
    assert [(p.prefix_len, p.batch, p.implementation) for p in points] == [
        *((64, 4, "all"), (64, 8, "all"), (128, 4, "all"), (128, 8, "all")),
        *((64, 8, "dense"), (64, 8, "paged"), (128, 8, "dense"), (128, 8, "paged")),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grids": {"a": {"bach": 4}}}, "did you mean 'batch'"),
        ({"batch": []}, "at least one value"),
        ({"batch": [4, 4]}, "each only once"),
        ({"batch": "four"}, "allowed are whole numbers"),
        ({"l2": ["hot"]}, "allowed: cold, warm"),
        ({"device": "tpu"}, "allowed: auto, cpu, cuda"),
        ({"repetitions": 0}, "repetitions=0"),
    ],
)
def test_a_wrong_configuration_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        config(**changes)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix_len": 65}, "multiple of page_size=16"),
        ({"q_heads": 5}, "does not divide"),
        ({"prefix_len": 0}, "nothing to attend to"),
        ({"layout": "round"}, "allowed are shared-contiguous"),
        ({"dtype": "int8"}, "allowed are bfloat16"),
        ({"implementation": "densee"}, "did you mean 'dense'"),
    ],
)
def test_a_shape_that_cannot_be_laid_out_is_refused_before_anything_runs(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        kernels_runner.plan_cells(requests(config(**changes)), CPU)


def test_points_of_one_shape_share_a_cell() -> None:
    point = Request(64, 0, 4, 4, 2, 16, 16, "bfloat16", "shared-contiguous", "dense")
    cells = kernels_runner.plan_cells([point, replace(point, implementation="all"), replace(point, batch=8)], CPU)
    assert [(cell.shape.batch, cell.names) for cell in cells] == [(4, ("dense", "paged", "cascade")), (8, ("dense",))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(EngineError, match="finds no CUDA GPU"):
        kernels_runner.resolve_device("cuda")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., kernels_runner.Job]:
    monkeypatch.setattr(
        kernels_runner, "measure_ceilings", lambda clock, device: kernels_runner.Ceilings(1e10, 1e11, 0)
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def make(**changes: Any) -> kernels_runner.Job:
        runs = tmp_path / "runs"
        made = config(runs=str(runs), run_id="now", **changes)
        return kernels_runner.Job(made, {"batch": 4}, "batch: 4\n", ("batch=4",), runs / ".sweeps" / "now")

    return make


def test_a_run_on_a_cpu_saves_labelled_checked_records(job: Callable[..., kernels_runner.Job], tmp_path: Path) -> None:
    said: list[str] = []
    kernels_runner.run(job(implementation=["dense", "paged", "flashinfer-decode"]), said.append)
    records = store.of_run(tmp_path / "runs", "now")
    by_name = {record.case.implementation: record for record in records}  # type: ignore[union-attr]
    assert {name: record.status for name, record in by_name.items()} == {
        "dense": "ok",
        "paged": "ok",
        "flashinfer-decode": "failed",
    }
    dense = by_name["dense"]
    assert dense.labels == ("modelled-bytes", "cpu")
    measured = dense.measurement
    assert isinstance(measured, KernelMeasurement)
    assert [(t.l2, t.graph_launches, len(t.samples_us)) for t in measured.timings] == [("warm", 1, 2)]
    assert measured.correctness is not None
    assert measured.correctness.passed
    assert measured.path_ran == "dense"
    assert [traffic.source for traffic in measured.traffic] == ["model"]
    assert measured.copy_bandwidth_bytes_per_s == 1e10
    assert measured.telemetry[0].source == "cpu"
    assert (dense.notes or {})["not_counted"] == "a CPU has no such counters"
    plan = json.loads((tmp_path / "runs" / ".sweeps" / "now" / "plan.json").read_text())
    assert set(plan["cases"]) == {record.case_hash for record in records}
    assert kernels_cli.summarize(records, kernels_cli.Console(quiet=True)) == 1


def test_a_wrong_result_is_a_failed_record(
    job: Callable[..., kernels_runner.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = registry.named("dense")

    def wrong(inputs: Any) -> Prepared:
        ready = dense.prepare(inputs)
        return replace(ready, result=lambda ran: Result(ready.result(ran).out * 1.05, None))

    monkeypatch.setattr(registry, "implementations", lambda: {"dense": replace(dense, prepare=wrong)})
    (record,) = kernels_runner.run(job(implementation="dense"), lambda line: None)
    assert record.status == "failed"
    assert record.failure is not None
    assert record.failure.kind == "wrong-result"


def test_a_right_output_with_a_wrong_lse_is_a_failed_record_that_says_so(
    job: Callable[..., kernels_runner.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = registry.named("dense")

    def wrong(inputs: Any) -> Prepared:
        ready, lse = dense.prepare(inputs), oracle(inputs).lse
        return replace(ready, result=lambda ran: ready.result(ran)._replace(lse=(lse + 0.1).float()))

    monkeypatch.setattr(registry, "implementations", lambda: {"dense": replace(dense, prepare=wrong)})
    (record,) = kernels_runner.run(job(implementation="dense"), lambda line: None)
    assert record.status == "failed"
    assert record.failure is not None
    assert record.failure.message.endswith("the output is right, its LSE is not")
    assert record.measurement is not None, "what it took is kept"


def test_a_spent_budget_is_recorded_and_nothing_is_measured(job: Callable[..., kernels_runner.Job]) -> None:
    made = job(implementation="dense")
    made = replace(made, config=replace(made.config, budget_s=0.0))
    (record,) = kernels_runner.run(made, lambda line: None)
    assert record.status == "timeout"
    assert record.measurement is None
