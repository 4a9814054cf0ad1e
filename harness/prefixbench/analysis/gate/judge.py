"""The regression gate: two selections of records -> pass, fail, undecided or not comparable, with every reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from prefixbench.analysis import comparable, frame
from prefixbench.analysis.comparable import Mismatch
from prefixbench.analysis.gate.arms import Arm, by_case, cases_only_in, compare_case, primary_arm
from prefixbench.analysis.gate.family import Effects, Rule, Verdicts, compare, effects, judge, launches_to_decide
from prefixbench.record import Record

Outcome = Literal["pass", "fail", "undecided", "not comparable"]
EXIT_CODES: dict[Outcome, int] = {"pass": 0, "fail": 1, "undecided": 2, "not comparable": 3}
Status = Literal["ok", "regressed", "improved", "undecided"]
Against = Literal["baseline", "anchor"]


@dataclass(frozen=True)
class GateConfig:
    """What conf/gate.yaml holds. `primary` may be None.

    `exclude` lists beginnings of block flags to leave out, `allow` keys that may differ without refusing to compare.
    """

    rule: Rule = field(default_factory=Rule)
    metrics: tuple[str, ...] = ("decode_tok_s", "end_to_end_tok_s", "tpot_ms", "ttft_ms", "kernel_us", "kernel_cold_us")
    primary: str | None = "decode_tok_s"
    exclude: tuple[str, ...] = frame.UNTRUSTWORTHY
    under_test: tuple[str, ...] = comparable.UNDER_TEST
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricRow:
    """One metric of one case. `change`, `low`, `high` are relative and oriented: negative is worse for every metric.

    With fewer launches than the rule needs they are None, and the status is undecided.
    """

    case: str
    metric: str
    against: Against
    is_primary: bool
    baseline: float
    candidate: float
    launches: tuple[int, int]
    status: Status
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    more_launches: int | None = None


@dataclass(frozen=True)
class GateResult:
    outcome: Outcome
    reasons: tuple[str, ...]
    rows: tuple[MetricRow, ...]
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...]
    config: GateConfig
    baseline_ids: tuple[str, ...]
    candidate_ids: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


@dataclass
class _Findings:
    rows: list[MetricRow] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def evaluate(
    baseline: Sequence[Record], candidate: Sequence[Record], config: GateConfig, anchor: Sequence[Record] = ()
) -> GateResult:
    """Judges `candidate` against the rolling `baseline` and, when given, against the fixed `anchor` as well.

    The anchor stops many small regressions, each too small to be red against its predecessor. Both comparisons
    share the error rate.
    """
    found = _Findings()
    _compare(found, baseline, candidate, config, "baseline", families=2 if anchor else 1)
    if anchor:
        _compare(found, anchor, candidate, config, "anchor", families=2)
    outcome, reasons = _outcome(found, config.rule)
    found.notes += [
        f"{row.metric} of {row.case} improved by {row.change:.1%} against the {row.against}: record a new baseline"
        for row in found.rows
        if row.status == "improved"
    ]
    return GateResult(
        outcome=outcome,
        reasons=tuple(dict.fromkeys(reasons)),
        rows=tuple(found.rows),
        mismatches=tuple(dict.fromkeys(found.mismatches)),
        notes=tuple(dict.fromkeys(found.notes)),
        config=config,
        baseline_ids=tuple(r.record_id for r in baseline),
        candidate_ids=tuple(r.record_id for r in candidate),
    )


def _compare(
    found: _Findings,
    reference: Sequence[Record],
    candidate: Sequence[Record],
    config: GateConfig,
    against: Against,
    families: int,
) -> None:
    before, after = by_case(reference), by_case(candidate)
    mismatches = comparable.environment_mismatches(reference, candidate, config.under_test)
    mismatches += comparable.case_mismatches({k: r[0] for k, r in before.items()}, {k: r[0] for k, r in after.items()})
    found.notes += [f"{case} is new: nothing to compare it with" for case in cases_only_in(after, before)]
    arms: list[Arm] = []
    for key in before.keys() & after.keys():
        case = compare_case(before[key], after[key], config.metrics, config.exclude)
        arms += case.arms
        mismatches += case.mismatches
        found.failures += case.failures
        found.notes += case.notes
    found.notes += [f"allowed to differ: {mismatch}" for mismatch in mismatches if mismatch.key in config.allow]
    found.mismatches += [mismatch for mismatch in mismatches if mismatch.key not in config.allow]
    found.rows += _judge(sorted(arms, key=lambda a: (a.case, a.metric)), config, against, families)


def _outcome(found: _Findings, rule: Rule) -> tuple[Outcome, list[str]]:
    if found.mismatches:
        return "not comparable", [str(mismatch) for mismatch in found.mismatches]
    red = [_is_worse(row) for row in found.rows if row.status == "regressed"]
    if found.failures or red:
        return "fail", [*found.failures, *red]
    if not found.rows:
        return "undecided", ["no metric was measured in both selections"]
    deciding = [row for row in found.rows if row.is_primary] or found.rows
    undecided = [_what_would_decide(row, rule) for row in deciding if row.status == "undecided"]
    return ("undecided", undecided) if undecided else ("pass", [])


def _is_worse(row: MetricRow) -> str:
    return f"{row.metric} of {row.case} against the {row.against} is worse: {_span(row)}"


def _what_would_decide(row: MetricRow, rule: Rule) -> str:
    where = f"{row.metric} of {row.case} against the {row.against}"
    if row.change is None:
        return f"{where}: {row.launches[0]} and {row.launches[1]} launches, {rule.min_launches} of each are needed"
    more = f"about {row.more_launches} more launches of each" if row.more_launches else "only a quieter machine"
    return f"{where}: {_span(row)} does not exclude {-rule.margin:+.0%}; {more} would decide"


def _span(row: MetricRow) -> str:
    return f"{row.change:+.1%} ({row.low:+.1%} to {row.high:+.1%})"


def _judge(arms: Sequence[Arm], config: GateConfig, against: Against, families: int) -> list[MetricRow]:
    primary = primary_arm(arms, config.primary)
    others = [arm for arm in arms if arm is not primary]
    family = [arm for arm in [primary, *others] if arm is not None]
    enough = [arm for arm in family if min(arm.launches) >= config.rule.min_launches]
    index = 0 if enough and enough[0] is primary else None
    judged = _statistics(enough, config.rule, index, families) if enough else None
    rows = []
    for arm in family:
        row = MetricRow(
            case=arm.case,
            metric=arm.metric,
            against=against,
            is_primary=arm is primary,
            baseline=arm.mean(arm.baseline),
            candidate=arm.mean(arm.candidate),
            launches=arm.launches,
            status="undecided",
        )
        position = next((i for i, e in enumerate(enough) if e is arm), None)
        rows.append(
            row if position is None or judged is None else _decide(row, *judged, position, config.rule, families)
        )
    return rows


def _statistics(arms: Sequence[Arm], rule: Rule, primary: int | None, families: int) -> tuple[Effects, Verdicts]:
    """One vectorised comparison where every metric has the same launches; metric by metric where some are missing."""
    if len({arm.launches for arm in arms}) == 1:
        baseline, candidate = (np.stack([getattr(arm, side) for arm in arms]) for side in ("baseline", "candidate"))
        interleaved = all(arm.interleaved for arm in arms)
        return compare(baseline, candidate, rule, primary=primary, interleaved=interleaved, families=families)
    parts = [effects(arm.baseline[None], arm.candidate[None], paired=False) for arm in arms]
    fields = ("effect", "variance", "df", "scale")
    found = Effects(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))
    return found, judge(found, rule, primary, families)


def _decide(row: MetricRow, found: Effects, verdicts: Verdicts, i: int, rule: Rule, families: int) -> MetricRow:
    status: Status = "ok" if verdicts.excluded[i] else "undecided"
    if verdicts.improved[i]:
        status = "improved"
    if verdicts.red[i]:
        status = "regressed"
    more = None
    if status == "undecided":
        share = rule.primary_weight if row.is_primary else 1 / len(found.effect)
        sd, launches = math.sqrt(float(found.variance[i])), min(row.launches)
        more = launches_to_decide(float(found.effect[i]), sd, launches, rule, share * rule.alpha / families)
    low, change, high = (float(np.expm1(bound[i])) for bound in (verdicts.low, found.effect, verdicts.high))
    return replace(
        row,
        status=status,
        change=change,
        low=low,
        high=high,
        p=float(verdicts.p[i]),
        more_launches=more,
    )
