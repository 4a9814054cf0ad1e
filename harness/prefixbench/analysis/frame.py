"""Records -> tidy pandas frames: one row per block, one per launch, one per kernel timing.

Blocks are left out only by an explicit `exclude` rule; they stay in `blocks` with the reason, `launches` counts them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TypedDict

import numpy as np
import pandas as pd

from prefixbench.analysis.holdups import hold_up
from prefixbench.analysis.metrics import block_metrics
from prefixbench.analysis.quantity import Quantity
from prefixbench.analysis.stats import Sample
from prefixbench.case import KernelCase, ServingCase
from prefixbench.machine.clocks import POWER_CAP, Clocks, clock_flags, fastest_mhz, is_judged_by
from prefixbench.machine.clocks import UNTRUSTWORTHY as UNTRUSTWORTHY_CLOCKS
from prefixbench.record import Block, Environment, KernelMeasurement, Record, ServingMeasurement, Telemetry

METRICS = (
    "decode_tok_s",
    "decode_tok_s_whole",
    "end_to_end_tok_s",
    "tpot_ms",
    "ttft_ms",
)
HIGHER_IS_BETTER = {
    "decode_tok_s": True,
    "decode_tok_s_whole": True,
    "end_to_end_tok_s": True,
    "tpot_ms": False,
    "ttft_ms": False,
    "reads_replaced": True,
    "kernel_us": False,
    "kernel_cold_us": False,
}
KERNELS = ("stock", "paged", "cascade", "dense")
STEPS = tuple(f"steps_{kernel}" for kernel in KERNELS)

# What makes two rows the same point of a sweep, measured by different paths.
POINT = (
    "model",
    "workload",
    "prefix_tokens",
    "suffix_tokens",
    "output_tokens",
    "concurrency",
    "tensor_parallel",
    "engine",
    "stock_backend",
    "settings",
    "device",
)
# Settings that exist only with the plugin: they make variants of our paths, not other points.
PLUGIN_SETTINGS = ("dense_m_eff", "min_run_tokens", "timers")

# Flags that make a block's speed untrustworthy, by how they begin.
UNTRUSTWORTHY = (*UNTRUSTWORTHY_CLOCKS, "cold-cache")
NOTHING: tuple[str, ...] = ()
CLOCKS = ("sm_clock_mhz", "power_w", "power_cap_share")
_AVERAGED = (*METRICS, "realized_batch", "steady_batch", "m_eff", "reads_replaced", "hit_rate", *CLOCKS)
_TIMES = ("decode_s", "attention_s", "prefix_s", "plan_s")


def blocks(records: Sequence[Record], exclude: Sequence[str] = NOTHING) -> pd.DataFrame:
    """One row per block of every serving record; missing figures are NaN, their reasons in `missing`.

    `exclude` lists beginnings of flags: a block with such a flag gets `excluded` True and says why. What the clocks
    did is judged anew from the samples where there are any; earlier versions judged a power cap as a fault.
    """
    fastest = _fastest_by_launch(records)
    rows = [
        {**_identity(record), **_block_row(record.case, block, exclude, fastest[record.launch.launch_id])}
        for record in records
        if isinstance(record.case, ServingCase) and isinstance(record.measurement, ServingMeasurement)
        for block in record.measurement.blocks
    ]
    return pd.DataFrame(rows)


def launches(block_rows: pd.DataFrame) -> pd.DataFrame:
    """One row per record: means over its blocks that are not excluded, step shares over all their steps.

    `blocks_used` and `blocks_excluded` say how many; a record without a usable block keeps its row with NaN figures.
    """
    if block_rows.empty:
        return block_rows
    everything = block_rows.groupby("record_id", sort=False)
    used = block_rows[~block_rows["excluded"]].groupby("record_id", sort=False)
    rows = block_rows.drop_duplicates("record_id")[list(_IDENTITY)].set_index("record_id", drop=False)
    averaged, counted = list(_AVERAGED), ["completed", "failed", "warmup_in_flight"]
    totals = [*STEPS, *_TIMES]
    rows[averaged] = used[averaged].mean()
    rows[totals] = used[totals].sum(min_count=1)
    rows[counted] = used[counted].sum().reindex(rows.index, fill_value=0)
    steps = rows[list(STEPS)]
    rows["steps"] = steps.sum(axis=1, skipna=False)
    for kernel in KERNELS:
        rows[f"share_{kernel}"] = (steps[f"steps_{kernel}"] / rows["steps"]).where(rows["steps"] > 0)
    rows["blocks_used"] = used.size().reindex(rows.index, fill_value=0)
    rows["blocks_excluded"] = everything.size() - rows["blocks_used"]
    rows["flags"] = pd.Series(
        {key: tuple(dict.fromkeys(f for some in flags for f in some)) for key, flags in everything["flags"]}
    )
    rows["exclusions"] = pd.Series(
        {key: tuple(dict.fromkeys(reason for reason in why if reason)) for key, why in everything["exclusion"]}
    )
    states = {key: "; ".join(dict.fromkeys(found)) for key, found in used["cache_state"]}
    rows["cache_state"] = [states.get(key, "") for key in rows.index]
    return rows.reset_index(drop=True)


def kernels(records: Sequence[Record]) -> pd.DataFrame:
    """One row per timing of every kernel record, with achieved rates and the traffic counters beside it.

    `served_from_l2` is True when the modelled bytes would need more than the copy bandwidth plus a tenth.
    """
    rows = []
    fastest = _fastest_by_launch(records)
    for record in records:
        measurement = record.measurement
        case = record.case
        if not isinstance(case, KernelCase) or not isinstance(measurement, KernelMeasurement):
            continue
        hardware = next((t for t in measurement.traffic if t.source == "ncu"), None)
        written = tuple(str((record.notes or {}).get("flags") or "").split("; "))
        watched = _watched(measurement.telemetry, written, fastest[record.launch.launch_id])
        for timing in measurement.timings:
            seconds = median(timing.samples_us) / 1e6 if timing.samples_us else math.nan
            seconds = seconds if seconds > 0 else math.nan  # no launch takes no time: the clock was wrong
            rate, copy = measurement.model_bytes / seconds, measurement.copy_bandwidth_bytes_per_s or None
            rows.append(
                {
                    "record_id": record.record_id,
                    "case_hash": record.case_hash,
                    "launch_id": record.launch.launch_id,
                    "started_at": record.launch.started_at,
                    "hostname": record.environment.hostname,
                    "status": record.status,
                    "device": device_name(record.environment),
                    "implementation": case.implementation,
                    "path_ran": measurement.path_ran,
                    "layout": case.layout,
                    "dtype": case.dtype,
                    "prefix_tokens": case.prefix_tokens,
                    "suffix_tokens": case.suffix_tokens,
                    "batch": case.batch,
                    "q_heads": case.q_heads,
                    "kv_heads": case.kv_heads,
                    "head_dim": case.head_dim,
                    "page_size": case.page_size,
                    "m_eff": case.batch * case.q_heads // case.kv_heads,
                    "settings": json.dumps(case.settings, sort_keys=True),
                    "l2": timing.l2,
                    "clock": timing.clock,
                    "kernel_us": seconds * 1e6,
                    "repetitions": len(timing.samples_us),
                    "flops_per_s": measurement.flops / seconds,
                    "bytes_per_s": rate,
                    "copy_bytes_per_s": _nan(copy),
                    "matmul_flops_per_s": _nan(measurement.matmul_flops_per_s or None),
                    "model_bytes": measurement.model_bytes,
                    "dram_read_bytes": _nan(hardware.dram_read_bytes if hardware else None),
                    "l2_read_bytes": _nan(hardware.l2_read_bytes if hardware else None),
                    **watched,
                    "served_from_l2": copy is not None and rate > 1.1 * copy,
                }
            )
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Point:
    """Launch rows of one point of a sweep. `variant` holds the plugin settings when a sweep varied them."""

    key: dict[str, object]
    variant: str
    rows: pd.DataFrame

    @property
    def arms(self) -> list[str]:
        return list(self._by_arm)

    @cached_property
    def _by_arm(self) -> dict[str, pd.DataFrame]:
        return {str(arm): rows for arm, rows in self.rows.groupby("arm", sort=False)}

    def of_arm(self, arm: str) -> pd.DataFrame:
        """Launch rows of one arm; empty when it was not measured here."""
        return self._by_arm.get(arm, self.rows.iloc[:0])

    def sample(self, arm: str, metric: str = "decode_tok_s") -> Sample:
        return sample(self.of_arm(arm), metric)

    def step_shares(self, arm: str) -> dict[str, float] | None:
        """Share of decode steps each kernel served over all launches of the arm; None without counters."""
        steps = np.nansum(self.of_arm(arm)[list(STEPS)].to_numpy(dtype=float), axis=0)
        if not steps.sum() > 0:
            return None
        return dict(zip(KERNELS, (steps / steps.sum()).tolist(), strict=True))

    def record_ids(self, *arms: str) -> tuple[str, ...]:
        chosen = self.rows[self.rows["arm"].isin(arms or self.arms)]
        return tuple(chosen["record_id"])


def points(launch_rows: pd.DataFrame) -> Iterator[Point]:
    """Every point of the sweep with the rows of all its paths; stock without the plugin stands beside each variant."""
    if launch_rows.empty:
        return
    for key, rows in launch_rows.groupby(list(POINT), sort=True, dropna=False):
        variants = sorted(set(rows.loc[rows["plugin"], "variant"])) or [""]
        for variant in variants:
            yield Point(
                key=dict(zip(POINT, key, strict=True)),
                variant=variant,
                rows=rows[~rows["plugin"] | (rows["variant"] == variant)],
            )


def sample(rows: pd.DataFrame, metric: str = "decode_tok_s") -> Sample:
    """Launch id -> value, launches without a value left out."""
    values = zip(rows["launch_id"].tolist(), rows[metric].tolist(), strict=True)
    return {launch: value for launch, value in values if not math.isnan(value)}


def arm_name(case: ServingCase) -> str:
    """The path; `stock` alone is unmodified SGLang, `stock+plugin` is the plugin told to do nothing."""
    return "stock+plugin" if case.path == "stock" and case.plugin else case.path


def device_name(environment: Environment) -> str:
    """GPU name (x count), or the CPU's."""
    names = [gpu.name for gpu in environment.gpus]
    if not names:
        return f"CPU: {environment.cpu or 'unknown'}"
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def flagged(flags: Sequence[str], rule: Sequence[str]) -> str | None:
    """The first flag that begins like an entry of the rule."""
    return next((flag for flag in flags if flag.startswith(tuple(rule))), None) if rule else None


