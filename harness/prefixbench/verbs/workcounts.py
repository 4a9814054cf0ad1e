"""`prefixbench workcounts`: counts the planned work of fixed decode steps; `--check` fails when it is not as accepted.

No clock is read, so the verdict is the same on a laptop, on a busy CI runner and beside a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from prefixbench.config import config_dir
from prefixbench.errors import UsageError
from prefixbench.measures.workcounts import MORE_IS_BETTER, NEITHER_IS_BETTER, Counts, count_all
from prefixbench.output import write_whole
from prefixbench.verbs.parser import Parser

_RENEW = "prefixbench workcounts -o conf/workcounts-baseline.json"


def main(argv: Sequence[str]) -> int:
    """0 when everything is as accepted, or nothing was to be checked; 1 when some count differs."""
    options = _parser().parse_args(list(argv))
    counts = count_all(yaml.safe_load((config_dir() / "workcounts.yaml").read_text()))
    if options.output is not None:
        write_whole(options.output, to_json(counts))
    if not options.check:
        if options.output is None:
            sys.stdout.write(to_json(counts))
        return 0
    differences = list(compare(read_baseline(options.baseline), counts))
    for line in differences:
        sys.stdout.write(f"{line}\n")
    metrics = sum(map(len, counts.values()))
    sys.stdout.write(f"{metrics} counts of {len(counts)} steps, {len(differences)} not as accepted\n")
    if differences:
        sys.stdout.write(f"where a change is wanted: {_RENEW}, and commit it with its reason\n")
    return 1 if differences else 0


def compare(accepted: Counts, counted: Counts) -> Iterator[str]:
    """One line for every count that is not the accepted one. An improvement is one too: until it is accepted, the
    count could grow back unseen."""
    for step in sorted(accepted.keys() | counted.keys()):
        if step not in counted or step not in accepted:
            yield f"{step}: {'no longer counted' if step in accepted else 'not in the baseline'}"
            continue
        before, now = accepted[step], counted[step]
        for metric in sorted(before.keys() | now.keys()):
            if metric not in now or metric not in before:
                yield f"{step}: {metric} is {'no longer counted' if metric in before else 'not in the baseline'}"
            elif before[metric] != now[metric]:
                change = _change(metric, before[metric], now[metric])
                yield f"{change}: {step}: {metric} was {before[metric]:,} and is {now[metric]:,}"


def _change(metric: str, before: int, now: int) -> str:
    if metric in NEITHER_IS_BETTER:
        return "changed"
    return "better" if (now > before) is (metric in MORE_IS_BETTER) else "worse"


def read_baseline(path: Path) -> Counts:
    try:
        read: Counts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} holds no accepted counts ({error}); write them with `{_RENEW}`") from None
    return read


def to_json(counts: Counts) -> str:
    return json.dumps(counts, indent=1) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="prefixbench workcounts", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the baseline; exit code 1 on a difference")
    parser.add_argument(
        "--baseline",
        type=Path,
        default=config_dir() / "workcounts-baseline.json",
        help="the accepted counts (default: conf/workcounts-baseline.json)",
    )
    parser.add_argument("-o", "--output", type=Path, help="write the counts to this file instead of the terminal")
    return parser
