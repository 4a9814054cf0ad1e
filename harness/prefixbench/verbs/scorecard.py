"""`prefixbench scorecard`: every claim as reported, as measured, and the verdict."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from prefixbench.analysis.claims.reported import DEFAULT_FILE, load_claims
from prefixbench.analysis.claims.scorecard import ScoreRow, counts, scorecard
from prefixbench.output import write_whole
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, add_selector, select

_STYLES = {"reproduced": "green", "differs": "red", "not run here": "yellow"}


def main(argv: Sequence[str]) -> int:
    """Returns 0; with --strict 1 when a claim differs or was not run."""
    options = _parser().parse_args(argv)
    rows = scorecard(select(options.selector, options.runs), load_claims(options.claims))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(rows))
    for row in rows:
        if options.records and row.finding.record_ids:
            console.print(f"{row.claim_id}: {' '.join(row.finding.record_ids)}", markup=False, highlight=False)
    tally = counts(rows)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in tally.items()), highlight=False)
    if options.json is not None:
        write_whole(options.json, as_json(rows))
    return 1 if options.strict and tally["reproduced"] < len(rows) else 0


def as_json(rows: Sequence[ScoreRow]) -> str:
    data = [{**asdict(row.claim), **asdict(row.finding)} for row in rows]
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _table(rows: Sequence[ScoreRow]) -> Table:
    table = Table(title="reported claims and what these records say", box=box.SIMPLE)
    for heading in ("id", "reported", "measured", "on", "verdict", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        found = row.finding
        style = _STYLES[row.verdict]
        verdict = f"[{style}]{row.verdict}[/]"
        cells = [row.claim_id, row.claim.reported, found.measured or "—", found.hardware or "—"]
        table.add_row(*(_literal(cell) for cell in cells), verdict, _literal(found.why))
    return table


def _literal(text: str) -> str:
    return text.replace("[", r"\[")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="prefixbench scorecard", description=__doc__)
    add_selector(parser)
    add_runs(parser)
    parser.add_argument("--claims", type=Path, default=DEFAULT_FILE, help="reported values; default: conf/claims.yaml")
    parser.add_argument("--records", action="store_true", help="list the records behind each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    parser.add_argument("--strict", action="store_true", help="exit 1 unless every claim is reproduced")
    return parser
