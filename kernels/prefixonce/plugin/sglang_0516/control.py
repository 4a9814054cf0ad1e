"""SGLang's own state calls carry ours: /server_info reads counters and placement, /set_internal_state steers."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch

from prefixonce import __version__
from prefixonce.plugin.metrics import Metrics
from prefixonce.plugin.picture import PoolRun
from prefixonce.plugin.runtime import Runtime
from prefixonce.plugin.sglang_0516.tree import PlacingRadixCache
from prefixonce.step import Mode


class Control:
    def __init__(
        self, runtime: Runtime, tree: PlacingRadixCache, metrics: Metrics, *, rank: int, sglang_version: str
    ) -> None:
        self._runtime = runtime
        self._tree = tree
        self._metrics = metrics
        self._rank = rank
        self._sglang_version = sglang_version
        self._pool_before: list[PoolRun] = []

    def state(self, ranks: Any) -> dict[str, object]:
        """JSON-safe: numbers, strings, lists and dicts with string keys. `ranks`: the tensor-parallel group on CPUs,
        all of which must be in this call."""
        runtime, settings, placement = self._runtime, self._runtime.settings, self._tree.placement
        after = self._tree.picture()
        return {
            "version": __version__,
            "sglang_version": self._sglang_version,
            "rank": self._rank,
            "mode": runtime.mode.name.lower(),
            "dense_m_eff": settings.dense_m_eff,
            "timers": settings.timers,
            "fault": str(settings.fault),
            "ranks": _gather({"rank": self._rank, **self._decided(after)}, ranks),
            "counters": runtime.counters.to_json(),
            "placement": placement.to_json(
                self._tree.pool_slots, [list(run) for run in self._pool_before], [list(run) for run in after]
            ),
        }

    def _decided(self, picture: list[PoolRun]) -> dict[str, object]:
        """What every rank must have decided alike: steps by path, and a digest of all that was counted and placed."""
        counters = self._runtime.counters
        totals = (counters.steps, counters.reasons, counters.batch_histogram, self._tree.placement.nodes)
        figures = (counters.group_steps, counters.prefix_tokens_read_once, counters.prefix_tokens_read_by_stock)
        text = repr(([sorted(total.items(), key=repr) for total in totals], figures, picture))
        return {
            "steps": {path.value: count for path, count in counters.steps.items()},
            "digest": sha256(text.encode()).hexdigest()[:16],
        }

    def apply(self, command: dict[str, float]) -> str | None:
        """Carries out all of `command`, or nothing and says why."""
        for name, value in command.items():
            problem = _problem(name, value)
            if problem is not None:
                return problem
        for name in command:
            if name == "prefixonce_path":
                self._runtime.mode = Mode(int(command[name]))
            elif name == "prefixonce_reset":
                self._metrics.settle()
                self._runtime.reset_counters()
            else:
                self._pool_before = self._tree.picture()
        return None


def _gather(mine: dict[str, object], ranks: Any) -> list[dict[str, object]]:
    found: list[Any] = [None] * ranks.size()
    if len(found) == 1:
        return [mine]
    torch.distributed.all_gather_object(found, mine, group=ranks)
    return found


def split_command(server_args: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Ours and SGLang's part of one call."""
    ours = {name: value for name, value in server_args.items() if name.startswith("prefixonce_")}
    return ours, {name: value for name, value in server_args.items() if name not in ours}


def _problem(name: str, value: float) -> str | None:
    allowed = _COMMANDS.get(name)
    if allowed is None:
        return f"{name} is unknown; allowed: {', '.join(_COMMANDS)}"
    return None if allowed(value) else f"{name}={value} is not allowed"


_COMMANDS: dict[str, Callable[[float], bool]] = {
    "prefixonce_path": lambda value: value in {mode.value for mode in Mode},
    "prefixonce_reset": lambda value: value == 1,
    "prefixonce_snapshot": lambda value: value == 1,
}
