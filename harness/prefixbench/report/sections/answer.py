"""The answer first: the headline ratio with its conditions, the tiles beside it, and what to beware of."""

from __future__ import annotations

from collections import Counter

from prefixbench.analysis.frame import Point
from prefixbench.analysis.numerics import is_control
from prefixbench.case import ServingCase
from prefixbench.machine.clocks import NOT_WATCHED, POWER_CAP
from prefixbench.record import Record
from prefixbench.report import cells
from prefixbench.report.material import BATCH_TOLERANCE, PLAIN, Material, arm_rank, devices, path_of
from prefixbench.report.sections import clocks, paths
from prefixbench.report.sections.results import speedups
from prefixbench.report.view import Cell, Headline, Section, Tile
from prefixbench.report.words import LABEL_MEANING, count, listing, percent, ratio, span

_MOST_WARNINGS = 8
# The work's own doing, and what was asked for: both are said beside the figures.
_NO_WARNING = (POWER_CAP, NOT_WATCHED)


def headline(material: Material) -> Headline:
    """One ratio, chosen by rule and not by result; refused when the path did not run."""
    if material.invented:
        meaning = LABEL_MEANING[material.invented[0]][1]
        return Headline(None, "These are not measurements.", why_not=f"{meaning} The charts only show how it looks.")
    point = material.headline_point
    if point is None:
        why = "a ratio needs stock and another path, both measured at the same point"
        return Headline(None, "No speed-up can be given.", why_not=f"Reason: {why}.")
    arm = material.headline_arm(point) or ""
    refusal = material.inactive(point, arm)
    if refusal:
        return Headline(None, "No speed-up is given.", why_not=refusal)
    gain = material.speedup(point, arm)
    if gain is None or gain.estimate is None:
        return Headline(None, "No speed-up can be given.", why_not=gain.note if gain else None)
    against = "unmodified SGLang" if material.baseline(point) == PLAIN else "SGLang with our plugin switched to stock"
    interval = span(gain.low, gain.high)
    launches = f"{count(gain.n, 'launch', 'launches')} of each"
    among = "of those with several launches" if material.headline_launches(point) > 1 else "of this run"
    return Headline(
        figure=ratio(gain.estimate),
        sentence=(
            f"as many tokens per second as {against}, by path {arm}, "
            f"at {material.point_label(point)}: the longest prefix and most requests {among}."
        ),
        interval=f"95% interval {interval} over {launches}. {gain.method}."
        if interval
        else f"No interval: {gain.note or 'one launch'}.",
        path=path_of(arm),
    )


def subtitle(material: Material) -> str:
    models = sorted({record.case.model for record in material.records if isinstance(record.case, ServingCase)})
    started = sorted(record.launch.started_at for record in material.records)
    days = f"{started[0][:10]} to {started[-1][:10]}" if started[0][:10] != started[-1][:10] else started[0][:10]
    what = f"Model {listing(models)}" if models else "Single kernels"
    return f"{what} on {devices(material)}, {days}, {count(len(material.records), 'record')}."


def tiles(material: Material) -> tuple[Tile, ...]:
    found = [] if material.invented else speedups(material)
    shown = []
    if found:
        for label, pick in (("Best point", max), ("Worst point", min)):
            point, arm, gain = pick(found, key=lambda item: item[2].estimate or 0.0)
            shown.append(Tile(label, f"{ratio(gain.estimate)} {arm}", material.point_label(point)))
    bad = Counter(record.status for record in _incomplete(material))
    detail = ", ".join(f"{times} {status}" for status, times in sorted(bad.items())) or "all complete"
    launches = len({record.launch.launch_id for record in material.records})
    origin = f"from {count(launches, 'launch', 'launches')}, {detail}"
    shown.append(Tile("Read for this report", count(len(material.records), "record"), origin))
    return tuple(shown)


def badges(material: Material) -> tuple[tuple[str, str], ...]:
    labels = dict.fromkeys(label for record in material.with_kernels for label in record.labels)
    unknown = "A label of the records that this report has no words for."
    return tuple(LABEL_MEANING.get(label, (label, unknown)) for label in labels)


def warnings(material: Material) -> tuple[str, ...]:
    """Plain sentences, the gravest first; the sections have the details."""
    found = [*paths.violations(material), *_failures(material), *_batches(material), *_flags(material)]
    found += _provenance(material.records)
    if len(found) > _MOST_WARNINGS:
        found[_MOST_WARNINGS:] = [f"{len(found) - _MOST_WARNINGS} more warnings stand in the sections below."]
    return tuple(found)


