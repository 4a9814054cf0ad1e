"""Selectors: the one way every verb names records.

A selector is words. A word with `=` filters (`model=tiny path=cascade,full prefix_len=2048`); any other word is a
source: a folder, a record file, `latest`, `reference`, a glob, the id of a run, case, launch or record, or a tag.
Sources add up, filters narrow down; without a source the whole runs folder is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import get_args

from prefixbench.case import Case
from prefixbench.errors import UsageError
from prefixbench.hints import unknown
from prefixbench.record import Record

_ALIASES = {
    "prefix_len": "prefix_tokens",
    "suffix_len": "suffix_tokens",
    "output_len": "output_tokens",
    "gpus": "tensor_parallel",
    "case": "case_hash",
}
_OF_RECORD: dict[str, Callable[[Record], object]] = {
    "status": lambda r: r.status,
    "case_hash": lambda r: r.case_hash,
    "launch": lambda r: r.launch.launch_id,
    "tag": lambda r: (r.notes or {}).get("tag"),
    "sweep": lambda r: (r.notes or {}).get("sweep"),
}
_OF_CASE = sorted(
    field.name for case in get_args(Case) for field in fields(case) if not field.name.endswith("settings")
)
_SHORTEST_ID = 6
RESERVED = ("latest", "reference")
"""Sources with a meaning of their own; no tag may be called so."""


@dataclass(frozen=True)
class Selection:
    """A parsed selector. `filters` maps a field to the texts it may have."""

    sources: tuple[str, ...]
    filters: dict[str, tuple[str, ...]]

    def accepts(self, record: Record) -> bool:
        return all(_text(_value(record, name)) in allowed for name, allowed in self.filters.items())

    @staticmethod
    def named(name: str, records: Sequence[Record]) -> list[Record]:
        """Records whose tag, launch, case or record id is `name` (ids may be shortened to six characters)."""
        found = [r for r in records if (r.notes or {}).get("tag") == name or _has_id(r, name)]
        if not found:
            raise UsageError(
                f"nothing is called {name!r}; allowed: a folder, a record file, latest, reference, a glob, "
                "a case hash, a launch id, a tag, or a filter such as path=cascade"
            )
        return found


def parse_selector(selector: str | Sequence[str]) -> Selection:
    """The words of a selector; UsageError for a filter that is unknown, has no value, or is given twice."""
    words = selector.split() if isinstance(selector, str) else [str(word) for word in selector]
    sources: list[str] = []
    filters: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or "/" in name:
            sources.append(word)
            continue
        field = _ALIASES.get(name, name)
        if field not in _OF_RECORD and field not in _OF_CASE:
            raise unknown("filter", name, {*_ALIASES, *_OF_RECORD, *_OF_CASE})
        allowed = tuple(part.strip().lower() for part in value.split(","))
        if not all(allowed):
            raise UsageError(f"filter {word!r} has a value that is empty; write {name}=VALUE or {name}=ONE,OTHER")
        if field in filters:
            raise UsageError(f"filter {name!r} is given twice; write {name}=ONE,OTHER for either of them")
        filters[field] = allowed
    return Selection(tuple(sources), filters)


def _value(record: Record, field: str) -> object:
    if field in _OF_RECORD:
        return _OF_RECORD[field](record)
    return getattr(record.case, field, None)


def _text(value: object) -> str:
    return str(value).lower()


def _has_id(record: Record, name: str) -> bool:
    ids = (record.record_id, record.case_hash, record.launch.launch_id)
    return len(name) >= _SHORTEST_ID and any(known.startswith(name) for known in ids)
