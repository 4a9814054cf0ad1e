"""Records with known answers: every figure of a built record follows from its arguments by one formula.

`serving_record(step_s=...)` gives requests that all get their first token at `prefill_s` and one more per step, so
decode throughput is exactly `concurrency / step_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prefixbench.case import Case, KernelCase, ServingCase, case_hash
from prefixbench.record import (
    SCHEMA_VERSION,
    Block,
    Environment,
    Gpu,
    KernelMeasurement,
    KernelTiming,
    Launch,
    PlacementTrace,
    Record,
    RequestSample,
    ServingMeasurement,
    StepCounters,
    Telemetry,
    TelemetrySample,
    Traffic,
)

CPU = Environment(
    hostname="host-a",
    os="Linux",
    python="3.11.2",
    cpu="Some CPU",
    cpu_count=2,
    memory_bytes=16 << 30,
    gpus=(),
    packages={"sglang": "0.5.16", "torch": "2.11.0", "prefixonce": "0.1.0"},
    git_commit="1" * 40,
    git_dirty=False,
)
H200 = replace(CPU, gpus=(Gpu("NVIDIA H200", 141 << 30, "580.1", 132),), cuda="13.0")

SERVING = ServingCase(
    model="llama-3.1-8b",
    path="stock",
    plugin=True,
    prefix_tokens=16384,
    suffix_tokens=64,
    output_tokens=65,
    concurrency=8,
    tensor_parallel=1,
    engine="sglang",
    stock_backend="flashinfer",
    workload="shared_prefix",
    engine_settings={"page_size": 1},
    workload_settings={"seed": 0},
    model_settings={},
)
KERNEL = KernelCase("dense", 8192, 0, 256, 32, 8, 128, 16, "bfloat16", "shared-contiguous", {})


def request(
    first_s: float, step_s: float, tokens: int, *, sent_s: float = 0.0, per_chunk: int = 1, error: str | None = None
) -> RequestSample:
    """First token at `first_s`, then one each `step_s`, streamed `per_chunk` tokens at a time."""
    marks = sorted({1, *range(1 + per_chunk, tokens, per_chunk), tokens})
    return RequestSample(
        sent_s=sent_s,
        chunks=tuple((n, first_s + (n - 1) * step_s) for n in marks),
        prompt_tokens=16448,
        cached_tokens=16384,
        output_tokens=tokens,
        token_source="usage",
        finish_reason="length" if error is None else None,
        error=error,
    )


def late(sample: RequestSample, after_s: float, by_s: float) -> RequestSample:
    """Every chunk after that moment comes so much later."""
    chunks = tuple((n, at_s + by_s if at_s > after_s else at_s) for n, at_s in sample.chunks)
    return replace(sample, chunks=chunks)


def block(
    requests: Sequence[RequestSample], *, position: int = 0, wall_s: float | None = None, **changes: object
) -> Block:
    ends = [r.chunks[-1][1] for r in requests if r.chunks]
    made = Block(
        position, 1.9e9 + position, wall_s or max(ends, default=0.0), tuple(requests), None, "primed: 1 prefix"
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def counters(
    steps: Mapping[str, int], batch: int, *, step_s: float = 0.01, prefix_tokens: int = 16384, **changes: object
) -> StepCounters:
    total, shared = sum(steps.values()), steps.get("cascade", 0) + steps.get("dense", 0)
    made = StepCounters(
        steps=dict(steps),
        decode_tokens=total * batch,
        group_steps=shared,
        prefix_tokens_read_once=shared * prefix_tokens,
        prefix_tokens_read_by_stock=shared * prefix_tokens * batch,
        bytes_saved=shared * prefix_tokens * (batch - 1) * 131072,
        batch_histogram={batch: total},
        decode_s=total * step_s,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


RAN = {"stock": "stock", "paged": "paged", "cascade": "cascade", "dense": "dense", "full": "dense", "auto": "dense"}


def serving_record(
    path: str = "stock",
    launch: int = 0,
    step_s: float | Sequence[float] = 0.01,
    *,
    prefill_s: float = 1.0,
    ran: Mapping[str, int] | None = None,
    counter_changes: Mapping[str, object] | None = None,
    flags: tuple[str, ...] = (),
    sm_clock_mhz: int | None = None,
    telemetry: tuple[Telemetry, ...] = (),
    environment: Environment = H200,
    labels: tuple[str, ...] = ("random-weights",),
    status: str = "ok",
    launch_id: str | None = None,
    started_at: str | None = None,
    placement: PlacementTrace | None = None,
    cache_state: str = "primed: 1 prefix",
    **case_changes: object,
) -> Record:
    """One record; a sequence of `step_s` gives one block each. `ran` overrides which path served the steps."""
    case = replace(SERVING, path=path, **case_changes)  # type: ignore[arg-type]
    steps = case.output_tokens - 1
    if sm_clock_mhz is not None:
        telemetry = (Telemetry("nvml", 0.1, 0, (TelemetrySample(0.0, sm_clock_mhz=sm_clock_mhz),)),)
    made = []
    for position, seconds in enumerate([step_s] if isinstance(step_s, float) else step_s):
        counted = None
        if case.plugin:
            counted = counters(
                ran or {RAN[path]: steps}, case.concurrency, step_s=seconds, prefix_tokens=case.prefix_tokens
            )
            counted = replace(counted, **(counter_changes or {}))  # type: ignore[arg-type]
        requests = [request(prefill_s, seconds, case.output_tokens)] * case.concurrency
        made.append(
            block(
                requests,
                position=position,
                counters=counted,
                flags=flags,
                telemetry=telemetry,
                cache_state=cache_state,
            )
        )
    measurement = ServingMeasurement(tuple(made), 1, placement, 1024 if case.plugin else None)
    return wrap(case, measurement, launch, environment, labels, status, launch_id, started_at)


def kernel_record(
    implementation: str = "dense",
    launch: int = 0,
    samples_us: Sequence[float] = (100.0, 101.0, 99.0),
    *,
    traffic: tuple[Traffic, ...] = (),
    l2: str = "warm",
    environment: Environment = H200,
    labels: tuple[str, ...] = (),
    copy_bandwidth: float | None = 4.233e12,
    **case_changes: object,
) -> Record:
    case = replace(KERNEL, implementation=implementation, **case_changes)  # type: ignore[arg-type]
    flops = 4 * case.batch * case.prefix_tokens * case.q_heads * case.head_dim
    kv_bytes = 2 * case.prefix_tokens * case.kv_heads * case.head_dim * 2
    measurement = KernelMeasurement(
        timings=(KernelTiming(l2, "graph", 10, 3, tuple(samples_us)),),  # type: ignore[arg-type]
        flops=flops,
        model_bytes=kv_bytes * (case.batch if "unique" in case.layout else 1),
        traffic=traffic,
        correctness=None,
        copy_bandwidth_bytes_per_s=copy_bandwidth,
        matmul_flops_per_s=7.6e14,
        path_ran=implementation,
    )
    return wrap(case, measurement, launch, environment, labels)


def wrap(
    case: Case,
    measurement: ServingMeasurement | KernelMeasurement | None,
    launch: int = 0,
    environment: Environment = H200,
    labels: tuple[str, ...] = (),
    status: str = "ok",
    launch_id: str | None = None,
    started_at: str | None = None,
) -> Record:
    launch_id = launch_id or f"launch-{launch:02d}"
    return Record(
        schema_version=SCHEMA_VERSION,
        record_id=f"{case_hash(case)}/{launch_id}",
        status=status,  # type: ignore[arg-type]
        case_hash=case_hash(case),
        case=case,
        launch=Launch(launch_id, launch, started_at or f"2030-01-01T00:{launch:02d}:00+00:00", 1.0),
        config={},
        overrides=(),
        environment=environment,
        labels=labels,
        measurement=measurement,
    )


def held_up(record: Record, after_s: float, by_s: float) -> Record:
    """The same record with every request of every block late by so much after that moment."""
    measured = record.measurement
    assert isinstance(measured, ServingMeasurement)
    blocks = tuple(replace(b, requests=tuple(late(r, after_s, by_s) for r in b.requests)) for b in measured.blocks)
    return replace(record, measurement=replace(measured, blocks=blocks))
