"""Amdahl's f and s where the server's timers saw nothing: from kernel records of the shape that the server decoded.

    f = layers x (one layer's attention by stock's kernel) / step of stock    s = stock's kernel / the path's kernel

The step is measured in the server; the kernels were timed apart from it, in a process of their own. A derived figure.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from prefixbench.analysis import amdahl
from prefixbench.analysis.amdahl import AmdahlCheck
from prefixbench.analysis.frame import Point
from prefixbench.analysis.stats import Sample, contrast_ratio, ratio

# The decode kernel of a stock backend, and the tokens of the pages that SGLang 0.5.16 plans it with: FlashInfer always
# with single tokens, whatever the server's page size is. A record at another page size is of another launch.
_STOCK_KERNELS = {"flashinfer": ("flashinfer-decode", 1)}
_LAYOUT = "shared-contiguous"  # a prefix that was cached in one go lies in one run of slots, whichever path reads it
# Own tokens between two timed cells are interpolated, if neither has over this many times more or fewer of them. A cell
# without own tokens is none of the two: it runs a pass fewer.
_FARTHEST = 4
_MODEL_SHAPE = {"layers", "heads", "kv_heads", "head_dim", "dtype"}
_BATCH_TOLERANCE = 0.02
_MIN_ACTIVE_SHARE = 0.9  # of steps; at the thin ends of a block a few requests decode, which another kernel may serve


class KernelShape(NamedTuple):
    """Decode attention of one layer on one GPU, but for the tokens that a request has of its own."""

    chip: str
    prefix_tokens: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    implementation: str


@dataclass(frozen=True)
class Timed:
    """Microseconds by kernel launch, of one shape at one number of own tokens; cold L2 where that was timed."""

    us: Sample
    record_ids: tuple[str, ...]


class _Pair(NamedTuple):
    """Stock's kernel and the path's at one number of own tokens, and how much that number counts."""

    weight: float
    stock: Timed
    ours: Timed


KernelTimes = Mapping[KernelShape, Mapping[int, Timed]]


def kernel_times(rows: pd.DataFrame) -> KernelTimes:
    """Rows of `frame.kernels` -> shape -> own tokens -> times. Failed and wrong results take no part."""
    found: defaultdict[KernelShape, dict[int, Timed]] = defaultdict(dict)
    if rows.empty:
        return found
    able = rows[(rows["status"] == "ok") & (rows["layout"] == _LAYOUT) & rows["kernel_us"].notna()]
    able = able.assign(chip=able["device"].map(_chip))
    for _, cell in able.groupby([*KernelShape._fields, "suffix_tokens"], sort=False):
        timed = cell[cell["l2"] == "cold"] if "cold" in set(cell["l2"]) else cell  # weights flush it between two layers
        first = timed.iloc[0]
        us = {str(launch): float(times.mean()) for launch, times in timed.groupby("launch_id")["kernel_us"]}
        shape = KernelShape(*(first[name] for name in KernelShape._fields))
        found[shape][int(first["suffix_tokens"])] = Timed(us, tuple(dict.fromkeys(timed["record_id"])))
    return found


def measured_or_derived(point: Point, path: str, baseline: str, times: KernelTimes) -> AmdahlCheck | str:
    """The check by timers in the server, else the one derived from kernel records, else a sentence why neither."""
    measured = amdahl.check(point, path)
    if isinstance(measured, AmdahlCheck):
        return measured
    derived = derive(point, path, baseline, times)
    return derived if isinstance(derived, AmdahlCheck) else f"not timed in the server ({measured}); {derived}"


def derive(point: Point, path: str, baseline: str, times: KernelTimes) -> AmdahlCheck | str:
    """f, s and what they predict, from kernels of the point's shape; a sentence instead where one is missing.

    A request decodes with `suffix_tokens` of its own at first and `output_tokens` more at last. Attention grows in
    proportion, so the mean step is that of `suffix_tokens + output_tokens / 2`: a cell timed there, or the line between
    the nearest below and above.
    """
    served = point.step_shares(path) or {}
    model, page_size = _settings(point)
    refusal = _refusal(point, (baseline, path), model) or _mixture(path, served)
    if refusal is not None:
        return f"no kernel record describes it: {refusal}"
    stock_kernel, stock_page = _STOCK_KERNELS[str(point.key["stock_backend"])]
    stock = _shape(point, model, stock_kernel, stock_page)
    ours = _shape(point, model, max(served, key=lambda kernel: served[kernel]), page_size)
    own = int(str(point.key["suffix_tokens"])) + int(str(point.key["output_tokens"])) / 2
    weights = _weights(own, set(times.get(stock, ())) & set(times.get(ours, ())))
    if weights is None:
        return _wanted(stock, ours, own, times)
    pairs = [_Pair(weight, times[stock][tokens], times[ours][tokens]) for tokens, weight in weights.items()]
    detail = f"with {' and '.join(str(tokens) for tokens in weights)} own tokens"
    return replace(_check(point, path, baseline, pairs, int(model["layers"])), detail=detail)


def _check(point: Point, path: str, baseline: str, pairs: Sequence[_Pair], layers: int) -> AmdahlCheck:
    """1 / ((1 - f) + f / s) is step / (step - layers x (stock's kernel - ours)): one ratio, with Fieller's interval."""
    step_us = _step_us(point, baseline)
    stock_us, our_us = [pair.stock.us for pair in pairs], [pair.ours.us for pair in pairs]
    weights = [pair.weight for pair in pairs]
    none, per_step = [0.0] * len(pairs), [layers * weight for weight in weights]
    saved = [-us for us in per_step]
    share = contrast_ratio([step_us, *stock_us], [0.0, *per_step], [1.0, *none])
    predicted = contrast_ratio([step_us, *stock_us, *our_us], [1.0, *none, *none], [1.0, *saved, *per_step])
    measured = ratio(point.sample(path), point.sample(baseline))
    return AmdahlCheck(
        path=path,
        baseline=baseline,
        basis="attention",
        share=share,
        kernel_speedup=contrast_ratio([*stock_us, *our_us], [*weights, *none], [*none, *weights]),
        predicted=predicted,
        measured=measured,
        contradiction=amdahl.contradiction(measured, share, predicted),
        source="derived from kernel records",
        record_ids=tuple(dict.fromkeys(i for pair in pairs for i in (*pair.stock.record_ids, *pair.ours.record_ids))),
    )


def _refusal(point: Point, arms: Sequence[str], model: Mapping[str, Any]) -> str | None:
    """Why no kernel of the bench can stand for what was served here, if so."""
    if point.key["workload"] != "shared-prefix":
        return f"{point.key['workload']} is not one prefix shared by all"
    if point.key["stock_backend"] not in _STOCK_KERNELS:
        return f"the bench has no kernel of the stock backend {point.key['stock_backend']}"
    if not model.keys() >= _MODEL_SHAPE:
        return "its records do not say the shape of the model"
    idle = next((arm for arm in arms if not _step_us(point, arm)), None)
    return None if idle is None else f"{idle} did not decode {point.key['concurrency']} requests at a time"


def _mixture(path: str, served: Mapping[str, float]) -> str | None:
    """Why the path's steps were not those of one kernel of ours, if so."""
    if not served:
        return f"nothing counted the steps of {path}"
    kernel, share = max(served.items(), key=lambda pair: pair[1])
    if share < _MIN_ACTIVE_SHARE:
        return f"no single kernel served {path}: {kernel} {share:.0%} of its steps"
    return f"stock served {share:.0%} of the steps of {path}" if kernel == "stock" else None


def _step_us(point: Point, arm: str) -> Sample:
    """Microseconds of a decode step by launch; launches that held another batch are left out."""
    rows, batch = point.of_arm(arm), int(str(point.key["concurrency"]))
    columns = (rows[name].tolist() for name in ("launch_id", "steady_batch", "decode_tok_s"))
    return {
        launch: 1e6 * running / rate
        for launch, running, rate in zip(*columns, strict=True)
        if rate > 0 and abs(running / batch - 1) <= _BATCH_TOLERANCE
    }


def _settings(point: Point) -> tuple[dict[str, Any], int]:
    """What the point's key says of the model, and the server's page size (SGLang's default is 1)."""
    settings = json.loads(str(point.key["settings"]))
    return settings["model"], int(settings["engine"].get("page_size") or 1)


def _shape(point: Point, model: Mapping[str, Any], implementation: str, page_size: int) -> KernelShape:
    ranks = int(str(point.key["tensor_parallel"]))
    return KernelShape(
        _chip(str(point.key["device"])),
        int(str(point.key["prefix_tokens"])),
        int(str(point.key["concurrency"])),
        int(model["heads"]) // ranks,
        max(1, int(model["kv_heads"]) // ranks),
        int(model["head_dim"]),
        str(model["dtype"]),
        page_size,
        implementation,
    )


def _chip(device: str) -> str:
    """Kernels run on one GPU of a host, however many it has."""
    return device.rpartition(" x ")[2]


def _weights(own: float, timed: set[int]) -> dict[int, float] | None:
    """Timed numbers of own tokens that stand for `own`, with their weights."""
    if own in timed:
        return {int(own): 1.0}
    below = max((tokens for tokens in timed if 0 < own / _FARTHEST <= tokens < own), default=None)
    above = min((tokens for tokens in timed if own < tokens <= own * _FARTHEST), default=None)
    if below is None or above is None:
        return None
    weight = (own - below) / (above - below)
    return {below: 1 - weight, above: weight}


def _wanted(stock: KernelShape, ours: KernelShape, own: float, times: KernelTimes) -> str:
    """What is missing, what there is beside it, and the command that records it."""
    pages = {stock.page_size, ours.page_size}
    command = (
        f"prefixbench kernels kernels=axes prefix_len={stock.prefix_tokens} suffix_len={own:.0f} batch={stock.batch} "
        f"q_heads={stock.q_heads} kv_heads={stock.kv_heads} head_dim={stock.head_dim} dtype={stock.dtype} "
        f"page_size=[{','.join(map(str, sorted(pages)))}] implementation=[{stock.implementation},{ours.implementation}]"
    )
    tokens = set(times.get(stock, ())) | set(times.get(ours, ()))
    others = {known.page_size for known in times if known._replace(page_size=stock.page_size) == stock} - pages
    beside = [f"with {found} own tokens" for found in sorted(tokens)]
    beside += [f"at page size {found}" for found in sorted(others)]
    nearest = f" (there are records {', '.join(beside)})" if beside else ""
    return f"no kernel record of this shape: needs {own:.0f} own tokens{nearest}, recorded by `{command}`"
