"""The reported claims, one by one: what was measured of each, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefixbench.analysis.claims.evidence import figure
from prefixbench.analysis.claims.scorecard import VERDICTS, ScoreRow, counts
from prefixbench.analysis.roofline.checks import load_hardware
from prefixbench.analysis.roofline.fit import on_paper
from prefixbench.report import cells
from prefixbench.report.view import Cell, Section, Table, Tile
from prefixbench.report.words import count, listing

_TITLE, _QUESTION = "Scorecard", "Which of the reported claims hold here?"
_MOST_IDS = 6
_NOTHING = "no record of this selection speaks of it"


def scorecard_section(rows: Sequence[ScoreRow]) -> Section:
    claims = cells.table(
        "claims",
        "Reported claims against the records of this report",
        ("id", "claim", "reported", "measured here", "verdict", "why"),
        [
            [
                cells.text(row.claim_id),
                cells.text(row.claim.claim),
                cells.text(row.claim.reported),
                _measured(row),
                cells.verdict(row.verdict),
                cells.text(row.finding.why),
            ]
            for row in rows
        ],
        folded=False,
    )
    grounds = cells.table(
        "grounds",
        "How each claim is judged, and from which records",
        ("id", "formula", "source of the reported figure", "hardware here", "records"),
        [
            [
                cells.text(row.claim_id),
                cells.text(row.claim.formula),
                cells.text(row.claim.source),
                cells.text(row.finding.hardware) if row.finding.hardware else cells.missing(_NOTHING),
                _records(row),
            ]
            for row in rows
        ],
        folded=True,
    )
    return Section("scorecard", _TITLE, _QUESTION, _finding(rows), (claims, grounds, _on_paper()))


def tile(rows: Sequence[ScoreRow]) -> Tile:
    tally = counts(rows)
    rest = ", ".join(f"{tally[verdict]} {verdict}" for verdict in VERDICTS[1:])
    return Tile("Reported claims", f"{tally['reproduced']} of {len(rows)} reproduced", rest)


def _on_paper() -> Table:
    """What the reported machine could do at best, beside what was reported of it."""
    return cells.table(
        "on-paper",
        "The reported figures beside their machine on paper: a model, ceilings only, nothing fitted or measured",
        ("figure", "GPU", "reported", "model", "reported over model"),
        [
            [
                cells.text(row.what),
                cells.text(row.gpu),
                cells.amount(row.measured),
                cells.amount(row.predicted),
                cells.amount(math.expm1(row.log_error), say="{:+.0%}".format),
            ]
            for row in on_paper(load_hardware())
        ],
        folded=True,
    )


def _finding(rows: Sequence[ScoreRow]) -> str:
    tally = counts(rows)
    named = {verdict: [row.claim_id for row in rows if row.verdict == verdict] for verdict in VERDICTS}
    parts = [f"{tally[verdict]} {verdict} ({listing(named[verdict])})" for verdict in VERDICTS if tally[verdict]]
    return f"Of {count(len(rows), 'claim')}: {'; '.join(parts)}."


def _measured(row: ScoreRow) -> Cell:
    found = row.finding
    if found.measured is not None:
        return Cell(found.measured, found.estimate.estimate if found.estimate else found.measured)
    if found.estimate is not None and found.estimate.estimate is not None:
        return Cell(figure(found.estimate), found.estimate.estimate)
    return cells.missing(_NOTHING)


def _records(row: ScoreRow) -> Cell:
    ids = list(dict.fromkeys(row.finding.record_ids))
    if not ids:
        return cells.missing(_NOTHING)
    shown = ", ".join(ids[:_MOST_IDS])
    return Cell(f"{shown} and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else shown, list(ids))
