"""What is done already: good records of the same case, measured on the same machine with the same code."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbench.case import OutsideCase, ServingCase
from prefixbench.record import Environment, Record

_ENGINE_PACKAGES = ("sglang", "torch", "triton")


def conditions(environment: Environment, plugin_source: object) -> tuple[object, ...]:
    """What must be equal for an old record to count. The commit does not: editing a page of documentation changes
    nothing that was measured, editing the plugin does."""
    return (
        environment.cpu,
        environment.cpu_count,
        tuple(gpu.name for gpu in environment.gpus),
        tuple(environment.packages.get(name) for name in _ENGINE_PACKAGES),
        plugin_source,
    )


def reusable(records: Sequence[Record], wanted: Sequence[str], here: Environment, plugin_source: str) -> list[Record]:
    """Records with status ok whose case hash is wanted and whose conditions are those of this machine now."""
    return [
        record
        for record in records
        if record.status == "ok"
        and record.case_hash in wanted
        and conditions(record.environment, _source(record)) == conditions(here, _needed(record, plugin_source))
    ]


def _source(record: Record) -> object:
    return (record.notes or {}).get("plugin_source")


def _needed(record: Record, plugin_source: str) -> str | None:
    case = record.case.serving if isinstance(record.case, OutsideCase) else record.case
    return plugin_source if isinstance(case, ServingCase) and case.plugin else None
