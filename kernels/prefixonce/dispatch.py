"""Chooses the path of a decode step from M_eff = realized batch x GQA group; pure, deterministic, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from prefixonce.step import Choice, DecodeStep, Mode, Path, PrefixGroup


@dataclass(frozen=True, slots=True)
class Limits:
    """When sharing is worth considering. The M_eff threshold is the seed's, fitted on an A100; refit per GPU.

    `auto` leaves a path that it is on only for a gain of more than `hysteresis`, a share of the cost or the threshold.
    """

    dense_m_eff: int = 1024
    min_rows: int = 2
    min_prefix_tokens: int = 1
    hysteresis: float = 0.03


class CostModel(Protocol):
    """What `auto` asks, in microseconds of one layer: a group's own cost, and what a step pays once for sharing.

    Of a group a price sees its number of rows, `prefix_tokens` and `contiguous_tokens`, of a step its heads: groups
    alike in these are priced once, and a verdict stands for as long as the groups do.
    """

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float: ...

    def step_us(self, path: Path) -> float: ...


Kept = Mapping[int, Path]
"""The paths that groups were on, by node id."""

_NOTHING_KEPT: Kept = MappingProxyType({})


def choose(
    step: DecodeStep, mode: Mode, limits: Limits, cost: CostModel | None = None, kept: Kept = _NOTHING_KEPT
) -> Choice:
    """Returns the path of every group with its reason; the step's path is the strongest one used.

    Depends only on its arguments (replicated state), so every tensor-parallel rank decides alike. The rule
    `M_eff >= threshold -> dense, else cascade` is the seed paper's dispatcher. `kept` holds `auto` back from switching.
    """
    if mode is Mode.STOCK:
        return _unshared(step, Path.STOCK, "stock was asked for")
    if mode is Mode.PAGED:
        return _unshared(step, Path.PAGED, "paged was asked for")
    if not step.groups:
        return _unshared(step, Path.STOCK, "no two running requests share a prefix")
    known: dict[tuple[int, int, int, Path | None], _Verdict] = {}
    verdicts = []
    for group in step.groups:
        was = kept.get(group.node_id)
        alike = (len(group.rows), group.prefix_tokens, group.contiguous_tokens, was)
        verdict = known.get(alike)
        if verdict is None:
            verdict = known[alike] = _choose_group(step, group, mode, limits, cost, was)
        verdicts.append(verdict)
    if mode is Mode.AUTO and cost is not None:
        verdicts = _if_it_pays(verdicts, cost, _margin(step, limits, kept))
    paths = tuple(verdict.path for verdict in verdicts)
    reasons = tuple(verdict.reason for verdict in verdicts)
    strongest = max(range(len(paths)), key=lambda i: _STRENGTH[paths[i]])
    return Choice(paths[strongest], paths, reasons, reasons[strongest])


class Dispatcher:
    """`choose` from step to step: asked again only when groups, mode or cost model are other objects than before.

    One dispatcher serves one rank, whose head counts never change. What it remembers comes from the steps alone.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._asked: tuple[tuple[PrefixGroup, ...], Mode, CostModel | None] | None = None
        self._kept: Kept = _NOTHING_KEPT
        self._choice: Choice | None = None

    def choose(self, step: DecodeStep, mode: Mode, cost: CostModel | None) -> Choice:
        asked = self._asked
        if self._choice is not None and asked is not None:
            if step.groups is asked[0] and mode is asked[1] and cost is asked[2]:
                return self._choice
            if mode is not asked[1] or cost is not asked[2]:
                self._kept = _NOTHING_KEPT
        self._asked = (step.groups, mode, cost)
        self._choice = choose(step, mode, self.limits, cost, self._kept)
        self._kept = {group.node_id: path for group, path in zip(step.groups, self._choice.paths, strict=True)}
        return self._choice


