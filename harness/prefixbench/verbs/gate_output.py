"""The gate's result for people (terminal, Markdown) and for CI (JUnit XML, JSON)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from rich import box
from rich.table import Table

from prefixbench.analysis.gate.judge import GateResult, MetricRow
from prefixbench.analysis.gate.selftest import Rate
from prefixbench.config.gate import as_mapping

_HEADINGS = ("case", "metric", "against", "baseline", "candidate", "change", "bounds", "launches", "status")
_RATE_HEADINGS = ("comparison", "red", "95% interval", "of", "bound", "")
_STYLES = {"pass": "green", "ok": "green", "fail": "red", "regressed": "red", "improved": "cyan"}


def result_table(result: GateResult) -> Table:
    table = Table(title=f"gate: {result.outcome}", box=box.SIMPLE, title_style=_STYLES.get(result.outcome, "yellow"))
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading in _HEADINGS[3:8] else "left")
    for row in result.rows:
        table.add_row(*_cells(row), style=_STYLES.get(row.status, "yellow") if row.status != "ok" else None)
    return table


def result_lines(result: GateResult) -> list[str]:
    """The outcome, every reason and every note, one a line."""
    return [f"outcome: {result.outcome}", *result.reasons, *(f"note: {note}" for note in result.notes)]


def result_markdown(result: GateResult) -> str:
    lines = [f"## Gate: {result.outcome}", ""]
    lines += [f"- {_escape(reason)}" for reason in result.reasons]
    if result.rows:
        lines += ["", *_markdown_table(_HEADINGS, [_cells(row) for row in result.rows])]
    lines += ["", *(f"- note: {_escape(note)}" for note in result.notes)] if result.notes else []
    rule = result.config.rule
    explained = (
        f"Negative is worse. Red needs confidence (alpha {rule.alpha:g} over all metrics) and at least "
        f"{rule.min_magnitude:.1%}; a pass excludes {rule.margin:.0%}. {len(result.baseline_ids)} baseline and "
        f"{len(result.candidate_ids)} candidate records."
    )
    return "\n".join([*lines, "", explained]) + "\n"


def result_json(result: GateResult) -> str:
    data = {
        **asdict(result),
        "config": as_mapping(result.config),
        "exit_code": result.exit_code,
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def result_junit(result: GateResult) -> str:
    """One test case per metric and one for comparability; undecided metrics are skipped cases."""
    suite = ElementTree.Element("testsuite", name="prefixbench gate")
    comparable = _case(suite, "gate", "comparable")
    for mismatch in result.mismatches:
        ElementTree.SubElement(comparable, "error", message=_plain(str(mismatch)))
    failed = [reason for reason in result.reasons if result.outcome == "fail" and " against the " not in reason]
    if failed:
        measured = _case(suite, "gate", "every point was measured")
        ElementTree.SubElement(measured, "failure", message=_plain("; ".join(failed)))
    for row in result.rows:
        case = _case(suite, row.case, f"{row.metric} against the {row.against}")
        text = " ".join(_cells(row)[3:])
        if row.status == "regressed":
            ElementTree.SubElement(case, "failure", message=_plain(text))
        elif row.status == "undecided":
            ElementTree.SubElement(case, "skipped", message=_plain(text))
    for tag in ("failure", "error", "skipped"):
        suite.set({"failure": "failures", "error": "errors"}.get(tag, tag), str(len(list(suite.iter(tag)))))
    suite.set("tests", str(len(list(suite.iter("testcase")))))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def rates_table(rates: Sequence[Rate]) -> Table:
    table = Table(title="the gate's own error rates", box=box.SIMPLE)
    for heading in _RATE_HEADINGS:
        table.add_column(heading, justify="left" if heading in ("comparison", "") else "right")
    for rate in rates:
        table.add_row(*_rate_cells(rate), style=None if rate.ok else "red")
    return table


def rates_markdown(rates: Sequence[Rate]) -> str:
    table = _markdown_table(_RATE_HEADINGS, [_rate_cells(rate) for rate in rates])
    return "\n".join(["## The gate's own error rates", "", *table]) + "\n"


def rates_json(rates: Sequence[Rate]) -> str:
    return json.dumps([{**asdict(rate), "ok": rate.ok} for rate in rates], indent=1, allow_nan=False) + "\n"


def rates_junit(rates: Sequence[Rate]) -> str:
    suite = ElementTree.Element("testsuite", name="prefixbench gate self-test", tests=str(len(rates)))
    suite.set("failures", str(sum(not rate.ok for rate in rates)))
    for rate in rates:
        case = _case(suite, "gate self-test", rate.name)
        if not rate.ok:
            ElementTree.SubElement(case, "failure", message=" ".join(_rate_cells(rate)[1:]))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _cells(row: MetricRow) -> tuple[str, ...]:
    name = f"{row.metric} (primary)" if row.is_primary else row.metric
    launches = f"{row.launches[0]} / {row.launches[1]}"
    figures = (f"{row.baseline:.4g}", f"{row.candidate:.4g}")
    if row.change is None:
        return (row.case, name, row.against, *figures, "—", "too few launches", launches, row.status)
    bounds = f"{row.low:+.1%} to {row.high:+.1%}"
    return (row.case, name, row.against, *figures, f"{row.change:+.1%}", bounds, launches, row.status)


def _rate_cells(rate: Rate) -> tuple[str, ...]:
    bound = "informs only"
    if rate.at_most is not None:
        bound = f"at most {rate.at_most:.0%}"
    if rate.at_least is not None:
        bound = f"at least {rate.at_least:.0%}"
    interval = f"{rate.low:.1%} to {rate.high:.1%}"
    return (
        rate.name,
        f"{rate.red:.1%}",
        interval,
        f"{rate.comparisons:,}",
        bound,
        "ok" if rate.ok else "OUT OF BOUNDS",
    )


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return lines + [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows]


def _escape(text: str) -> str:
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", text.replace("\n", " "))


def _plain(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _case(suite: ElementTree.Element, classname: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_plain(classname), name=_plain(name))
