"""Judges of the claims about the running server: D3, R1 to R3, A1, A2, S1, P1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prefixbench.analysis import amdahl
from prefixbench.analysis.attribution import YARDSTICKS, Rung, attribute
from prefixbench.analysis.claims.evidence import Evidence, Finding, Judge, figure, not_run
from prefixbench.analysis.claims.reported import Claim
from prefixbench.analysis.frame import Point, device_name
from prefixbench.analysis.kernel_share import kernel_times, measured_or_derived
from prefixbench.analysis.stats import Interval, mean_interval, ratio, spread_interval
from prefixbench.record import PlacementTrace, Record, ServingMeasurement

LADDER = ("stock", "cascade", "full")
_ON_CPU = "this is a claim about a GPU; shown is what the CPU did, with a small model"


def baseline_of(point: Point) -> str:
    """Unmodified SGLang where it was measured, else the plugin told to do nothing."""
    return "stock" if "stock" in point.arms else "stock+plugin"


def judge_cell(claim: Claim, evidence: Evidence) -> Finding:
    """D3: time per token of cascade over dense, in the cell where dense gains most."""
    cells = [(p, arm) for p in evidence.points if "cascade" in p.arms for arm in _dense_arms(p)]
    if not cells:
        return not_run("at no point did cascade serve one path and dense all steps of another: path=cascade,dense")
    compared = [(p, arm, ratio(p.sample("cascade", "tpot_ms"), p.sample(arm, "tpot_ms"))) for p, arm in cells]
    best, arm, gain = max(
        compared, key=lambda cell: (_matches(cell[0], claim), _is_gpu(cell[0]), cell[2].estimate or 0)
    )
    dense, cascade = (mean_interval(list(best.sample(path, "tpot_ms").values())) for path in (arm, "cascade"))
    text = f"{figure(dense, '{:.3g} ms')} dense, {figure(cascade, '{:.3g} ms')} cascade per token"
    finding = _finding(best, f"{text}, {figure(gain)}", gain, "cascade", arm)
    return _at_least(finding, claim, [best])


def _dense_arms(point: Point) -> list[str]:
    """Paths of which dense served every step, chosen or forced."""
    shares = {arm: point.step_shares(arm) or {} for arm in ("dense", "full", "auto") if arm in point.arms}
    return [arm for arm, share in shares.items() if share.get("dense", 0.0) == 1.0]


def judge_headline(claim: Claim, evidence: Evidence) -> Finding:
    """R1: full over stock at the claimed point."""
    point = _headline(evidence, claim)
    if point is None:
        return not_run("stock, cascade and full were not measured at one point")
    rates = [f"{figure(mean_interval(list(point.sample(arm).values())), '{:,.0f}')} {arm}" for arm in _ladder(point)]
    times = ratio(point.sample("full"), point.sample(baseline_of(point)))
    finding = _finding(point, f"{'; '.join(rates)} tok/s; {figure(times)}", times, *_ladder(point))
    return _at_least(finding, replace(claim, values={**claim.values, "ratio": _reported_ratio(claim)}), [point])


def judge_share(claim: Claim, evidence: Evidence) -> Finding:
    """R2: cascade's share of the gain, in the yardstick of the claim with the others beside it."""
    point = _headline(evidence, claim)
    if point is None:
        return not_run("stock, cascade and full were not measured at one point")
    rungs = [Rung(arm.partition("+")[0], point.sample(arm), point.step_shares(arm)) for arm in _ladder(point)]
    splits = {yardstick: attribute(rungs, yardstick).shares[0].share for yardstick in YARDSTICKS}
    share = splits["throughput"]
    text = "; ".join(f"{figure(split, '{:.3f}')} ({yardstick})" for yardstick, split in splits.items())
    finding = _finding(point, text, share, *_ladder(point))
    if share.estimate is None:
        return replace(finding, verdict="not run here", why=share.note or "no share")
    reported, tolerance = claim.number("share"), claim.number("tolerance")
    holds = share.contains(reported) or abs(share.estimate - reported) <= tolerance
    return _settle(finding, claim, [point], holds=holds, why=f"the reported {reported} with a tolerance of {tolerance}")


def judge_spread(claim: Claim, evidence: Evidence) -> Finding:
    """R3: spread between launches, pooled over the paths of the headline point."""
    point = _headline(evidence, claim) or max(evidence.points, key=_size, default=None)
    if point is None:
        return not_run("nothing was measured")
    spread = spread_interval(*(list(point.sample(arm).values()) for arm in point.arms))
    if spread.estimate is None:
        return not_run("the spread between launches needs at least 2 launches of one point")
    finding = _finding(point, f"{figure(spread, '{:.1%}')} over {', '.join(point.arms)}", spread, *point.arms)
    reported = claim.number("spread")
    why = f"reproduced means that {reported:.0%} lies in the interval"
    return _settle(finding, claim, [point], holds=spread.contains(reported), why=why)


