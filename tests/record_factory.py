"""Builds records for tests of the store, the runner and the selectors."""

from __future__ import annotations

from dataclasses import replace

from prefixbench.case import ServingCase, case_hash
from prefixbench.record import (
    SCHEMA_VERSION,
    Block,
    Environment,
    Launch,
    Record,
    RequestSample,
    ServingMeasurement,
    StepCounters,
)

CASE = ServingCase(
    model="tiny",
    path="cascade",
    plugin=True,
    prefix_tokens=2048,
    suffix_tokens=32,
    output_tokens=3,
    concurrency=2,
    tensor_parallel=1,
    engine="fake",
    stock_backend="torch_native",
    workload="shared-prefix",
    engine_settings={"page_size": 1},
    workload_settings={"seed": 1},
    model_settings={},
)
ENVIRONMENT = Environment(
    hostname="host",
    os="Linux",
    python="3.11.7",
    cpu="A CPU",
    cpu_count=2,
    memory_bytes=1 << 30,
    gpus=(),
    packages={"sglang": "0.5.16"},
    git_commit="0" * 40,
    git_dirty=False,
)


def flags_of(block: Block) -> tuple[str, ...]:
    """The flags of a block but for those about the machine that the test happens to run on."""
    return tuple(flag for flag in block.flags if not flag.startswith("other-load"))


def make_record(launch_id: str = "20300101T000000-abcdef", *, sweep: str = "s1", **changes: object) -> Record:
    case = replace(CASE, **changes)  # type: ignore[arg-type]
    request = RequestSample(0.0, ((1, 0.1), (3, 0.3)), 2080, 2048, 3, "usage", "length")
    counters = StepCounters({"cascade": 2}, 4, 2, 4096, 8192, 1 << 20, {2: 2}, decode_s=0.2, reasons={"asked": 2})
    block = Block(0, 1.9e9, 0.3, (request, request), counters, "primed: 1 prefix")
    return Record(
        schema_version=SCHEMA_VERSION,
        record_id=f"{case_hash(case)}/{launch_id}",
        status="ok",
        case_hash=case_hash(case),
        case=case,
        launch=Launch(launch_id, 0, f"2030-01-01T00:00:00+00:00 {launch_id}", 1.0),
        config={"model": {"name": "tiny"}, "prefix_len": [2048]},
        overrides=("model=tiny",),
        environment=ENVIRONMENT,
        labels=("cpu", "random-weights"),
        measurement=ServingMeasurement((block,), 1, None),
        notes={"sweep": sweep},
    )
