"""May two selections be compared? A declared list of keys must match; a mismatch names the key and both values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from prefixbench.analysis.frame import KERNELS
from prefixbench.case import DispatchCase, KernelCase, NumericsCase, OutsideCase, ServingCase
from prefixbench.record import Environment, Record

BATCH_TOLERANCE = 0.05
PATH_SHARE_TOLERANCE = 0.10
CLOCK_TOLERANCE = 0.03
POWER_TOLERANCE = 0.05
HIT_RATE_TOLERANCE = 0.01

# What a change to this project may change; everything else installed must stay as it was.
UNDER_TEST = ("prefixonce",)


@dataclass(frozen=True)
class Mismatch:
    """One key that differs and is not under test. `where` is a case, or "environment"."""

    key: str
    baseline: str
    candidate: str
    where: str = "environment"

    def __str__(self) -> str:
        return f"{self.key}: {self.baseline} in the baseline, {self.candidate} in the candidate ({self.where})"


def environment_mismatches(
    baseline: Sequence[Record], candidate: Sequence[Record], under_test: Sequence[str] = UNDER_TEST
) -> list[Mismatch]:
    """GPU, driver, CUDA, CPU, Python and every package that is not under test."""
    sides = [_environment_values([r.environment for r in records], under_test) for records in (baseline, candidate)]
    return [
        Mismatch(key, sides[0].get(key, "absent"), sides[1].get(key, "absent"))
        for key in sorted(sides[0].keys() | sides[1].keys())
        if sides[0].get(key, "absent") != sides[1].get(key, "absent")
    ]


def measured_mismatches(baseline: pd.DataFrame, candidate: pd.DataFrame, where: str) -> list[Mismatch]:
    """Launch rows of one case: cache state, hit rate, realized batch, shares of steps by path, SM clock.

    What a kind of row does not have, or was not observed, is not compared.
    """
    found = []
    before_state, after_state = _cache_states(baseline), _cache_states(candidate)
    if before_state != after_state:
        found.append(Mismatch("cache state", before_state, after_state, where))
    checks = [
        ("cache hit rate", "hit_rate", HIT_RATE_TOLERANCE, False),
        ("realized batch", "realized_batch", BATCH_TOLERANCE, True),
        *((f"share of steps by {kernel}", f"share_{kernel}", PATH_SHARE_TOLERANCE, False) for kernel in KERNELS),
    ]
    for key, column, tolerance, relative in checks:
        if column not in baseline:
            continue
        before, after = float(baseline[column].mean()), float(candidate[column].mean())
        if abs(after - before) > tolerance * (abs(before) if relative else 1):
            found.append(Mismatch(key, f"{before:.4g}", f"{after:.4g}", where))
    clock = clock_mismatch(baseline, candidate, where)
    if clock is not None and not is_clock_own_doing(baseline, candidate):
        found.append(clock)
    return found


def clock_mismatch(baseline: pd.DataFrame, candidate: pd.DataFrame, where: str) -> Mismatch | None:
    """The mean SM clocks of two arms where they differ by more than the tolerance."""
    before, after = (float(rows["sm_clock_mhz"].mean()) for rows in (baseline, candidate))
    if not abs(after - before) > CLOCK_TOLERANCE * before:
        return None
    return Mismatch("SM clock (MHz)", f"{before:.4g}", f"{after:.4g}", where)


def is_clock_own_doing(baseline: pd.DataFrame, candidate: pd.DataFrame) -> bool:
    """Whether the slower arm's clock is its own work's doing: held by the power cap while it drew no less.

    Drawing less at a lower clock means that the cap was lowered from outside. Both arms must come from one machine:
    chips of one kind reach different clocks under the same cap.
    """
    slow, fast = sorted((baseline, candidate), key=lambda rows: float(rows["sm_clock_mhz"].mean()))
    drew_no_less = slow["power_w"].mean() >= (1 - POWER_TOLERANCE) * fast["power_w"].mean()  # False where unknown
    is_one_machine = len({*baseline["hostname"], *candidate["hostname"]}) == 1
    return bool(is_one_machine and drew_no_less and slow["power_cap_share"].mean() > 0)


def case_mismatches(baseline: Mapping[str, Record], candidate: Mapping[str, Record]) -> list[Mismatch]:
    """Cases (by hash) that only the baseline has: the nearest new case and the fields in which it differs."""
    missing = sorted(baseline.keys() - candidate.keys())
    fresh = {key: _fields(candidate[key]) for key in candidate.keys() - baseline.keys()}
    found = []
    for key in missing:
        wanted = _fields(baseline[key])
        differing = [_differing(wanted, fields) for fields in fresh.values()]
        nearest = min(differing, key=len, default=None)
        where = case_label(baseline[key])
        if nearest is None or len(nearest) > 3:
            found.append(Mismatch("case", where, "absent", key))
        else:
            found += [Mismatch(n, str(a), str(b), where) for n, (a, b) in nearest.items()]
    return found


def case_label(record: Record) -> str:
    """A short name of the case for tables."""
    match record.case:
        case KernelCase() as case:
            shape = f"{case.prefix_tokens}x{case.batch}+{case.suffix_tokens}"
            return f"{case.implementation} {shape}, {case.q_heads}/{case.kv_heads} heads, {case.layout}"
        case NumericsCase() as case:
            fault = "" if case.fault == "none" else f" with {case.fault}"
            return f"{case.model} {case.role} {case.path}{fault} {case.prefix_tokens}x{case.concurrency}"
        case DispatchCase() as case:
            shape = f"{case.prefix_tokens}x{case.batch}+{case.suffix_tokens}"
            return f"{case.mode} {shape}, {case.groups} groups, {case.change} exchanged"
        case OutsideCase() as case:
            return f"{_serving_label(case.serving)}, {case.client}"
        case ServingCase() as case:
            return _serving_label(case)


def _serving_label(case: ServingCase) -> str:
    path = case.path if case.path != "stock" or not case.plugin else "stock+plugin"
    return f"{case.model} {path} {case.prefix_tokens}x{case.concurrency} {case.workload}"


def _environment_values(environments: Sequence[Environment], under_test: Sequence[str]) -> dict[str, str]:
    seen: dict[str, set[str]] = {}
    for environment in environments:
        values = {
            "GPU": ", ".join(gpu.name for gpu in environment.gpus) or "none",
            "GPU driver": ", ".join(sorted({str(gpu.driver) for gpu in environment.gpus})) or "none",
            "CUDA": str(environment.cuda),
            "CPU": str(environment.cpu),
            "CPU count": str(environment.cpu_count),
            "Python": ".".join(environment.python.split(".")[:2]),
            **{f"package {n}": str(v) for n, v in environment.packages.items() if n not in under_test},
        }
        for key, value in values.items():
            seen.setdefault(key, set()).add(value)
    return {key: " and ".join(sorted(values)) for key, values in seen.items()}


def _cache_states(rows: pd.DataFrame) -> str:
    """Distinct states without the hit rate, which is compared as a number."""
    if "cache_state" not in rows:
        return "none"
    states = "; ".join(rows["cache_state"]).split("; ")
    texts = {re.sub(r",? *hit rate [^,;]*", "", state).strip() for state in states if state}
    return " | ".join(sorted(texts)) or "unknown"


def _fields(record: Record) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in asdict(record.case).items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _differing(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    return {
        name: (a.get(name, "absent"), b.get(name, "absent"))
        for name in sorted(a.keys() | b.keys())
        if a.get(name, "absent") != b.get(name, "absent")
    }
