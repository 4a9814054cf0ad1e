"""The outside check: what SGLang's own client measured on the same servers, beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.analysis.frame import arm_name
from prefixbench.analysis.outside import TOLERANCE, Agreement, SpeedUp, agreements, speed_ups
from prefixbench.case import OutsideCase
from prefixbench.record import Record
from prefixbench.report import cells
from prefixbench.report.material import path_of
from prefixbench.report.view import Block, Cell, Note, Section
from prefixbench.report.words import count, percent, ratio

_TITLE, _QUESTION = "Outside check", "Does a client that is not ours measure the same?"


def outside_section(records: Sequence[Record]) -> Section:
    found = agreements(records)
    if not found:
        why = "no record of this selection has another client's figures (the verb outside does)"
        return Section("outside", _TITLE, _QUESTION, "It was not measured here.", (Note("missing", f"{why}."),))
    blocks: list[Block] = [
        Note("warning", f"{_where(one.case)}: {one.figure} by {one.case.client} differs from ours.")
        for one in found
        if one.verdict == "differ"
    ]
    columns = ("path", "at", "figure", "ours", "theirs", "theirs ÷ ours", "95% interval", "pairs of blocks", "verdict")
    caption = (
        f"Both clients in turns on one server; they agree when the whole interval is within {percent(TOLERANCE, 0)}"
    )
    blocks.append(cells.table("outside-agreement", caption, columns, [_agreement_row(one) for one in found]))
    gains = speed_ups(records)
    if gains:
        caption = "Output tokens per second over unmodified stock, as each client measured it"
        both = ("path", "at", "by our client", "95% interval", "by theirs", "95% interval")
        blocks.append(cells.table("outside-speedup", caption, both, [_gain_row(one) for one in gains]))
    return Section("outside", _TITLE, _QUESTION, _finding(found), tuple(blocks))


def _finding(found: Sequence[Agreement]) -> str:
    tally = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("agree", "differ", "undecided")}
    said = ", ".join(f"{times} {verdict}" for verdict, times in tally.items() if times)
    clients = ", ".join(sorted({one.case.client for one in found}))
    return f"Of {count(len(found), 'figure')} measured by {clients} and by our client on the same servers: {said}."


def _where(case: OutsideCase) -> str:
    asked = case.serving
    return f"{asked.prefix_tokens:,} shared tokens, {asked.concurrency} in flight, {case.data_set}"


def _head(case: OutsideCase) -> list[Cell]:
    arm = arm_name(case.serving)
    return [cells.path(path_of(arm), arm), cells.text(_where(case))]


def _agreement_row(one: Agreement) -> list[Cell]:
    return [
        *_head(one.case),
        cells.text(one.figure),
        cells.amount(one.ours),
        cells.amount(one.theirs),
        cells.amount(one.ratio.estimate, one.ratio.note, lambda value: ratio(value, 3)),
        cells.interval(one.ratio.low, one.ratio.high, one.ratio.note, lambda value: ratio(value, 3)),
        cells.amount(one.ratio.n),
        cells.text(one.verdict),
    ]


def _gain_row(one: SpeedUp) -> list[Cell]:
    return [
        *_head(one.case),
        *(
            cell
            for gain in (one.ours, one.theirs)
            for cell in (
                cells.amount(gain.estimate, gain.note, ratio),
                cells.interval(gain.low, gain.high, gain.note, ratio),
            )
        ),
    ]
