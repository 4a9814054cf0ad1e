"""One record of every kind of measurement, so that what reads records can be shown all of them."""

from __future__ import annotations

from dataclasses import replace

from harness.builders import SERVING, block, counters, kernel_record, request, serving_record, wrap
from prefixbench.case import DispatchCase, NumericsCase, OutsideCase
from prefixbench.record import (
    DispatchMeasurement,
    NumericsMeasurement,
    OutsideBlock,
    OutsideMeasurement,
    OutsidePair,
    Record,
)


def one_of_every_kind(launch: int = 0) -> dict[str, Record]:
    """By the `kind` of their measurement; all of one run."""
    made = (serving_record("full", launch), kernel_record("dense", launch), numerics(launch), outside(launch))
    records = (replace(record, notes={"sweep": "run"}) for record in (*made, dispatch(launch)))
    return {record.measurement.kind: record for record in records if record.measurement is not None}


def numerics(launch: int = 0) -> Record:
    case = NumericsCase(
        model="tiny",
        role="path",
        path="full",
        concurrency=2,
        requests=2,
        prefix_tokens=128,
        suffix_tokens=8,
        decode_tokens=2,
        tensor_parallel=1,
        stock_backend="torch_native",
        fault="none",
        engine_settings={},
        workload_settings={"seed": 0},
        model_settings={},
    )
    logprobs = ((-0.5, -1.0), (-0.25, -2.0))
    return wrap(case, NumericsMeasurement("0" * 64, logprobs, ((1, 2), (3, 4)), counters({"dense": 2}, 2)), launch)


def outside(launch: int = 0) -> Record:
    """Eight requests of 65 tokens in 1.64 s by our client, in 2 s by theirs."""
    ours = block([request(1.0, 0.01, 65)] * 8)
    theirs = OutsideBlock(0, 2.0, 100, (65,) * 8, (1.0,) * 8, (1.0,) * 8, 260.0, 15.6)
    pair = OutsidePair(ours, theirs, counters({"dense": 64}, 8))
    return wrap(OutsideCase(SERVING, "client", "random-ids"), OutsideMeasurement((pair, pair)), launch)


def dispatch(launch: int = 0) -> Record:
    case = DispatchCase("auto", 32, 512, "one", 4096, 64, 32, 8, 128, {"seed": 0})
    return wrap(case, DispatchMeasurement((0.1, 0.2, 0.3), 100, (150.0, 180.0, 900.0), False, "dense"), launch)