_IDENTITY = (
    "record_id",
    "case_hash",
    "launch_id",
    "launch_index",
    "started_at",
    "hostname",
    "status",
    "arm",
    "path",
    "plugin",
    *POINT,
    "variant",
    "labels",
)


def _identity(record: Record) -> dict[str, object]:
    case = record.case
    assert isinstance(case, ServingCase)
    engine = {k: v for k, v in case.engine_settings.items() if k not in PLUGIN_SETTINGS}
    settings = {"engine": engine, "workload": case.workload_settings, "model": case.model_settings}
    variant = {k: v for k, v in case.engine_settings.items() if k in PLUGIN_SETTINGS}
    return {
        "record_id": record.record_id,
        "case_hash": record.case_hash,
        "launch_id": record.launch.launch_id,
        "launch_index": record.launch.index,
        "started_at": record.launch.started_at,
        "hostname": record.environment.hostname,
        "status": record.status,
        "arm": arm_name(case),
        "path": case.path,
        "plugin": case.plugin,
        **{name: getattr(case, name) for name in POINT if name not in ("settings", "device")},
        "settings": json.dumps(settings, sort_keys=True),
        "variant": json.dumps(variant, sort_keys=True),
        "device": device_name(record.environment),
        "labels": record.labels,
    }


def _block_row(case: ServingCase, block: Block, exclude: Sequence[str], fastest: int) -> dict[str, object]:
    figures = block_metrics(block)
    quantities: dict[str, Quantity] = {name: getattr(figures, name) for name in (*METRICS, "realized_batch")}
    watched = _watched(block.telemetry, (*block.flags, hold_up(block) or ""), fastest)
    reason = flagged(watched["flags"], exclude)
    row: dict[str, object] = {name: _nan(quantity.value) for name, quantity in quantities.items()}
    heads, kv_heads = case.model_settings.get("heads"), case.model_settings.get("kv_heads")
    group = heads / kv_heads if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads else math.nan
    counters = block.counters
    steps = {f"steps_{kernel}": counters.steps.get(kernel, 0) if counters else math.nan for kernel in KERNELS}
    row |= {
        "position": block.position,
        "missing": "; ".join(f"{name}: {q.reason}" for name, q in quantities.items() if q.reason),
        "steady_batch": _nan(figures.steady_batch),
        "m_eff": _nan(figures.realized_batch.value) * group,
        # Prefix tokens that stock would have read for each one that was read.
        "reads_replaced": _share(counters.prefix_tokens_read_by_stock, counters.prefix_tokens_read_once)
        if counters
        else math.nan,
        "completed": figures.completed,
        "failed": figures.failed,
        "warmup_in_flight": figures.warmup_in_flight,
        "output_tokens_total": figures.output_tokens,
        "prompt_tokens_total": figures.prompt_tokens,
        "hit_rate": _share(figures.cached_tokens, figures.prompt_tokens),
        "token_source": figures.token_source,
        **steps,
        **_step_shares(steps),
        **{name: _nan(getattr(counters, name) if counters else None) for name in _TIMES},
        "wall_s": block.wall_s,
        "cache_state": block.cache_state,
        **watched,
        "excluded": reason is not None,
        "exclusion": reason or "",
    }
    return row


