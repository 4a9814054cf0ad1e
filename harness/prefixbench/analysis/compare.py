"""Two selections side by side: ratios with intervals where they met the same point, refusals where they did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from prefixbench.analysis import comparable, frame
from prefixbench.analysis.comparable import BATCH_TOLERANCE, Mismatch
from prefixbench.analysis.stats import Interval, Sample, mean_interval, ratio
from prefixbench.record import Record

_KERNEL_POINT = (
    "prefix_tokens",
    "suffix_tokens",
    "batch",
    "q_heads",
    "kv_heads",
    "head_dim",
    "page_size",
    "dtype",
    "settings",
    "l2",
)
_SERVING_POINT = tuple(name for name in frame.POINT if name != "device")


@dataclass(frozen=True)
class Pair:
    """One point of both selections. `ratio` is second over first; `refusal` says why there is none."""

    point: str
    metric: str
    arms: tuple[str, str]
    first: Interval
    second: Interval
    ratio: Interval | None
    refusal: str | None


@dataclass(frozen=True)
class Comparison:
    pairs: tuple[Pair, ...]
    mismatches: tuple[Mismatch, ...]
    unmatched: tuple[str, ...]


def compare(
    first: Sequence[Record], second: Sequence[Record], metrics: Sequence[str] = ("decode_tok_s",)
) -> Comparison:
    """Pairs the points of two selections; at one point the same path is compared, or the only one of either side.

    Where launches are shared the ratio is paired. Realized batches that differ are refused: their ratio says nothing
    about the paths.
    """
    sides = [_arms(records) for records in (first, second)]
    pairs = []
    for key in [key for key in sides[0] if key in sides[1]]:
        for a, b in _matching(sides[0][key], sides[1][key]):
            pairs += _pairs(sides[0][key][a], sides[1][key][b], (a, b), metrics)
    unmatched = [_label(key) for i in (0, 1) for key in sides[i] if key not in sides[1 - i]]
    return Comparison(
        tuple(pairs), tuple(comparable.environment_mismatches(first, second)), tuple(dict.fromkeys(unmatched))
    )


_Key = tuple[tuple[str, object], ...]


def _arms(records: Sequence[Record]) -> dict[_Key, dict[str, pd.DataFrame]]:
    """Point -> arm -> launch rows."""
    found: dict[_Key, dict[str, pd.DataFrame]] = {}
    serving = frame.launches(frame.blocks(records))
    kernels = frame.kernels(records)
    if not kernels.empty:
        kernels = kernels.assign(arm=kernels["implementation"] + ", " + kernels["layout"])
    for rows, names in ((serving, _SERVING_POINT), (kernels, _KERNEL_POINT)):
        if rows.empty:
            continue
        for key, group in rows.groupby([*names, "arm"], sort=True, dropna=False):
            point = tuple(zip(names, key[:-1], strict=True))
            found.setdefault(point, {})[str(key[-1])] = group
    return found


def _matching(first: Mapping[str, pd.DataFrame], second: Mapping[str, pd.DataFrame]) -> list[tuple[str, str]]:
    same = [(arm, arm) for arm in first if arm in second]
    if same or len(first) != 1 or len(second) != 1:
        return same
    return [(next(iter(first)), next(iter(second)))]


def _pairs(first: pd.DataFrame, second: pd.DataFrame, arms: tuple[str, str], metrics: Sequence[str]) -> list[Pair]:
    pairs = []
    for metric in metrics:
        if metric not in first or metric not in second:
            continue
        a, b = frame.sample(first, metric), frame.sample(second, metric)
        refusal = _refusal(first, second, a, b)
        pairs.append(
            Pair(
                point=_label(tuple((name, first.iloc[0][name]) for name in _names(first))),
                metric=metric,
                arms=arms,
                first=mean_interval(list(a.values())),
                second=mean_interval(list(b.values())),
                ratio=None if refusal else ratio(b, a),
                refusal=refusal,
            )
        )
    return pairs


def _refusal(first: pd.DataFrame, second: pd.DataFrame, a: Sample, b: Sample) -> str | None:
    if not a or not b:
        return "no value on one side"
    if "realized_batch" not in first:
        return None
    batches = [float(rows["realized_batch"].mean()) for rows in (first, second)]
    if abs(batches[1] - batches[0]) > BATCH_TOLERANCE * batches[0]:
        return f"realized batch: {batches[0]:.0f} and {batches[1]:.0f}"
    return None


def _names(rows: pd.DataFrame) -> tuple[str, ...]:
    return _SERVING_POINT if "workload" in rows else _KERNEL_POINT


def _label(key: _Key) -> str:
    values = dict(key)
    if "model" in values:
        sizes = f"{values['prefix_tokens']}+{values['suffix_tokens']} tokens, {values['concurrency']} in flight"
        return f"{values['model']}, {sizes}, {values['workload']}"
    heads = f"{values['q_heads']}/{values['kv_heads']} heads"
    return f"{values['prefix_tokens']}x{values['batch']}+{values['suffix_tokens']}, {heads}, L2 {values['l2']}"
