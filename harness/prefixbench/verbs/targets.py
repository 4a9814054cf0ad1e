"""`prefixbench targets`: every stated target beside the measured figure; fails while one is missed or not on record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from prefixbench import store
from prefixbench.config import config_dir
from prefixbench.targets import engine as targets_engine
from prefixbench.targets import kernels as targets_kernels
from prefixbench.targets.table import Row, is_all_met, read_targets
from prefixbench.verbs.parser import Parser


def main(argv: Sequence[str]) -> int:
    """0 when every target of the table is met by the selected records, else 1."""
    parser = Parser(
        prog="prefixbench targets",
        description="Prints each target beside the ratio in the newest records that have it.",
        epilog="Exit codes: 0 all met; 1 some target is missed or has no record; 2 bad option, file or selector.",
    )
    parser.add_argument("table", choices=("kernels", "engine"))
    parser.add_argument("selector", nargs="*", default=["reference"], help="which records count (default: reference)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where records are (default: runs)")
    parser.add_argument("--file", type=Path, help="another targets file")
    given = parser.parse_args(list(argv))
    targets = read_targets(given.file or config_dir() / "targets.yaml")
    records = store.load(given.selector, given.runs)
    if given.table == "kernels":
        rows = [targets_kernels.judge(target, records) for target in targets.kernels]
    else:
        rows = [targets_engine.judge(target, records) for target in targets.engine]
    _print(rows)
    return 0 if is_all_met(rows) else 1


def _print(rows: Sequence[Row]) -> None:
    console = Console()

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for row in rows:
        measured = "-" if row.measured is None else f"{row.measured:.3f}"
        show(f"{row.verdict:<9}  {measured:>7}  {row.bound:>9}  {row.name}")
        show(f"{'':31}{row.detail}")
    met = sum(row.is_met for row in rows)
    show(f"{met} of {len(rows)} targets met")
