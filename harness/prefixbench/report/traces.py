"""Launches whose layout was recorded, the most telling first: what the memory and placement sections choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixbench.case import ServingCase
from prefixbench.record import PlacementTrace, Record, ServingMeasurement
from prefixbench.report.view import Block, Note, Section, Switch, Widget

_MOST_SHOWN = 8
_SHOWN_FIRST = ("full", "auto", "dense", "cascade", "paged", "stock")


@dataclass(frozen=True)
class Traced:
    """One launch of one case, and what the layout did in it."""

    record: Record
    case: ServingCase
    trace: PlacementTrace

    @property
    def label(self) -> str:
        case = self.case
        sizes = f"{case.prefix_tokens:,} tokens, {case.concurrency} in flight"
        return f"{case.path}, {sizes}, launch {self.record.launch.index + 1}"

    @property
    def where(self) -> str:
        return f"path {self.label} (record {self.record.record_id})"

    @property
    def rank(self) -> tuple[object, ...]:
        """Contiguous layout first, then the longest prefix, the most users, and the paths that place."""
        path = self.case.path
        return (
            self.trace.contiguous == 0,
            not self.trace.pool_after,
            -self.case.prefix_tokens,
            -self.case.concurrency,
            _SHOWN_FIRST.index(path) if path in _SHOWN_FIRST else len(_SHOWN_FIRST),
            self.record.record_id,
        )


def traced(records: Sequence[Record]) -> list[Traced]:
    """Every launch that recorded its layout, by rank."""
    found = [
        Traced(record, record.case, record.measurement.placement)
        for record in records
        if isinstance(record.case, ServingCase)
        and isinstance(record.measurement, ServingMeasurement)
        and record.measurement.placement is not None
    ]
    return sorted(found, key=lambda one: one.rank)


def shown(found: Sequence[Traced]) -> list[Traced]:
    """What the pictures offer: one launch of each case before a second one of any."""
    turns: dict[str, int] = {}
    order: list[tuple[int, int, Traced]] = []
    for one in found:
        turns[one.record.case_hash] = turns.get(one.record.case_hash, 0) + 1
        order.append((turns[one.record.case_hash], len(order), one))
    return [one for _, _, one in sorted(order, key=lambda item: item[:2])[:_MOST_SHOWN]]


def picker(name: str, found: Sequence[Traced], pictures: Sequence[tuple[Traced, Widget]]) -> list[Block]:
    """The pictures behind a list of launches; the lists of one page move together where they offer the same."""
    if len(pictures) == 1:
        return [pictures[0][1]]
    group = "+".join(one.record.record_id for one, _ in pictures)
    options = tuple((one.label, picture) for one, picture in pictures)
    blocks: list[Block] = [Switch(f"{name}-launch", "Launch", options, group=group)]
    if len(found) > len(pictures):
        text = f"{len(pictures)} of {len(found)} launches can be chosen: one of every case before a second of any."
        blocks.append(Note("info", text))
    return blocks


def absent(name: str, title: str, question: str) -> Section:
    reason = "no record of this selection carries a placement trace (launches without the plugin have none)"
    return Section(name, title, question, "Nothing was recorded about placement.", (Note("missing", f"{reason}."),))