def _failures(material: Material) -> list[str]:
    bad = _incomplete(material)
    if not bad:
        return []
    kinds = listing([f"{times} {status}" for status, times in sorted(Counter(r.status for r in bad).items())])
    return [
        f"{len(bad)} of {len(material.records)} records are not complete ({kinds}); their points are gaps or smaller."
    ]


def _incomplete(material: Material) -> list[Record]:
    """Records without all that was asked for; a control with a planted fault is meant to fail."""
    return [record for record in material.records if record.status != "ok" and not is_control(record)]


def _batches(material: Material) -> list[str]:
    rows = material.launches
    if rows.empty:
        return []
    below = rows[rows["realized_batch"] < (1 - BATCH_TOLERANCE) * rows["concurrency"]]
    pairs = set(zip(below["concurrency"].astype(int), below["realized_batch"].round().astype(int), strict=True))
    return [
        f"{asked} requests were asked for, {batch} ran at once: these figures are for {batch}, and M_eff too."
        for asked, batch in sorted(pairs)
    ]


def _flags(material: Material) -> list[str]:
    rows = material.blocks
    if rows.empty:
        return []
    left_out = rows[rows["excluded"]]
    # "other-load: 2.8 CPUs were busy": the kind is what repeats, the rest is one block's own figure.
    kinds: dict[str, list[str]] = {}
    for flags in rows["flags"]:
        for flag in flags:
            if not flag.startswith(_NO_WARNING):
                kinds.setdefault(flag.partition(":")[0], []).append(flag)
    said = [f"{count(len(own), 'block')} of {len(rows)}: {_example(own)}." for own in kinds.values()]
    if len(left_out):
        reasons = listing(sorted(set(left_out["exclusion"])))
        said.insert(0, f"{count(len(left_out), 'block')} of {len(rows)} left out of every figure by rule: {reasons}.")
    return said


def _example(flags: list[str]) -> str:
    kind, _, detail = flags[0].partition(": ")
    if not detail:
        return kind
    return f"{kind} ({detail})" if len(set(flags)) == 1 else f"{kind} (for example: {detail})"


def _provenance(records: tuple[Record, ...]) -> list[str]:
    said = []
    if any(record.environment.git_dirty for record in records):
        said.append("Some records were made with uncommitted changes.")
    if any(record.environment.git_commit is None for record in records):
        said.append("The commit of some records is unknown.")
    return said


def answer_section(material: Material) -> Section:
    """The idea (drawn by the template) and the headline point in one small table."""
    title, question = "In two minutes", "What is compared here, and why does it matter?"
    point = material.headline_point
    if point is None:
        finding = "This selection holds no point at which stock and another path were both measured."
        return Section("answer", title, question, finding, ())
    baseline = material.baseline(point)
    is_watched = any(clocks.clock(material, point, arm) is not None for arm in point.arms)
    rows = []
    for arm in sorted(point.arms, key=arm_rank):
        mean, gain = material.mean(point, arm), material.speedup(point, arm)
        why = mean.note or material.why_missing(point, arm)
        rows.append(
            [
                cells.path(path_of(arm), arm),
                cells.amount(mean.estimate, why),
                cells.interval(mean.low, mean.high, why),
                Cell("1 by definition", 1.0)
                if arm == baseline
                else cells.amount(gain.estimate if gain else None, why, ratio),
                cells.interval(gain.low, gain.high, gain.note, ratio) if gain and arm != baseline else cells.BLANK,
                _really_ran(material, point, arm),
                *([clocks.clock_cell(material, point, arm)] if is_watched else []),
            ]
        )
    clock = ("SM clock, MHz",) if is_watched else ()
    columns = ("path", "tokens/s", "95% interval", "times stock", "95% interval", "ran on", *clock)
    table = cells.table("headline-data", f"At {material.point_label(point)}", columns, rows)
    finding = (
        "Every decode step of a language model reads the keys and values of everything said so far. "
        "Where requests share a long prompt, most of that reading is the same bytes again and again."
    )
    return Section("answer", title, question, finding, (table,))


def _really_ran(material: Material, point: Point, arm: str) -> Cell:
    shares = material.step_shares(point, arm)
    if shares is None:
        return cells.missing("unmodified SGLang has no counters")
    used = {kernel: share for kernel, share in shares.items() if share > 0}
    return Cell(", ".join(f"{kernel} {percent(share, 0)}" for kernel, share in used.items()), dict(used))