class _Verdict(NamedTuple):
    """`saved_us`: against stock, as far as the cost model was asked."""

    path: Path
    reason: str
    saved_us: float = 0.0


_STRENGTH = {Path.STOCK: 0, Path.PAGED: 1, Path.CASCADE: 2, Path.DENSE: 3}


def _unshared(step: DecodeStep, path: Path, reason: str) -> Choice:
    count = len(step.groups)
    return Choice(path, (path,) * count, (reason,) * count, reason)


def _choose_group(
    step: DecodeStep, group: PrefixGroup, mode: Mode, limits: Limits, cost: CostModel | None, kept: Path | None
) -> _Verdict:
    if group.prefix_tokens < limits.min_prefix_tokens:
        return _Verdict(Path.STOCK, f"prefix of {group.prefix_tokens} tokens is under {limits.min_prefix_tokens}")
    if len(group.rows) < limits.min_rows:
        return _Verdict(Path.STOCK, f"{len(group.rows)} request shares with nobody")
    if mode is Mode.CASCADE:
        return _Verdict(Path.CASCADE, "cascade was asked for")
    if mode is Mode.DENSE:
        return _dense_or_cascade(group, "dense was asked for")
    if mode is Mode.AUTO and cost is not None:
        return _cheapest(step, group, cost, kept, limits.hysteresis)
    m_eff, threshold = step.m_eff(group), limits.dense_m_eff
    if m_eff >= threshold:
        return _dense_or_cascade(group, f"M_eff {m_eff} reaches {threshold}")
    if mode is Mode.AUTO and kept is Path.DENSE and m_eff >= (1 - limits.hysteresis) * threshold:
        return _dense_or_cascade(group, f"M_eff {m_eff} is barely under {threshold}: dense stays")
    return _Verdict(Path.CASCADE, f"M_eff {m_eff} is under {threshold}")


def _dense_or_cascade(group: PrefixGroup, reason: str) -> _Verdict:
    if group.contiguous_tokens == 0:
        return _Verdict(Path.CASCADE, f"{reason}, but none of the prefix is contiguous")
    return _Verdict(Path.DENSE, reason)


def _cheapest(step: DecodeStep, group: PrefixGroup, cost: CostModel, kept: Path | None, hysteresis: float) -> _Verdict:
    candidates = [Path.STOCK, Path.CASCADE]
    if group.contiguous_tokens:
        candidates.append(Path.DENSE)
    us = {path: cost.group_us(step, group, path) for path in candidates}
    best = min(candidates, key=lambda path: (us[path], _STRENGTH[path]))
    # A path on hold (PAGED is never priced) has to be beaten by more than the hysteresis.
    chosen = kept if kept in us and us[kept] <= (1 + hysteresis) * us[best] else best
    reason = f"cheapest of {len(candidates)}: {us[chosen]:.1f} us against {us[Path.STOCK]:.1f} us by stock"
    return _Verdict(chosen, reason, us[Path.STOCK] - us[chosen])


def _margin(step: DecodeStep, limits: Limits, kept: Kept) -> float:
    """By what share a step's saving must exceed the fixed cost: more to begin sharing, less to go on with it."""
    before = [kept[group.node_id] for group in step.groups if group.node_id in kept]
    if not before:
        return 0.0
    return -limits.hysteresis if any(_STRENGTH[path] > 1 for path in before) else limits.hysteresis


def _if_it_pays(verdicts: list[_Verdict], cost: CostModel, margin: float) -> list[_Verdict]:
    """Sharing also costs once per step (launches, merge): without a saving above that, the whole step is stock."""
    saved_us = sum(verdict.saved_us for verdict in verdicts)
    fixed_us = max(cost.step_us(verdict.path) for verdict in verdicts)
    if saved_us > (1 + margin) * fixed_us:
        return verdicts
    return [_Verdict(Path.STOCK, f"sharing would save {saved_us:.1f} us and cost {fixed_us:.1f} us")] * len(verdicts)
