"""One row per request, and latency percentiles where there are enough requests for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from prefixbench.analysis.metrics import request_latencies
from prefixbench.analysis.quantity import Quantity, percentile
from prefixbench.record import Record, ServingMeasurement

QUANTILES = (0.5, 0.9, 0.95, 0.99)


def requests(records: Sequence[Record]) -> pd.DataFrame:
    """Every request of every block, failed ones included; figures that it does not have are NaN."""
    rows = []
    for record in records:
        if not isinstance(record.measurement, ServingMeasurement):
            continue
        for block in record.measurement.blocks:
            for number, request in enumerate(block.requests):
                arrivals = [(count, at) for count, at in request.chunks if count > 0]
                first, last = (arrivals[0], arrivals[-1]) if arrivals else ((0, math.nan), (0, math.nan))
                decoded = request.output_tokens - first[0]
                rows.append(
                    {
                        "record_id": record.record_id,
                        "launch_id": record.launch.launch_id,
                        "position": block.position,
                        "request": number,
                        "sent_s": request.sent_s,
                        "ttft_ms": 1e3 * (first[1] - request.sent_s),
                        "tpot_ms": 1e3 * (last[1] - first[1]) / decoded if decoded > 0 else math.nan,
                        "end_to_end_ms": 1e3 * (last[1] - request.sent_s),
                        "prompt_tokens": request.prompt_tokens,
                        "cached_tokens": math.nan if request.cached_tokens is None else request.cached_tokens,
                        "output_tokens": request.output_tokens,
                        "token_source": request.token_source,
                        "finish_reason": request.finish_reason or "",
                        "error": request.error or "",
                    }
                )
    return pd.DataFrame(rows)


def latency_percentiles(record: Record) -> dict[str, dict[float, Quantity]]:
    """ttft_ms, tpot_ms and end_to_end_ms over all completed requests of the record's blocks."""
    if not isinstance(record.measurement, ServingMeasurement):
        return {}
    found = [request_latencies(block) for block in record.measurement.blocks]
    names = ("ttft_ms", "tpot_ms", "end_to_end_ms")
    pooled = {name: [value for latencies in found for value in getattr(latencies, name)] for name in names}
    return {name: {q: percentile(values, q) for q in QUANTILES} for name, values in pooled.items()}