def judge_prediction(claim: Claim, evidence: Evidence) -> Finding:
    """A1: the share of a stock step that attention takes, and what Amdahl's law makes of it."""
    times = kernel_times(evidence.kernels)
    shared = [(p, path) for p in evidence.points for path in ("full", "cascade") if path in p.arms]
    checks = [(p, measured_or_derived(p, path, baseline_of(p), times)) for p, path in shared]
    if not checks:
        return not_run("no shared path was measured")
    valid = [(p, c) for p, c in checks if isinstance(c, amdahl.AmdahlCheck)]
    if not valid:
        return not_run(str(max(checks, key=lambda pair: (_is_gpu(pair[0]), _size(pair[0])))[1]))
    point, check = max(valid, key=lambda pair: (_is_gpu(pair[0]), _size(pair[0])))
    text = (
        f"{check.basis} is {figure(check.share, '{:.1%}')} of a step, "
        f"{figure(check.kernel_speedup, '{:.3g}x')} faster ({check.origin}); predicted {figure(check.predicted)}, "
        f"measured {figure(check.measured)}"
    )
    finding = _finding(point, text, check.share, check.baseline, check.path)
    finding = replace(finding, record_ids=(*finding.record_ids, *check.record_ids))
    near = abs((check.share.estimate or 0) - claim.number("share")) <= claim.number("tolerance")
    why = check.contradiction or "prediction and measurement agree; the share is compared with the reported 60%"
    return _settle(finding, claim, [point], holds=near and check.contradiction is None, why=why)


def judge_models(claim: Claim, evidence: Evidence) -> Finding:
    """A2: every model on its number of GPUs."""
    found: dict[str, tuple[Point, Interval]] = {}
    for point in evidence.gpu_points():
        model = str(point.key["model"])
        if claim.values.get(model) == point.key["tensor_parallel"] and "full" in point.arms:
            times = ratio(point.sample("full"), point.sample(baseline_of(point)))
            if model not in found or _size(point) > _size(found[model][0]):
                found[model] = point, times
    missing = [f"{model} on {count} GPUs" for model, count in claim.values.items() if model not in found]
    if not found:
        return not_run("no model of the claim was measured on its number of GPUs")
    text = "; ".join(f"{model}: {figure(times)}" for model, (_, times) in found.items())
    ids = tuple(i for point, _ in found.values() for i in point.record_ids("full", baseline_of(point)))
    device = "; ".join(dict.fromkeys(str(point.key["device"]) for point, _ in found.values()))
    finding = Finding("reproduced", "every model gains", text, None, device, ids)
    if missing:
        return replace(finding, verdict="not run here", why=f"not measured: {', '.join(missing)}")
    gains = all(times.estimate and times.estimate > 1 for _, times in found.values())
    return finding if gains else replace(finding, verdict="differs", why="a model does not gain")


def judge_short(claim: Claim, evidence: Evidence) -> Finding:
    """S1: the worst short-prefix cell of cascade and full; auto beside it."""
    limit = claim.number("longest_prefix_tokens")
    short = [p for p in evidence.points if 0 < int(str(p.key["prefix_tokens"])) <= limit]
    cells = [(p, arm, _speedup(p, arm)) for p in short for arm in ("cascade", "full", "auto") if arm in p.arms]
    cells = [cell for cell in cells if cell[2].estimate is not None]
    if any(_is_gpu(p) for p, _, _ in cells):
        cells = [cell for cell in cells if _is_gpu(cell[0])]
    seeds = [cell for cell in cells if cell[1] != "auto"]
    if not seeds:
        return not_run(f"no prefix up to {limit:.0f} tokens was measured by cascade or full beside stock")
    point, arm, worst = min(seeds, key=lambda cell: cell[2].estimate or 0)
    autos = [times for _, name, times in cells if name == "auto"]
    beside = f"; auto at worst {figure(min(autos, key=lambda t: t.estimate or 0))}" if autos else ""
    where = f"{arm} at {point.key['prefix_tokens']} tokens, {point.key['concurrency']} in flight"
    finding = _finding(point, f"{figure(worst)} ({where}){beside}", worst, arm, baseline_of(point))
    slower = worst.high if worst.high is not None else worst.estimate
    holds = slower is not None and slower < 1
    return _settle(finding, claim, [point], holds=holds, why=f"worst of {len(seeds)} short-prefix cells against stock")


