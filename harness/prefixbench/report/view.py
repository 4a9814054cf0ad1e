"""What a report shows, before any rendering: sections made of charts, tables, notes and the interactive pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Json = Any  # a JSON value; `safe_json.clean` is what guarantees it
Figure = dict[str, Json]


@dataclass(frozen=True)
class Cell:
    """One table entry. `missing` is the reason why there is no value, `path` colours its chip, `mark` is a verdict."""

    text: str
    value: Json = None
    missing: str | None = None
    path: str | None = None
    mark: str | None = None


@dataclass(frozen=True)
class Column:
    label: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: bool = False
    kind: Literal["table"] = "table"

    @property
    def missing_reasons(self) -> tuple[str, ...]:
        """Each reason once, in order of appearance: the numbered notes under the table."""
        return tuple(dict.fromkeys(cell.missing for row in self.rows for cell in row if cell.missing))


@dataclass(frozen=True)
class Chart:
    """A Plotly figure (colours as `$role` tokens that the theme resolves), its alternative text and its data."""

    id: str
    title: str
    alt: str
    figure: Figure
    table: Table
    caption: str = ""
    kind: Literal["chart"] = "chart"


@dataclass(frozen=True)
class Widget:
    """A picture with behaviour of its own (`name` picks template and script), fed by `data`; never without a table."""

    id: str
    name: Literal["pool", "placement", "amdahl"]
    title: str
    alt: str
    data: dict[str, Json]
    table: Table
    caption: str = ""
    kind: Literal["widget"] = "widget"


@dataclass(frozen=True)
class Switch:
    """Pictures of which one is seen at a time, chosen by a labelled radio group, or by a list where there are many.

    Switches of one `group` move together.
    """

    id: str
    label: str
    options: tuple[tuple[str, Chart | Widget], ...]
    group: str = ""
    kind: Literal["switch"] = "switch"


@dataclass(frozen=True)
class Note:
    """A sentence that stands out: something to know, to beware of, or that is absent and why."""

    tone: Literal["info", "warning", "missing"]
    text: str
    kind: Literal["note"] = "note"


@dataclass(frozen=True)
class Facts:
    """Label/value pairs that are read, not compared."""

    pairs: tuple[tuple[str, str], ...]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True)
class Commands:
    """Shell lines to copy."""

    label: str
    lines: tuple[str, ...]
    kind: Literal["commands"] = "commands"


@dataclass(frozen=True)
class Method:
    """One entry of the method notes."""

    title: str
    text: str
    kind: Literal["method"] = "method"


Block = Table | Chart | Switch | Widget | Note | Facts | Commands | Method


@dataclass(frozen=True)
class Section:
    """`question` is what the reader wonders; `finding` the one-sentence answer from this run's data.

    `labels` say what kind of run the numbers come from (CPU, random weights, ...), in words.
    """

    id: str
    title: str
    question: str
    finding: str
    blocks: tuple[Block, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Headline:
    """The answer first. `figure` is "1.84×", or None with `why_not` saying why there is none."""

    figure: str | None
    sentence: str
    interval: str | None = None
    path: str | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class Tile:
    """A small figure beside the headline."""

    label: str
    figure: str
    detail: str


@dataclass(frozen=True)
class Download:
    name: str
    label: str
    media_type: str
    text: str


@dataclass(frozen=True)
class Page:
    """The whole report. `violations` are what `--strict` refuses (a path without steps, ...)."""

    name: str
    title: str
    subtitle: str
    generated_at: str
    headline: Headline
    tiles: tuple[Tile, ...]
    badges: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    violations: tuple[str, ...]
    sections: tuple[Section, ...]
    record_ids: tuple[str, ...]
    downloads: tuple[Download, ...]

    def blocks(self) -> Iterator[Block]:
        for section in self.sections:
            yield from section.blocks

    def pictures(self) -> Iterator[Chart | Widget]:
        """Charts and widgets in order of appearance, also those that a switch hides at first."""
        for block in self.blocks():
            if isinstance(block, (Chart, Widget)):
                yield block
            elif isinstance(block, Switch):
                yield from (picture for _, picture in block.options)

    def charts(self) -> Iterator[Chart]:
        return (picture for picture in self.pictures() if isinstance(picture, Chart))

    def widgets(self) -> Iterator[Widget]:
        return (picture for picture in self.pictures() if isinstance(picture, Widget))

    def tables(self) -> Iterator[Table]:
        yield from (block for block in self.blocks() if isinstance(block, Table))
        yield from (picture.table for picture in self.pictures())
