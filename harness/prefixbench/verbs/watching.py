"""`prefixbench watching`: what telemetry costs in tokens per second, from launches that watched half their blocks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from prefixbench.analysis.comparable import case_label
from prefixbench.analysis.frame import device_name
from prefixbench.analysis.watching import BOUND, WatchingCost, watching_costs
from prefixbench.errors import UsageError
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, add_selector, select


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 when telemetry costs more than it may; with --strict 1 unless it costs less beyond doubt."""
    options = _parser().parse_args(argv)
    found = watching_costs(select(options.selector, options.runs))
    if not found:
        raise UsageError(
            "no record has blocks with telemetry beside blocks without; run `prefixbench run sweep=watching`, or any "
            "sweep with measure.watch=half measure.blocks=24"
        )
    console = Console(highlight=False, soft_wrap=True)
    for cost in found:
        for line in _lines(cost):
            console.print(line, markup=False)
    console.print("replicates are pairs of neighbouring blocks: an interval speaks for its launch, not for others")
    verdicts = {cost.verdict for cost in found}
    if "undecided" in verdicts:
        console.print(f"undecided: the interval reaches {1 - BOUND}; more blocks (measure.blocks) narrow it")
    return 1 if "over" in verdicts or (options.strict and verdicts != {"under"}) else 0


def _lines(cost: WatchingCost) -> tuple[str, ...]:
    measured, record = cost.ratio, cost.record
    if cost.watched_tok_s is None or cost.unwatched_tok_s is None or cost.samples_per_s is None:
        said = f"no pair of blocks can be compared, {cost.pairs_left_out} left out"
    else:
        said = f"{cost.watched_tok_s:,.1f} tok/s at {cost.samples_per_s:.1f} samples per second"
        said += f", {cost.unwatched_tok_s:,.1f} without; {measured.n} pairs of blocks"
        said += f", {cost.pairs_left_out} left out" if cost.pairs_left_out else ""
    verdict = "undecided" if cost.verdict == "undecided" else f"cost {cost.verdict} {BOUND:.1%}"
    where = f"{device_name(record.environment)}, {', '.join(record.labels) or 'no labels'}"
    return (
        f"{verdict}: watched over not watched {_interval(cost)}",
        f"  {case_label(record)}, launch {record.launch.launch_id}",
        f"  {where}",
        f"  {said}",
    )


def _interval(cost: WatchingCost) -> str:
    measured = cost.ratio
    if measured.estimate is None:
        return f"unknown ({measured.note})"
    if measured.low is None or measured.high is None:
        return f"{measured.estimate:.4f} ({measured.note})"
    return f"{measured.estimate:.4f} (95% interval {measured.low:.4f} to {measured.high:.4f})"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prefixbench watching",
        description="Sets the blocks of a launch that had telemetry against their neighbours that had none.",
        epilog=f"exit codes: 0 no cost above {BOUND:.1%} was shown; 1 one was, or --strict and it is not shown that "
        "every cost is below; 2 bad option or selector, or no such record",
    )
    add_selector(parser)
    parser.add_argument("--strict", action="store_true", help=f"exit 1 unless every cost is under {BOUND:.1%}")
    add_runs(parser)
    return parser
