"""Chooses the path of a decode step from M_eff = realized batch x GQA group; pure, deterministic, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from prefixonce.step import Choice, DecodeStep, Mode, Path, PrefixGroup


@dataclass(frozen=True, slots=True)
class Limits:
    """When sharing is worth considering. The M_eff threshold is the seed's, fitted on an A100; refit per GPU."""

    dense_m_eff: int = 1024
    min_rows: int = 2
    min_prefix_tokens: int = 1


class CostModel(Protocol):
    """What `auto` asks, in microseconds of one layer: a group's own cost, and what a step pays once for sharing."""

    def group_us(self, step: DecodeStep, group: PrefixGroup, path: Path) -> float: ...

    def step_us(self, path: Path) -> float: ...


def choose(step: DecodeStep, mode: Mode, limits: Limits, cost: CostModel | None = None) -> Choice:
    """Returns the path of every group with its reason; the step's path is the strongest one used.

    Depends only on the step (replicated state), so every tensor-parallel rank decides alike. The rule
    `M_eff >= threshold -> dense, else cascade` is the seed paper's dispatcher.
    """
    if mode is Mode.STOCK:
        return _unshared(step, Path.STOCK, "stock was asked for")
    if mode is Mode.PAGED:
        return _unshared(step, Path.PAGED, "paged was asked for")
    if not step.groups:
        return _unshared(step, Path.STOCK, "no two running requests share a prefix")
    verdicts = [_choose_group(step, group, mode, limits, cost) for group in step.groups]
    if mode is Mode.AUTO and cost is not None:
        verdicts = _if_it_pays(step, verdicts, cost)
    paths = tuple(path for path, _ in verdicts)
    reasons = tuple(reason for _, reason in verdicts)
    strongest = max(range(len(paths)), key=lambda i: _STRENGTH[paths[i]])
    return Choice(paths[strongest], paths, reasons, reasons[strongest])


_STRENGTH = {Path.STOCK: 0, Path.PAGED: 1, Path.CASCADE: 2, Path.DENSE: 3}


def _unshared(step: DecodeStep, path: Path, reason: str) -> Choice:
    count = len(step.groups)
    return Choice(path, (path,) * count, (reason,) * count, reason)


def _choose_group(
    step: DecodeStep, group: PrefixGroup, mode: Mode, limits: Limits, cost: CostModel | None
) -> tuple[Path, str]:
    if group.prefix_tokens < limits.min_prefix_tokens:
        return Path.STOCK, f"prefix of {group.prefix_tokens} tokens is under {limits.min_prefix_tokens}"
    if len(group.rows) < limits.min_rows:
        return Path.STOCK, f"{len(group.rows)} request shares with nobody"
    m_eff = step.m_eff(group)
    if mode is Mode.CASCADE:
        return Path.CASCADE, "cascade was asked for"
    if mode is Mode.DENSE:
        return _dense_or_cascade(group, "dense was asked for")
    if mode is Mode.AUTO and cost is not None:
        return _cheapest(step, group, cost)
    if m_eff >= limits.dense_m_eff:
        return _dense_or_cascade(group, f"M_eff {m_eff} reaches {limits.dense_m_eff}")
    return Path.CASCADE, f"M_eff {m_eff} is under {limits.dense_m_eff}"


def _dense_or_cascade(group: PrefixGroup, reason: str) -> tuple[Path, str]:
    if group.contiguous_tokens == 0:
        return Path.CASCADE, f"{reason}, but none of the prefix is contiguous"
    return Path.DENSE, reason


def _cheapest(step: DecodeStep, group: PrefixGroup, cost: CostModel) -> tuple[Path, str]:
    candidates = [Path.STOCK, Path.CASCADE]
    if group.contiguous_tokens:
        candidates.append(Path.DENSE)
    priced = [(cost.group_us(step, group, path), path) for path in candidates]
    best_us, best = min(priced, key=lambda item: (item[0], _STRENGTH[item[1]]))
    return best, f"cheapest of {len(candidates)}: {best_us:.1f} us against {priced[0][0]:.1f} us by stock"


def _if_it_pays(step: DecodeStep, verdicts: list[tuple[Path, str]], cost: CostModel) -> list[tuple[Path, str]]:
    """Sharing also costs once per step (launches, merge): without a saving above that, the whole step is stock."""
    saved_us = sum(
        cost.group_us(step, group, Path.STOCK) - cost.group_us(step, group, path)
        for group, (path, _) in zip(step.groups, verdicts, strict=True)
    )
    fixed_us = max(cost.step_us(path) for path, _ in verdicts)
    if saved_us > fixed_us:
        return verdicts
    reason = f"sharing would save {saved_us:.1f} us and cost {fixed_us:.1f} us"
    return [(Path.STOCK, reason)] * len(verdicts)
