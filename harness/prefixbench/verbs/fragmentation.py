"""`prefixbench fragmentation`: how much of the shared prefixes stays contiguous under hours of simulated churn."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prefixbench.errors import UsageError
from prefixbench.machine import environment
from prefixbench.measures.fragmentation import Fragmentation, Machine, simulate
from prefixbench.measures.traffic import Traffic
from prefixbench.output import write_whole
from prefixbench.verbs.parser import Parser

_SAMPLE_S = 10.0
_ROWS = 12
_TARGET = 0.95


def main(argv: Sequence[str]) -> int:
    """0 when the share over the whole time reaches the target, else 1."""
    options = _parser().parse_args(list(argv))
    is_finite = math.isfinite(options.hours) and math.isfinite(options.arrivals_per_s)
    if not is_finite or min(options.hours, options.arrivals_per_s, options.pool_tokens, options.page_size) <= 0:
        raise UsageError("hours, arrivals per second, pool and page size must be above 0, and finite")
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: must be 0 or more")
    machine = Machine(pool_tokens=options.pool_tokens, page_size=options.page_size)
    traffic = Traffic(arrivals_per_s=options.arrivals_per_s)
    here = environment.observe()
    found = simulate(traffic, machine, seconds=3600 * options.hours, sample_s=_SAMPLE_S, seed=options.seed)
    share = found.contiguous_share()
    if options.output is not None:
        data = {"traffic": asdict(traffic), "machine": asdict(machine), "seed": options.seed}
        data["environment"] = asdict(here)
        data |= {"contiguous_share": share, **asdict(found), "samples": [s._asdict() for s in found.samples]}
        write_whole(options.output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(_table(found))
    for reason, count in sorted(found.nodes_placed.items()):
        console.print(f"  {count:>8} nodes {reason}")
    if share is None:
        raise UsageError("nothing was shared in this time; more hours or more arrivals are needed")
    verdict = "reaches" if share >= _TARGET else "misses"
    console.print(
        f"{share:.1%} of the shared prefix tokens were contiguous over {options.hours:g} h simulated "
        f"({found.finished} requests, {found.retracted} retractions, hit rate {found.hit_rate:.0%}); "
        f"that {verdict} {_TARGET:.0%}",
        soft_wrap=True,
    )
    return 0 if share >= _TARGET else 1


def _table(found: Fragmentation) -> Table:
    table = Table("minute", "running", "shared tokens", "contiguous", "free", "cached tokens")
    per_row = -(-len(found.samples) // _ROWS)
    for at in range(0, len(found.samples), per_row):
        part = found.samples[at : at + per_row]
        shared = sum(sample.shared_tokens for sample in part)
        contiguous = sum(sample.contiguous_tokens for sample in part)
        means = [sum(values) / len(part) for values in zip(*part, strict=True)]
        table.add_row(
            f"{part[-1].at_s / 60:.0f}",
            f"{means[3]:.0f}",
            f"{shared / len(part):,.0f}",
            f"{contiguous / shared:.1%}" if shared else "-",
            f"{means[4]:,.0f}",
            f"{means[5]:,.0f}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prefixbench fragmentation",
        description="Drives SGLang's radix tree, allocators and eviction under our placement with a stream of requests "
        "in simulated time: prefixes with log-normal lengths that come into fashion and go, unique suffixes, a full "
        "pool. No model runs. Exit code 1 when less than 95%% of the shared prefix tokens were contiguous.",
    )
    parser.add_argument("--hours", type=float, default=1.0, help="simulated time (default 1)")
    parser.add_argument("--arrivals-per-s", type=float, default=8.0, help="mean rate of requests (default 8)")
    parser.add_argument("--pool-tokens", type=int, default=262144, help="size of the KV pool (default 262144)")
    parser.add_argument("--page-size", type=int, default=1, help="tokens per page (default 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="write samples and totals as JSON")
    return parser
