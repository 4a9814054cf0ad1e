"""`prefixbench report SELECTOR -o reports/NAME`: builds a report from records alone."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from prefixbench.errors import BenchError
from prefixbench.report.build import Selected, build, write
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import select


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 under --strict when a path that was asked for did not run; errors have their own codes."""
    options = _parser().parse_args(argv)
    # Records are millions of small objects that live to the end: collecting them again and again doubles the time.
    gc.disable()
    try:
        selected = _select(options.selector, options.runs)
        compared = _select(options.compare.split(), options.runs) if options.compare else None
    except BenchError as error:
        sys.stderr.write(f"prefixbench report: {error}\n")
        return error.exit_code
    else:
        page = build(options.output.name, selected, compared)
        path = write(page, options.output)
    finally:
        gc.enable()
    sys.stdout.write(f"{path}: {len(page.record_ids)} records\n")
    sys.stderr.writelines(f"{violation}\n" for violation in page.violations)
    return 1 if options.strict and page.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="prefixbench report", description=__doc__)
    parser.add_argument("selector", nargs="*", default=["latest"], help="which records; default: latest")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/latest"), help="folder of the report")
    parser.add_argument("--compare", metavar="SELECTOR", help="a second selection: adds comparison and gate result")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a path that was asked for did not run")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where records lie; default: runs")
    return parser


def _select(words: Sequence[str], runs: Path) -> Selected:
    return Selected(" ".join(words), tuple(select(words, runs)))
