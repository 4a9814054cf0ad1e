"""Reads what the plugin reports through SGLang's own /server_info; names equal those of the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from prefixbench.engines.base import ServerFailedError
from prefixbench.record import PlacementTrace, PoolRun, RadixEvent, StepCounters

T = TypeVar("T")

_COUNTERS: TypeAdapter[StepCounters] = TypeAdapter(StepCounters)
_EVENT_FIELDS = ("sequence", "kind", "node_id", "tokens", "layout", "detail")
_RUN_FIELDS = ("start_slot", "length", "kind", "node_id", "users")
_TRACE: TypeAdapter[PlacementTrace] = TypeAdapter(PlacementTrace)


def plugin_state(server_info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The plugin's part of the first rank's state; None for a server without the plugin."""
    states = server_info.get("internal_states") or [{}]
    state: Mapping[str, Any] | None = states[0].get("prefixonce")
    return state


def read_counters(state: Mapping[str, Any]) -> StepCounters:
    """ServerFailedError when the tensor-parallel ranks did not all do the same: nothing they measured would count."""
    ranks = state["ranks"]
    if len({rank["digest"] for rank in ranks}) > 1:
        steps = "; ".join(f"rank {rank['rank']}: {rank['steps']}" for rank in ranks)
        raise ServerFailedError(f"the tensor-parallel ranks decided differently: {steps}")
    return _validated(_COUNTERS, state["counters"])


def read_placement(state: Mapping[str, Any]) -> PlacementTrace:
    placement = dict(state["placement"])
    for name, fields, kind in (
        ("events", _EVENT_FIELDS, RadixEvent),
        ("pool_before", _RUN_FIELDS, PoolRun),
        ("pool_after", _RUN_FIELDS, PoolRun),
    ):
        placement[name] = [kind(**dict(zip(fields, row, strict=True))) for row in placement[name]]
    return _validated(_TRACE, placement)


def _validated(adapter: TypeAdapter[T], data: object) -> T:
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ServerFailedError(f"the plugin reports {where}: {first['msg']}") from None
