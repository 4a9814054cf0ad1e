"""What a measure needs to know about one case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefixbench.case import ServingCase
from prefixbench.engines.base import SendPlan
from prefixbench.machine.telemetry import Sampler
from prefixbench.workloads import Workload


@dataclass(frozen=True)
class Task:
    """One case ready to be measured. `watch` makes the telemetry of one block."""

    case: ServingCase
    workload: Workload
    how: SendPlan
    watch: Callable[[], Sampler]

    @property
    def page_size(self) -> int:
        return int(self.case.engine_settings["page_size"] or 1)
