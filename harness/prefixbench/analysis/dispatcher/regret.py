"""Regret of dispatch rules: how much longer their choices take than the fastest path of every cell that was timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefixbench.analysis.dispatcher.timed_cells import TimedCell
from prefixonce.cost import Profile
from prefixonce.dispatch import Limits, choose
from prefixonce.step import Mode, Path

Rule = Callable[[TimedCell], Path]


@dataclass(frozen=True)
class Regret:
    """One rule over a grid: what its choices take beyond the fastest path, as shares of that: `extra` of the sum over
    all cells, `mean` over the cells, `worst` at one. `gain_share` is the part kept of what the best possible choices
    save over always stock; None where they save nothing."""

    rule: str
    extra: float
    mean: float
    worst: float
    worst_cell: str
    gain_share: float | None
    fastest: int
    cells: int


def rules(profile: Profile) -> dict[str, Rule]:
    """`auto` with this profile, and what it is held against. The rules are the dispatcher's own code."""
    limits = Limits()
    return {
        "auto": lambda cell: choose(cell.step(), Mode.AUTO, limits, profile).path,
        f"full: dense from M_eff {limits.dense_m_eff}, else cascade": (
            lambda cell: choose(cell.step(), Mode.FULL, limits).path
        ),
        "always dense": lambda _: Path.DENSE,
        "always cascade": lambda _: Path.CASCADE,
        "always stock": lambda _: Path.STOCK,
    }


def regret(name: str, rule: Rule, cells: Sequence[TimedCell]) -> Regret:
    """Over cells that are all complete; there must be at least one."""
    chosen = [cell.us[rule(cell)] for cell in cells]
    best = [min(cell.us.values()) for cell in cells]
    extra = [us / least - 1 for us, least in zip(chosen, best, strict=True)]
    worst = max(range(len(cells)), key=lambda i: extra[i])
    stock = sum(cell.us[Path.STOCK] for cell in cells)
    saved = stock - sum(best)
    return Regret(
        name,
        sum(chosen) / sum(best) - 1,
        sum(extra) / len(cells),
        extra[worst],
        cells[worst].label,
        (stock - sum(chosen)) / saved if saved > 0 else None,
        sum(value == 0 for value in extra),
        len(cells),
    )
