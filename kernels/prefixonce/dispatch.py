"""Chooses the path of a decode step from M_eff = realized batch x GQA group; pure, deterministic, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from prefixonce.step import Choice, DecodeStep, Mode, Path, Piece, PrefixGroup


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


class _Verdict(NamedTuple):
    """`saved_us`: against stock, as far as the cost model was asked."""

    path: Path
    reason: str
    saved_us: float = 0.0


class _Asked(NamedTuple):
    """All that a verdict comes from, besides what a dispatcher is asked with in every step, and the verdict."""

    pieces: tuple[Piece, ...]
    rows: int
    was: Path | None
    verdict: _Verdict


def choose(
    step: DecodeStep,
    mode: Mode,
    limits: Limits,
    cost: CostModel | None = None,
    kept: Kept = _NOTHING_KEPT,
    asked: dict[int, _Asked] | None = None,
) -> Choice:
    """Returns the path of every group with its reason; the step's path is the strongest one used.

    Depends only on its arguments (replicated state), so every tensor-parallel rank decides alike. The rule
    `M_eff >= threshold -> dense, else cascade` is the seed paper's dispatcher. `kept` holds `auto` back from switching;
    `asked` are the groups of steps before, by node id, which saves asking again.
    """
    if mode is Mode.STOCK:
        return _unshared(step, Path.STOCK, "stock was asked for")
    if mode is Mode.PAGED:
        return _unshared(step, Path.PAGED, "paged was asked for")
    if not step.groups:
        return _unshared(step, Path.STOCK, "no two running requests share a prefix")
    asked = {} if asked is None else asked
    alike: dict[tuple[int, int, int, Path | None], _Verdict] = {}
    verdicts = []
    for group in step.groups:
        rows, was, known = len(group.rows), kept.get(group.node_id), asked.get(group.node_id)
        if known is None or known.pieces is not group.pieces or known.rows != rows or known.was is not was:
            key = (rows, group.prefix_tokens, group.contiguous_tokens, was)
            verdict = alike.get(key) or _choose_group(step, group, mode, limits, cost, was)
            known = asked[group.node_id] = _Asked(group.pieces, rows, was, verdict)
            alike[key] = verdict
        verdicts.append(known.verdict)
    if mode is Mode.AUTO and cost is not None:
        verdicts = _if_it_pays(verdicts, cost, _margin(step, limits, kept))
    paths = tuple(verdict.path for verdict in verdicts)
    reasons = tuple(verdict.reason for verdict in verdicts)
    strongest = next(path for path in _STRONGEST_FIRST if path in paths)
    return Choice(strongest, paths, reasons, reasons[paths.index(strongest)])


class Dispatcher:
    """`choose` from step to step: asked again only when groups, mode or cost model are other objects than before.

    One dispatcher serves one rank, whose head counts never change. What it remembers comes from the steps alone.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._asked: tuple[tuple[PrefixGroup, ...], Mode, CostModel | None] | None = None
        self._kept: Kept = _NOTHING_KEPT
        self._choice: Choice | None = None
        self._known: dict[int, _Asked] = {}

    def choose(self, step: DecodeStep, mode: Mode, cost: CostModel | None) -> Choice:
        asked = self._asked
        if self._choice is not None and asked is not None:
            if step.groups is asked[0] and mode is asked[1] and cost is asked[2]:
                return self._choice
            if mode is not asked[1] or cost is not asked[2]:
                self._kept, self._known = _NOTHING_KEPT, {}
        self._asked = (step.groups, mode, cost)
        self._choice = choose(step, mode, self.limits, cost, self._kept, self._known)
        if len(self._known) > 2 * len(step.groups):  # of those that are no more
            self._known = {group.node_id: self._known[group.node_id] for group in step.groups}
        self._kept = {group.node_id: path for group, path in zip(step.groups, self._choice.paths, strict=True)}
        return self._choice


_STRENGTH = {Path.STOCK: 0, Path.PAGED: 1, Path.CASCADE: 2, Path.DENSE: 3}
_STRONGEST_FIRST = sorted(_STRENGTH, key=_STRENGTH.__getitem__, reverse=True)


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
