"""`prefixbench regret`: what the dispatcher's choices cost beside the fastest path of every cell that was timed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from prefixbench.analysis.dispatcher.regret import Regret, regret, rules
from prefixbench.analysis.dispatcher.timed_cells import timed_grid
from prefixbench.errors import UsageError
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, add_selector, select
from prefixonce.cost import load_profile, profile_for

_LINE = "  {:<42} {:>9} {:>9} {:>9} {:>9} {:>10}"


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 when `auto` takes more than --at-most longer in sum than the best possible choices."""
    options = _parser().parse_args(argv)
    if options.at_most is not None and not options.at_most >= 0:
        raise UsageError(f"--at-most {options.at_most:g}: a share from 0 is needed, such as 0.02")
    grid = timed_grid(select(options.selector, options.runs))
    if not grid.complete:
        raise UsageError("no cell was timed with stock, cascade and dense; run `prefixbench kernels kernels=regret`")
    profile = load_profile(options.profile) if options.profile else profile_for(grid.device)
    found = [regret(name, rule, grid.complete) for name, rule in rules(profile).items()]
    auto = found[0]
    console = Console()
    for line in (
        f"{grid.device}, {auto.cells} cells, L2 {grid.l2}, stock is {grid.stock}; profile: {profile.source}",
        _LINE.format("extra time over the fastest path", "in sum", "mean", "worst", "fastest", "of gain"),
        *(_row(one) for one in found),
        *(f"  worst of {one.rule.partition(':')[0]}: {one.worst_cell}" for one in found[:2]),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if options.at_most is not None and auto.extra > options.at_most else 0


def _row(one: Regret) -> str:
    share = "-" if one.gain_share is None else f"{one.gain_share:.1%}"
    figures = (f"{one.extra:.2%}", f"{one.mean:.2%}", f"{one.worst:.1%}", f"{one.fastest}/{one.cells}")
    return _LINE.format(one.rule, *figures, share)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prefixbench regret",
        description="Lets each rule choose for every cell and adds up the times that were measured for its choices.",
    )
    add_selector(parser)
    parser.add_argument("--profile", type=Path, help="cost profile of `auto`; default: the one shipped for the device")
    parser.add_argument("--at-most", type=float, metavar="SHARE", help="fail when `auto` is above it, such as 0.02")
    add_runs(parser)
    return parser