def judge_placement(_: Claim, evidence: Evidence) -> Finding:
    """P1: no node's layout changes after it was placed; a policy, so any machine counts."""
    traces = [(r, trace) for r in evidence.records if (trace := _trace(r)) is not None]
    if not traces:
        return not_run("no record holds a placement trace")
    placed = sum(event.kind == "place" for _, trace in traces for event in trace.events)
    if not placed:
        return not_run("no node was placed in the recorded launches")
    moved = [f"node {node} in {r.record_id}" for r, trace in traces for node in _moved(trace)]
    dropped = sum(trace.events_dropped for _, trace in traces)
    why = f"changed: {', '.join(moved[:3])}" if moved else "every node kept the layout that it was created with"
    if dropped:
        why += f"; {dropped} older events were not kept"
    text = f"{len(moved)} of {placed} placed nodes changed layout"
    devices = "; ".join(sorted({device_name(r.environment) for r, _ in traces}))
    return Finding(
        "differs" if moved else "reproduced", why, text, None, devices, tuple(r.record_id for r, _ in traces)
    )


def _trace(record: Record) -> PlacementTrace | None:
    return record.measurement.placement if isinstance(record.measurement, ServingMeasurement) else None


def _moved(trace: PlacementTrace) -> list[int]:
    layouts: dict[int, str] = {}
    changed = []
    for event in trace.events:
        if event.kind == "flush":
            layouts.clear()
        elif event.kind == "evict":
            layouts.pop(event.node_id, None)
        elif event.layout is not None and layouts.setdefault(event.node_id, event.layout) != event.layout:
            changed.append(event.node_id)
    return changed


def _headline(evidence: Evidence, claim: Claim) -> Point | None:
    """The claimed point where it was measured, else the largest that has the three paths; GPUs and intervals first."""
    able = [p for p in evidence.points if "full" in p.arms and "cascade" in p.arms and baseline_of(p) in p.arms]
    return max(able, key=lambda p: (_matches(p, claim), _is_gpu(p), _has_interval(p), _size(p)), default=None)


def _has_interval(point: Point) -> bool:
    return all(len(point.sample(arm)) > 1 for arm in _ladder(point))


def _ladder(point: Point) -> tuple[str, ...]:
    return (baseline_of(point), *LADDER[1:])


def _speedup(point: Point, arm: str) -> Interval:
    return ratio(point.sample(arm), point.sample(baseline_of(point)))


def _finding(point: Point, measured: str, estimate: Interval, *arms: str) -> Finding:
    return Finding("differs", _conditions(point), measured, estimate, str(point.key["device"]), point.record_ids(*arms))


def _conditions(point: Point) -> str:
    k = point.key
    return (
        f"{k['model']}, prefix {k['prefix_tokens']}, {k['concurrency']} in flight, {k['output_tokens']} output tokens, "
        f"{k['workload']}, {k['stock_backend']}"
    )


def _at_least(finding: Finding, claim: Claim, points: Sequence[Point]) -> Finding:
    """A speed-up counts as reproduced from the reported ratio on, less its tolerance; absolute rates are hardware's."""
    needed = claim.number("ratio") * (1 - claim.number("tolerance"))
    measured = finding.estimate.estimate if finding.estimate else None
    holds = measured is not None and measured >= needed
    return _settle(finding, claim, points, holds=holds, why=f"reproduced means at least {needed:.2f}x")


def _settle(finding: Finding, claim: Claim, points: Sequence[Point], *, holds: bool, why: str) -> Finding:
    """A verdict only from a GPU, and only at the claimed model and size where the claim names them."""
    if not all(_is_gpu(point) for point in points):
        return not_run(f"{_ON_CPU}: {_conditions(points[0])}", finding)
    if not all(_matches(point, claim) for point in points):
        return not_run(f"the claimed point was not measured; shown: {_conditions(points[0])}", finding)
    return replace(finding, verdict="reproduced" if holds else "differs", why=f"{why}; {_conditions(points[0])}")


def _matches(point: Point, claim: Claim) -> bool:
    """Whether the point is the one that the claim names, as far as it names one."""
    return all(point.key[name] == value for name, value in claim.values.items() if name in point.key)


def _reported_ratio(claim: Claim) -> float:
    return claim.number("full") / claim.number("stock")


def _is_gpu(point: Point) -> bool:
    return not str(point.key["device"]).startswith("CPU")


def _size(point: Point) -> int:
    return int(str(point.key["prefix_tokens"])) * int(str(point.key["concurrency"]))


JUDGES: dict[str, Judge] = {
    "D3": judge_cell,
    "R1": judge_headline,
    "R2": judge_share,
    "R3": judge_spread,
    "A1": judge_prediction,
    "A2": judge_models,
    "S1": judge_short,
    "P1": judge_placement,
}
