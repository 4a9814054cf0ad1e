"""Table entries from values: one way to say a number, a path, an interval and an absence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prefixbench.report.view import Cell, Column, Table
from prefixbench.report.words import MISSING, number

_LONGEST_OPEN_TABLE = 14

# An entry that has nothing to say, as opposed to a value that is missing.
BLANK = Cell("")


def text(value: object) -> Cell:
    return Cell(str(value), str(value))


def path(name: str, label: str | None = None) -> Cell:
    return Cell(label or name, name, path=name)


def verdict(name: str) -> Cell:
    """A verdict with its mark: shape and word carry it, colour only helps."""
    return Cell(name, name, mark=name)


def missing(reason: str) -> Cell:
    return Cell(MISSING, None, missing=reason)


def amount(value: float | None, why_not: str | None = None, say: Callable[[float], str] = number) -> Cell:
    """A number, or the reason for its absence (a reason must be given where a value can be absent)."""
    if value is None:
        return missing(why_not or "not recorded")
    return Cell(say(value), value)


def interval(
    low: float | None, high: float | None, why_not: str | None = None, say: Callable[[float], str] = number
) -> Cell:
    if low is None or high is None:
        return missing(why_not or "not recorded")
    return Cell(f"{say(low)} to {say(high)}", [low, high])


def table(
    name: str,
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    folded: bool | None = None,
) -> Table:
    """Builds a table, long ones folded; columns whose entries are all numbers, intervals or missing are set right."""
    body = tuple(tuple(row) for row in rows)
    fold = len(body) > _LONGEST_OPEN_TABLE if folded is None else folded
    numeric = [bool(body) and all(_is_numeric(row[i]) for row in body) for i in range(len(columns))]
    return Table(name, caption, tuple(Column(name, numeric[i]) for i, name in enumerate(columns)), body, fold)


def _is_numeric(cell: Cell) -> bool:
    if cell.missing is not None or cell is BLANK:
        return True
    return isinstance(cell.value, (int, float, list)) and not isinstance(cell.value, bool)
