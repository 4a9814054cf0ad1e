"""Comparison of two selections, judged by the regression gate, with the gate's own error rates beside it."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.analysis.gate.judge import EXIT_CODES, GateConfig, GateResult, MetricRow, evaluate
from prefixbench.analysis.gate.selftest import SLOWER, UNCHANGED, Rate, simulate
from prefixbench.record import Record
from prefixbench.report import bars, cells
from prefixbench.report.view import Block, Chart, Note, Section, Table
from prefixbench.report.words import count, number, percent

_TITLE, _QUESTION = "Comparison and gate", "Did anything get slower?"
_OUTCOMES = {
    "pass": "No: every regression that would matter is excluded.",
    "fail": "Yes: something got slower, beyond noise and beyond what is tolerated.",
    "undecided": "It cannot be told from these launches.",
    "not comparable": "The two selections must not be compared: they differ in more than what is under test.",
}
# Enough to see whether the gate keeps its promise; `prefixbench gate --self-test` runs all scenarios at full size.
_SELF_TEST_DRAWS = 400
_MOST_BARS = 25
_STATUS_COLOUR = {"regressed": "bad", "improved": "good", "undecided": "muted", "ok": "ink"}


def gate_section(baseline: Sequence[Record] | None, candidate: Sequence[Record], baseline_selector: str) -> Section:
    if baseline is None:
        why = "Comparison: no second selection was given (the option --compare adds one)."
        return Section("gate", _TITLE, _QUESTION, "This was not asked.", (Note("missing", why),))
    config = GateConfig()
    result = evaluate(baseline, candidate, config)
    blocks: list[Block] = [*_lines("reasons-of-gate", "Why", result.reasons), *_chart(result)]
    blocks += _lines("notes-of-gate", "Also seen", result.notes)
    blocks.append(_error_rates([simulate(scenario, config.rule, _SELF_TEST_DRAWS) for scenario in _SCENARIOS]))
    finding = (
        f"{_OUTCOMES[result.outcome]} Outcome of the gate: {result.outcome} (exit code {EXIT_CODES[result.outcome]}); "
        f"baseline: “{baseline_selector}”, {count(len(baseline), 'record')}."
    )
    return Section("gate", _TITLE, _QUESTION, finding, tuple(blocks))


_SCENARIOS = (UNCHANGED[0], SLOWER[0], *(s for s in SLOWER if s.size == -0.5 and s.plant == "primary"))


def _lines(name: str, caption: str, lines: Sequence[str]) -> list[Block]:
    """Sentences one below the other; folded when there are many."""
    return [cells.table(name, caption, ("reason",), [[cells.text(line)] for line in lines])] if lines else []


def _chart(result: GateResult) -> list[Block]:
    if not result.rows:
        return []
    known = sorted((row for row in result.rows if row.change is not None), key=lambda row: row.change or 0.0)
    table = _table(result.rows)
    if not known:
        return [table]
    counts = {status: sum(row.status == status for row in result.rows) for status in _STATUS_COLOUR}
    said = ", ".join(f"{times} {status}" for status, times in counts.items() if times)
    return [
        Chart(
            id="gate-changes",
            title="Change of each metric, worse to the left",
            alt=f"Changes with intervals, oriented so that negative is worse for every metric: {said}.",
            figure=bars.changes(
                [
                    bars.Change(row.metric, row.case, row.change or 0.0, row.low, row.high, _STATUS_COLOUR[row.status])
                    for row in known[:_MOST_BARS]
                ],
                -result.config.rule.margin,
            ),
            table=table,
            caption="Oriented so that negative is worse, also for times. Dotted: the regression that is tolerated."
            + (f" The worst {_MOST_BARS} of {len(known)}; the table has all." if len(known) > _MOST_BARS else ""),
        )
    ]


def _table(rows: Sequence[MetricRow]) -> Table:
    too_few = "too few launches for an interval"
    return cells.table(
        "gate-data",
        "Every metric of every case, candidate against baseline",
        ("case", "metric", "baseline", "candidate", "change", "interval", "launches", "verdict", "launches to decide"),
        [
            [
                cells.text(row.case),
                cells.text(f"{row.metric}{' (primary)' if row.is_primary else ''}"),
                cells.amount(row.baseline),
                cells.amount(row.candidate),
                cells.amount(row.change, too_few, lambda value: f"{value:+.1%}"),
                cells.interval(row.low, row.high, too_few, lambda value: f"{value:+.1%}"),
                cells.text(f"{row.launches[0]} and {row.launches[1]}"),
                cells.text(row.status),
                cells.text(number(row.more_launches) if row.more_launches else ""),
            ]
            for row in rows
        ],
    )


def _error_rates(rates: Sequence[Rate]) -> Table:
    """The gate's own promise, simulated: how often it cries wolf, how often it misses."""
    return cells.table(
        "gate-rates",
        "How far this gate can be trusted (simulated launches, not measurements)",
        ("scenario", "red", "95% interval", "promised", "comparisons"),
        [
            [
                cells.text(rate.name),
                cells.amount(rate.red, say=percent),
                cells.interval(rate.low, rate.high, say=percent),
                cells.text(
                    f"at most {percent(rate.at_most, 0)}"
                    if rate.at_most is not None
                    else f"at least {percent(rate.at_least, 0)}"
                    if rate.at_least is not None
                    else "no promise"
                ),
                cells.amount(rate.comparisons),
            ]
            for rate in rates
        ],
    )
