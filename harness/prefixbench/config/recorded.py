"""Records -> the configurations that measure their cases again, whatever presets and defaults have become since."""

from __future__ import annotations

import json
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from prefixbench.case import ServingCase, case_hash
from prefixbench.config.cases import sweep_cases
from prefixbench.config.checks import load
from prefixbench.config.overrides import one_line_errors
from prefixbench.config.run import RunConfig
from prefixbench.errors import UsageError
from prefixbench.record import Record

# What belongs to a run and not to what it measures; these values stand until the new run says its own.
_OF_THE_RUN: dict[str, object] = {
    "launches": 1,
    "resume": False,
    "tag": None,
    "runs": "runs",
    "run_id": "again",
    "typed": [],
}


def configurations(records: Sequence[Record]) -> list[tuple[RunConfig, tuple[ServingCase, ...]]]:
    """Each configuration that the serving records were made from, with those of its cases that they hold; a case that
    several runs measured stands once. UsageError when a configuration does not give the cases it once gave."""
    wanted: dict[str, tuple[RunConfig, dict[str, ServingCase]]] = {}
    taken: set[str] = set()
    for record in (record for record in records if isinstance(record.case, ServingCase)):
        kept = {name: value for name, value in record.config.items() if name not in _OF_THE_RUN}
        key = json.dumps(kept, sort_keys=True)
        if key not in wanted:
            wanted[key] = (_configuration(record), {})
        config, cases = wanted[key]
        if record.case_hash not in taken:
            taken.add(record.case_hash)
            cases[record.case_hash] = _case(record, config)
    return [(config, tuple(cases.values())) for config, cases in wanted.values() if cases]


def _configuration(record: Record) -> RunConfig:
    try:
        with one_line_errors():
            composed = OmegaConf.merge(OmegaConf.structured(RunConfig), record.config | _OF_THE_RUN)
            assert isinstance(composed, DictConfig)
            return load(composed)
    except UsageError as error:
        raise UsageError(f"record {record.record_id} cannot be measured again: its configuration: {error}") from None


def _case(record: Record, config: RunConfig) -> ServingCase:
    for case in sweep_cases(config):
        if case_hash(case) == record.case_hash:
            return case
    raise UsageError(
        f"record {record.record_id} cannot be measured again: its configuration gives other cases in this version "
        f"(commit {record.environment.git_commit} made it)"
    )
