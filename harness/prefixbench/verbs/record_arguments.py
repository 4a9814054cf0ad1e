"""What every verb that reads records shares: selectors, the runs folder, and one line when nothing matches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from prefixbench.errors import UsageError
from prefixbench.record import Record
from prefixbench.store import load


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the records; default: runs")


def add_selector(parser: argparse.ArgumentParser, name: str = "selector", default: str = "latest") -> None:
    """A positional selector of several words."""
    text = "which records: a folder, latest, reference, an id, a tag, filters such as path=cascade"
    parser.add_argument(name, nargs="*", default=[default], help=f"{text}; default: {default}")


def select(words: Sequence[str], runs: Path) -> list[Record]:
    """The records that these words name; UsageError when there are none."""
    records = load(words, runs)
    if not records:
        raise UsageError(
            f"no record matches {' '.join(words)!r} under {runs}; run `prefixbench run` first or widen the selector"
        )
    return records
