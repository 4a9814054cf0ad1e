"""A believable selection of records, written by a formula: for tests of the report and for its build benchmark.

The step-time model is crude on purpose; what matters is that prefix, concurrency, path and launch all move it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from prefixbench.case import KernelCase, ServingCase, case_hash
from prefixbench.record import (
    SCHEMA_VERSION,
    Block,
    Correctness,
    Environment,
    Gpu,
    KernelMeasurement,
    KernelTiming,
    Launch,
    PlacementTrace,
    PoolRun,
    RadixEvent,
    Record,
    RequestSample,
    ServingMeasurement,
    StepCounters,
    Telemetry,
    TelemetrySample,
    Traffic,
)

GQA_GROUP = 4
KV_HEADS = 2
KV_BYTES_PER_TOKEN = 2 * KV_HEADS * 32 * 4

ENVIRONMENT = Environment(
    hostname="bench-1",
    os="Linux 6.1",
    python="3.11.2",
    cpu="Some CPU @ 2.5GHz",
    cpu_count=2,
    memory_bytes=16 * 2**30,
    gpus=(),
    packages={"sglang": "0.5.16", "torch": "2.11.0", "triton": "3.6.0", "flashinfer": None},
    git_commit="0123456789abcdef0123456789abcdef01234567",
    git_dirty=False,
)
GPU_ENVIRONMENT = replace(ENVIRONMENT, gpus=(Gpu("NVIDIA H200", 150 * 10**9, "580.1", 132),), cuda="13.0")


def serving_case(path: str, prefix: int, concurrency: int, *, plugin: bool = True, output: int = 64) -> ServingCase:
    return ServingCase(
        model="tiny",
        path=path,
        plugin=plugin,
        prefix_tokens=prefix,
        suffix_tokens=32,
        output_tokens=output,
        concurrency=concurrency,
        tensor_parallel=1,
        engine="sglang",
        stock_backend="torch_native",
        workload="shared_prefix",
        engine_settings={"page_size": 1},
        workload_settings={"seed": 0},
        model_settings={"load_format": "auto"},
    )


def step_seconds(path: str, prefix: int, concurrency: int) -> float:
    """Base cost, prefix reads (per request or once) and a fixed price of sharing."""
    reads = {"stock": concurrency, "paged": concurrency, "cascade": 1.9, "dense": 1.4, "full": 1.4, "auto": 1.35}[path]
    overhead = 0.0 if path in ("stock", "paged", "auto") else 0.004
    return 0.02 + 3e-7 * prefix * reads + 1e-4 * concurrency + overhead


def serving_record(
    path: str,
    prefix: int,
    concurrency: int,
    launch: int = 0,
    *,
    plugin: bool = True,
    blocks: int = 2,
    noise: float = 0.02,
    output: int = 64,
    chunks: int = 8,
    served: dict[str, int] | None = None,
    labels: tuple[str, ...] = ("cpu", "random-weights", "synthetic-prompts"),
    placement: PlacementTrace | None = None,
) -> Record:
    """One case in one launch. `served` overrides the steps each path really ran."""
    case = serving_case(path, prefix, concurrency, plugin=plugin, output=output)
    digest, launch_id = case_hash(case), f"launch-{launch:02d}{'' if plugin else '-plain'}"
    rng = random.Random(f"{digest}{launch}")
    factor = rng.gauss(1.0, noise)
    measured = tuple(
        _block(path, case, factor * rng.gauss(1.0, noise / 2), index, chunks, served) for index in range(blocks)
    )
    return Record(
        schema_version=SCHEMA_VERSION,
        record_id=f"{digest}/{launch_id}",
        status="ok",
        case_hash=digest,
        case=case,
        launch=Launch(launch_id, launch, "2026-01-01T00:00:00+00:00", 8.5, ("python", "-m", "sglang.launch_server")),
        config={"model": {"name": "tiny"}, "path": path},
        overrides=(f"path={path}", f"prefix_len={prefix}", f"concurrency={concurrency}"),
        environment=ENVIRONMENT,
        labels=labels,
        measurement=ServingMeasurement(measured, 1, placement if plugin else None, 1024 if plugin else None),
    )


def _block(
    path: str, case: ServingCase, factor: float, position: int, chunks: int, served: dict[str, int] | None
) -> Block:
    step = step_seconds(path, case.prefix_tokens, case.concurrency) * factor
    prefill, tokens = 0.3, case.output_tokens
    marks = sorted({1, *(round(tokens * i / chunks) for i in range(1, chunks + 1)), tokens})
    request = RequestSample(
        sent_s=0.0,
        chunks=tuple((count, prefill + step * (count - 1)) for count in marks),
        prompt_tokens=case.prefix_tokens + case.suffix_tokens,
        cached_tokens=case.prefix_tokens,
        output_tokens=tokens,
        token_source="usage",
        finish_reason="length",
    )
    steps = tokens - 1
    return Block(
        position=position,
        started_at_unix_s=1.7e9 + 10 * position,
        wall_s=prefill + step * steps,
        requests=(request,) * case.concurrency,
        counters=_counters(path, case, steps, step, served),
        cache_state="flushed-then-primed",
        telemetry=(Telemetry("cpu", 0.1, None, (TelemetrySample(0.0, cpu_mhz=2500.0, load_other=0.1),)),),
    )


def _counters(
    path: str, case: ServingCase, steps: int, step_s: float, served: dict[str, int] | None
) -> StepCounters | None:
    if not case.plugin:
        return None
    ran = (
        served if served is not None else {"full": {"dense": steps}, "auto": {"dense": steps}}.get(path, {path: steps})
    )
    shared = sum(ran.get(name, 0) for name in ("cascade", "dense"))
    prefix_s = step_s * steps * 0.6
    return StepCounters(
        steps={name: ran.get(name, 0) for name in ("stock", "paged", "cascade", "dense")},
        decode_tokens=steps * case.concurrency,
        group_steps=shared,
        prefix_tokens_read_once=shared * case.prefix_tokens,
        prefix_tokens_read_by_stock=shared * case.prefix_tokens * case.concurrency,
        bytes_saved=shared * case.prefix_tokens * (case.concurrency - 1) * KV_BYTES_PER_TOKEN,
        batch_histogram={case.concurrency: steps},
        decode_s=step_s * steps,
        attention_s=prefix_s * 1.2,
        prefix_s=prefix_s,
        plan_s=steps * 2e-5,
        reasons={f"{path} was asked for": shared} if shared else {"no two running requests share a prefix": steps},
    )


def placement(prefix: int = 2048, concurrency: int = 8) -> PlacementTrace:
    """A prefix run, the suffixes' pages, a split and an eviction."""
    events = [
        RadixEvent(0, "create", 1, prefix, None, "new node below the root"),
        RadixEvent(1, "place", 1, prefix, "contiguous", f"{prefix} tokens reach the 64-token minimum; slots 1.."),
    ]
    for user in range(concurrency):
        node = 2 + user
        events.append(RadixEvent(len(events), "create", node, 33 + user, None, "below node 1"))
        events.append(RadixEvent(len(events), "place", node, 33 + user, "paged", "shorter than 64 tokens"))
    events.append(
        RadixEvent(len(events), "split", 1, prefix // 2, "contiguous", f"at {prefix // 2} tokens, new node 99")
    )
    events.append(RadixEvent(len(events), "evict", 2, 33, "paged", "least recently used"))
    runs = [PoolRun(0, 1, "free"), PoolRun(1, prefix, "prefix-run", 1, concurrency)]
    slot = prefix + 1
    for user in range(concurrency):
        runs.append(PoolRun(slot, 33 + user, "pages", 2 + user, 1))
        slot += 33 + user
    runs.append(PoolRun(slot, 16384 - slot, "free"))
    return PlacementTrace(
        contiguous=1,
        paged=concurrency,
        reasons={"reaches the 64-token minimum": 1, "shorter than 64 tokens": concurrency},
        events=tuple(events),
        events_dropped=0,
        pool_slots=16384,
        pool_before=(PoolRun(0, 16384, "free"),),
        pool_after=tuple(runs),
    )


def selection(
    prefixes: Iterable[int] = (128, 512, 2048, 8192),
    concurrencies: Iterable[int] = (8, 32),
    launches: int = 3,
    paths: Iterable[str] = ("stock", "cascade", "full", "auto"),
    **changes: object,
) -> list[Record]:
    """The main sweep: every path with the plugin, and stock also in launches without it."""
    return list(_sweep(tuple(prefixes), tuple(concurrencies), launches, tuple(paths), changes))


def _sweep(
    prefixes: tuple[int, ...],
    concurrencies: tuple[int, ...],
    launches: int,
    paths: tuple[str, ...],
    changes: dict[str, object],
) -> Iterator[Record]:
    for prefix in prefixes:
        for concurrency in concurrencies:
            trace = placement(prefix, concurrency)
            for launch in range(launches):
                yield serving_record("stock", prefix, concurrency, launch, plugin=False, **changes)  # type: ignore[arg-type]
                for path in paths:
                    yield serving_record(path, prefix, concurrency, launch, placement=trace, **changes)  # type: ignore[arg-type]


def kernel_records(
    batches: Iterable[int] = (16, 64, 256), groups: Iterable[int] = (1, 4, 8), prefix: int = 8192
) -> list[Record]:
    """One launch shape per (batch, GQA group) and implementation, on a pretended GPU with counters."""
    return [
        _kernel_record(name, prefix, batch, group, run)
        for batch in batches
        for group in groups
        for name in ("paged", "cascade", "dense")
        for run in range(3)
    ]


def _kernel_record(implementation: str, prefix: int, batch: int, group: int, run: int) -> Record:
    kv_heads, head_dim = 8, 128
    layout = {"paged": "unique", "cascade": "shared-slots", "dense": "shared-contiguous"}[implementation]
    case = KernelCase(implementation, prefix, 256, batch, kv_heads * group, kv_heads, head_dim, 16, "bf16", layout, {})
    digest, launch_id = case_hash(case), f"kernel-{run}"
    prefix_bytes = 2 * prefix * kv_heads * head_dim * 2
    reads = batch if implementation == "paged" else 1
    flops = 4 * batch * group * kv_heads * prefix * head_dim
    fixed_us = {"paged": 5.0, "cascade": 12.0, "dense": 22.0}[implementation]
    rate = {"paged": 2e14, "cascade": 3.5e14, "dense": 6e14}[implementation]
    base = fixed_us + 1e6 * max(reads * prefix_bytes / 4.2e12, flops / rate)
    rng = random.Random(f"{digest}{run}")
    samples = tuple(base * rng.gauss(1.0, 0.01) for _ in range(20))
    measurement = KernelMeasurement(
        timings=(
            KernelTiming("warm", "cuda-events in a graph", 10, 5, samples),
            KernelTiming("cold", "cuda-events in a graph", 1, 5, tuple(s * 1.05 for s in samples)),
        ),
        flops=flops,
        model_bytes=reads * prefix_bytes,
        traffic=(
            Traffic("model", reads * prefix_bytes, 0, None),
            Traffic("ncu", round(reads * prefix_bytes * 1.02), 10**6, round(reads * prefix_bytes * 1.4)),
        ),
        correctness=Correctness(1e-3, 8e-3, True, "fp64"),
        copy_bandwidth_bytes_per_s=4.3e12,
        matmul_flops_per_s=7e14,
        path_ran=implementation,
    )
    return Record(
        schema_version=SCHEMA_VERSION,
        record_id=f"{digest}/{launch_id}",
        status="ok",
        case_hash=digest,
        case=case,
        launch=Launch(launch_id, run, "2026-01-01T00:00:00+00:00", None),
        config={},
        overrides=(),
        environment=GPU_ENVIRONMENT,
        labels=(),
        measurement=measurement,
    )
