"""How to get the report again: commands, commit, environment, records, data, and the method in one page."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from prefixbench.record import Record
from prefixbench.report import cells
from prefixbench.report.view import Block, Commands, Facts, Method, Note, Section, Table
from prefixbench.report.words import count, listing, number

_LONGEST_TABLE = 400
_MOST_VALUES = 6

METHOD = (
    Method(
        "What is counted",
        "Decode tokens per second leaves out each request's first token, which belongs to prefill, and is taken while "
        "the batch was steady. Token counts are the server's own. Failed requests and warm-up are counted as such and "
        "never enter a rate.",
    ),
    Method(
        "What a replicate is",
        "One server launch. Blocks of a launch are averaged first; intervals are 95% t-intervals over launches. "
        "One launch has no interval, and none is shown.",
    ),
    Method(
        "How paths are compared",
        "Blocks of the paths are interleaved inside a launch where the plugin can switch them, and compared in pairs. "
        "Unmodified SGLang is measured in launches of its own, without the plugin in the process.",
    ),
    Method(
        "Which path ran",
        "The plugin counts the steps that each kernel served. A path gets credit only for steps it ran; the name that "
        "was asked for proves nothing.",
    ),
    Method(
        "Yardsticks",
        "A share of a gain depends on whether tokens per second, time per token or the logarithm is divided. The "
        "report names the yardstick each time and lets you switch it.",
    ),
    Method(
        "Bytes",
        "Hardware counters are called measured; everything computed from shapes is called modelled. L2 and DRAM "
        "traffic are never added.",
    ),
    Method(
        "What is missing",
        "A dash is a value that does not exist, with its reason below the table. It is never zero, and never filled "
        "in from elsewhere.",
    ),
)


def again_section(records: Sequence[Record], selector: str, rebuilt_by: str) -> Section:
    commits = {record.environment.git_commit for record in records}
    dirty = any(record.environment.git_dirty for record in records)
    blocks: list[Block] = [Commands("Rebuild this report from the records", (rebuilt_by,))]
    measure = _measuring_commands(records)
    blocks += [Commands("Measure again", measure)] if measure else []
    if len(commits) > 1:
        blocks.append(Note("warning", f"The records come from {len(commits)} different commits."))
    if dirty:
        blocks.append(
            Note("warning", "Some records were made with uncommitted changes: the commit alone does not say what ran.")
        )
    blocks += [
        Facts(_environment(records)),
        _configuration(records),
        _record_table(records),
        *METHOD,
    ]
    finding = (
        f"{count(len(records), 'record')} selected by “{selector or 'everything'}”, from "
        f"{_commit_words(commits)}{', with uncommitted changes' if dirty else ''}."
    )
    return Section(
        "again", "How to get this again", "What exactly ran, and how can I repeat it?", finding, tuple(blocks)
    )


def _commit_words(commits: Iterable[str | None]) -> str:
    named = sorted(commit[:12] for commit in commits if commit)
    return f"commit {listing(named)}" if named else "an unknown commit"


def _measuring_commands(records: Sequence[Record]) -> tuple[str, ...]:
    """The typed overrides as commands: one multirun where they form a full grid, else one line for each list."""
    commands = []
    for kind, verb in (("serving", "run"), ("kernel", "kernels")):
        typed = list(dict.fromkeys(r.overrides for r in records if r.case.kind == kind and r.overrides))
        commands += [shlex.join(["prefixbench", *line]) for line in typed if line[0] == "again"]
        typed = [line for line in typed if line[0] != "again"]
        commands += [shlex.join(["prefixbench", verb, *line]) for line in _as_grid(typed) or typed]
    return tuple(" ".join(command.split()) for command in commands)


def _as_grid(typed: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]] | None:
    values: dict[str, list[str]] = {}
    for overrides in typed:
        for key, _, value in (override.partition("=") for override in overrides):
            if value not in values.setdefault(key, []):
                values[key].append(value)
    if len(typed) < 2 or math.prod(len(options) for options in values.values()) != len(typed):
        return None
    grid = [f"{key}={','.join(sorted(options, key=_natural))}" for key, options in values.items()]
    return [(*grid, "-m")]


def _natural(value: str) -> tuple[float, str]:
    """Numbers by size, then words."""
    return (float(value), "") if value.replace(".", "", 1).isdigit() else (math.inf, value)


def _environment(records: Sequence[Record]) -> tuple[tuple[str, str], ...]:
    environments = [record.environment for record in records]
    packages = sorted({name for e in environments for name in e.packages})
    lines: list[tuple[str, Iterable[object]]] = [
        ("Machine", (e.hostname for e in environments)),
        ("Operating system", (e.os for e in environments)),
        ("CPU", (f"{e.cpu or 'unknown'}, {count(e.cpu_count, 'core')}" for e in environments)),
        ("Memory", (f"{number(e.memory_bytes / 2**30)} GiB" for e in environments)),
        (
            "GPU",
            (", ".join(f"{g.name} (driver {g.driver or 'unknown'})" for g in e.gpus) or "none" for e in environments),
        ),
        ("CUDA", (e.cuda or "none" for e in environments)),
        ("Python", (e.python for e in environments)),
        ("Commit", (_commit(e.git_commit, e.git_dirty) for e in environments)),
        *((name, [e.packages.get(name) or "not installed" for e in environments]) for name in packages),
    ]
    return tuple((label, _distinct(values)) for label, values in lines)


def _commit(commit: str | None, dirty: bool | None) -> str:
    return f"{commit or 'unknown'}{ {True: ', uncommitted changes', False: ', clean', None: ', state unknown'}[dirty] }"


def _distinct(values: Iterable[object]) -> str:
    """The value, or how the records differ: most frequent first."""
    tally = Counter(str(value) for value in values)
    if len(tally) == 1:
        return next(iter(tally))
    shown = [f"{value} ({count(times, 'record')})" for value, times in tally.most_common(_MOST_VALUES)]
    return "; ".join(shown) + (f"; and {len(tally) - _MOST_VALUES} more" if len(tally) > _MOST_VALUES else "")


def _configuration(records: Sequence[Record]) -> Table:
    """Settings common to all records once, the others with the values they took."""
    flat = [_flatten(record.config) for record in records]
    keys = sorted({key for config in flat for key in config})
    return cells.table(
        "configuration",
        "Resolved configuration of the records",
        ("setting", "value"),
        [[cells.text(key), cells.text(_distinct(config.get(key, "not set") for config in flat))] for key in keys],
        folded=True,
    )


def _flatten(config: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(config, dict):
        return {prefix: config if isinstance(config, str) else json.dumps(config)}
    return {
        key: value
        for name, item in config.items()
        for key, value in _flatten(item, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _record_table(records: Sequence[Record]) -> Table:
    shown = records[:_LONGEST_TABLE]
    rest = f", the first {len(shown)} of {len(records):,} (the download has all)" if len(shown) < len(records) else ""
    return cells.table(
        "records",
        f"Records of this report{rest}",
        ("record", "status", "started", "failure"),
        [
            [
                cells.text(record.record_id),
                cells.text(record.status),
                cells.text(record.launch.started_at),
                cells.text(f"{record.failure.kind}: {record.failure.message}") if record.failure else cells.BLANK,
            ]
            for record in shown
        ],
        folded=True,
    )
