"""A page as Markdown for a pull request: the answer, the warnings and the tables; long tables are folded."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prefixbench.report.view import Block, Cell, Chart, Commands, Facts, Method, Note, Page, Switch, Table, Widget

_LONGEST_TABLE = 40


def markdown(page: Page) -> str:
    return "\n".join(_lines(page)).rstrip() + "\n"


def _lines(page: Page) -> Iterator[str]:
    head = page.headline
    yield from (f"# {escape(page.title)}", "", escape(page.subtitle), "")
    yield f"**{escape(head.figure)}** {escape(head.sentence)}" if head.figure else f"**{escape(head.sentence)}**"
    yield from (escape(line) for line in (head.interval, head.why_not) if line)
    yield ""
    yield from (f"- {escape(tile.label)}: **{escape(tile.figure)}** ({escape(tile.detail)})" for tile in page.tiles)
    yield ""
    yield from (f"> **{escape(name)}.** {escape(meaning)}  " for name, meaning in page.badges)
    yield from (f"> **Beware.** {escape(warning)}  " for warning in page.warnings)
    for section in page.sections:
        yield from ("", f"## {escape(section.title)}", "", escape(section.finding))
        if section.labels:
            yield from ("", f"_{escape(', '.join(section.labels))}_")
        for block in section.blocks:
            yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    yield ""
    match block:
        case Table():
            yield from _table(block)
        case Chart() | Widget():
            yield from _picture(block)
        case Switch(options=((_, Widget() as first), *_)):  # one launch is enough for a pull request
            yield from _picture(first)
        case Switch():
            for _, picture in block.options:
                yield from _picture(picture)
        case Note():
            yield f"_{escape(block.text)}_"
        case Facts():
            yield from (f"- {escape(label)}: {escape(value)}" for label, value in block.pairs)
        case Commands():
            yield from (f"{escape(block.label)}:", "", *(f"    {line}" for line in block.lines))
        case Method():
            yield f"- **{escape(block.title)}**: {escape(block.text)}"


def _picture(picture: Chart | Widget) -> Iterator[str]:
    if isinstance(picture, Widget) and picture.name in ("pool", "placement"):
        yield f"_{escape(picture.title)}: see the HTML report._"
    else:
        yield from _table(picture.table)


def _table(table: Table) -> Iterator[str]:
    shown = table.rows[:_LONGEST_TABLE]
    caption = escape(table.caption)
    yield from ((f"<details><summary>{caption}</summary>", "") if table.folded else (f"**{caption}**", ""))
    yield "| " + " | ".join(escape(column.label) for column in table.columns) + " |"
    yield "|" + "|".join("---:" if column.numeric else "---" for column in table.columns) + "|"
    reasons = table.missing_reasons
    yield from ("| " + " | ".join(_cell(cell, reasons) for cell in row) + " |" for row in shown)
    if len(table.rows) > len(shown):
        yield from ("", f"({len(table.rows) - len(shown)} more rows in the HTML report)")
    yield from ("", *(f"({i}) {escape(reason)}  " for i, reason in enumerate(reasons, 1)))
    yield from (("", "</details>", "") if table.folded else ("",))


def _cell(cell: Cell, reasons: tuple[str, ...]) -> str:
    return f"{cell.text} ({reasons.index(cell.missing) + 1})" if cell.missing else escape(cell.text)


def escape(text: str) -> str:
    """Text that stays text: no HTML, no table cell, no link or emphasis, no mention of a person, one line."""
    return re.sub(r"([\\`*_\[\]|#@])", r"\\\1", " ".join(text.split())).replace("<", "&lt;").replace(">", "&gt;")
