"""A believable sweep of records, written by a formula: for tests of the report and for its build benchmark.

The formula is crude on purpose; what matters is that prefix, concurrency, path and launch all move the step time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

from harness.builders import CPU, kernel_record, serving_record
from prefixbench.record import (
    Correctness,
    KernelMeasurement,
    KernelTiming,
    PlacementTrace,
    PoolRun,
    RadixEvent,
    Record,
    Traffic,
)

LABELS = ("cpu", "random-weights", "synthetic-prompts")
READS = {"stock": None, "paged": None, "cascade": 1.9, "dense": 1.4, "full": 1.4, "auto": 1.35}
OVERHEAD_S = {"cascade": 0.002, "dense": 0.002, "full": 0.002}


def prefix_seconds(path: str, prefix: int, concurrency: int) -> float:
    """Reading the prefix in one step: once for each request where nothing is shared."""
    return 3e-7 * prefix * (READS[path] or concurrency) + OVERHEAD_S.get(path, 0.0)


def step_seconds(path: str, prefix: int, concurrency: int) -> float:
    return 0.02 + 1e-4 * concurrency + prefix_seconds(path, prefix, concurrency)


def measured(
    path: str, prefix: int, concurrency: int, launch: int = 0, *, plugin: bool = True, **changes: object
) -> Record:
    """One case in one launch with 2% spread between launches and 1% between its two blocks."""
    rng = random.Random(f"{path}{prefix}{concurrency}{launch}{plugin}")
    step_s = step_seconds(path, prefix, concurrency) * rng.gauss(1.0, 0.02)
    blocks = [step_s * rng.gauss(1.0, 0.01) for _ in range(2)]
    settings: dict[str, object] = {
        "labels": LABELS,
        "environment": CPU,
        "counter_changes": {
            "attention_s": 64 * (prefix_seconds(path, prefix, concurrency) + 0.002),
            "prefix_s": 64 * prefix_seconds(path, prefix, concurrency),
            "plan_s": 64 * 2e-5,
            "reasons": {f"{path} was asked for": 64},
        },
        "placement": placement(prefix, concurrency) if plugin else None,
        "launch_id": f"launch-{launch:02d}{'' if plugin else '-plain'}",
    }
    case = {"model": "tiny", "stock_backend": "torch_native", "prefix_tokens": prefix, "suffix_tokens": 32}
    case |= {"concurrency": concurrency, "plugin": plugin}
    made = serving_record(path, launch, blocks, **(settings | case | changes))  # type: ignore[arg-type]
    overrides = (f"path={path}", f"prefix_len={prefix}", f"concurrency={concurrency}")
    return replace(made, config={"model": {"name": "tiny", "layers": 2}, "path": path}, overrides=overrides)


def sweep(
    prefixes: Iterable[int] = (128, 512, 2048, 8192),
    concurrencies: Iterable[int] = (8, 32),
    launches: int = 3,
    paths: Iterable[str] = ("stock", "cascade", "full", "auto"),
    ran: Mapping[str, Mapping[str, int]] | None = None,
    **changes: object,
) -> list[Record]:
    """Every path with the plugin, and stock also in launches without it. `ran` overrides the steps of a path."""
    paths = tuple(paths)
    records = []
    for prefix in prefixes:
        for concurrency in concurrencies:
            for launch in range(launches):
                records.append(measured("stock", prefix, concurrency, launch, plugin=False, **changes))
                for path in paths:
                    steps = {"ran": (ran or {}).get(path)}
                    records.append(measured(path, prefix, concurrency, launch, **(changes | steps)))
    return records


def placement(prefix: int = 2048, concurrency: int = 8) -> PlacementTrace:
    """A prefix run, the pages of the suffixes, a split and an eviction."""
    events = [
        RadixEvent(0, "create", 1, prefix, None, "new node below the root"),
        RadixEvent(1, "place", 1, prefix, "contiguous", f"{prefix} tokens reach the 64-token minimum"),
    ]
    for user in range(concurrency):
        node = 2 + user
        events.append(RadixEvent(len(events), "create", node, 33 + user, None, "below node 1"))
        events.append(RadixEvent(len(events), "place", node, 33 + user, "paged", "shorter than 64 tokens"))
    events.append(RadixEvent(len(events), "split", 1, prefix // 2, "contiguous", f"at {prefix // 2}, new node 99"))
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


def kernels(
    batches: Iterable[int] = (16, 64, 256), groups: Iterable[int] = (1, 4, 8), prefix: int = 8192
) -> list[Record]:
    """One launch shape per (batch, GQA group) and implementation, on a pretended H200 with hardware counters."""
    return [
        _kernel(name, prefix, batch, group, launch)
        for batch in batches
        for group in groups
        for name in ("paged", "cascade", "dense")
        for launch in range(3)
    ]


def _kernel(implementation: str, prefix: int, batch: int, group: int, launch: int) -> Record:
    kv_bytes = 2 * prefix * 8 * 128 * 2
    reads = batch if implementation == "paged" else 1
    flops = 4 * batch * group * 8 * prefix * 128
    fixed_us = {"paged": 5.0, "cascade": 12.0, "dense": 22.0}[implementation]
    rate = {"paged": 2e14, "cascade": 3.5e14, "dense": 6e14}[implementation]
    base_us = fixed_us + 1e6 * max(reads * kv_bytes / 4.2e12, flops / rate)
    rng = random.Random(f"{implementation}{batch}{group}{launch}")
    samples = [base_us * rng.gauss(1.0, 0.01) for _ in range(20)]
    record = kernel_record(
        implementation,
        launch,
        samples,
        traffic=(
            Traffic("model", reads * kv_bytes, 0, None),
            Traffic("ncu", round(reads * kv_bytes * 1.02), 10**6, round(reads * kv_bytes * 1.4)),
        ),
        batch=batch,
        q_heads=8 * group,
        prefix_tokens=prefix,
        layout={"paged": "shared-slots", "cascade": "shared-slots", "dense": "shared-contiguous"}[implementation],
    )
    assert isinstance(record.measurement, KernelMeasurement)
    cold = KernelTiming("cold", "graph", 1, 3, tuple(1.05 * s for s in samples))
    checked = Correctness(1e-3, 8e-3, True, "fp64")
    measurement = replace(record.measurement, timings=(*record.measurement.timings, cold), correctness=checked)
    return replace(record, measurement=measurement)