def _step_shares(steps: Mapping[str, float]) -> dict[str, float]:
    counts = {kernel: steps[f"steps_{kernel}"] for kernel in KERNELS}
    total = sum(counts.values())
    return {f"share_{kernel}": count / total if total > 0 else math.nan for kernel, count in counts.items()}


class _Watched(TypedDict):
    flags: tuple[str, ...]
    sm_clock_mhz: float
    power_w: float
    power_cap_share: float


def _watched(telemetry: Sequence[Telemetry], written: Sequence[str], fastest: int) -> _Watched:
    """Clocks and flags; those about clocks are the ones `written` down only where the samples cannot tell."""
    flags = tuple(flag for flag in written if flag)
    if is_judged_by(telemetry):
        others = (flag for flag in flags if not flag.startswith((*UNTRUSTWORTHY_CLOCKS, POWER_CAP)))
        flags = (*others, *clock_flags(telemetry, fastest))
    clocks = Clocks.of(telemetry)
    return {
        "flags": flags,
        "sm_clock_mhz": clocks.sm_clock_mhz,
        "power_w": clocks.power_w,
        "power_cap_share": clocks.power_cap_share,
    }


def _fastest_by_launch(records: Sequence[Record]) -> defaultdict[str, int]:
    """Launch id -> the highest SM clock that any of its records saw: what every block of it could have had."""
    fastest: defaultdict[str, int] = defaultdict(int)
    for record in records:
        measurement, launch = record.measurement, record.launch.launch_id
        blocks = measurement.blocks if isinstance(measurement, ServingMeasurement) else ()
        watched = [block.telemetry for block in blocks]
        watched += [measurement.telemetry] if isinstance(measurement, KernelMeasurement) else []
        fastest[launch] = max([fastest[launch], *(fastest_mhz(telemetry) for telemetry in watched)])
    return fastest


def _share(part: int | None, whole: int) -> float:
    return part / whole if part is not None and whole else math.nan


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
