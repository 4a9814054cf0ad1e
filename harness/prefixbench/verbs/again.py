"""`prefixbench again SELECTOR`: measures the cases of served records once more, as a candidate beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from prefixbench import store
from prefixbench.config.checks import check_destination
from prefixbench.config.recorded import configurations
from prefixbench.errors import UsageError
from prefixbench.jobs import serving
from prefixbench.jobs.progress import Progress
from prefixbench.machine.signals import ending_as_interrupted
from prefixbench.verbs.parser import Parser
from prefixbench.verbs.record_arguments import add_runs, add_selector, select
from prefixbench.verbs.run import summarize


def main(argv: Sequence[str]) -> int:
    """Returns 0 when every point was measured, 1 when some failed; all of those are listed."""
    options = parser().parse_args(argv)
    found = configurations(select(options.selector, options.runs))
    if not found:
        raise UsageError(f"{' '.join(options.selector)!r} holds no record of `prefixbench run`; widen the selector")
    check_destination(str(options.runs), options.tag)
    run_id = store.new_run_id()
    typed = ("again", *argv)
    console = Console()
    asked = []
    for number, (recorded, cases) in enumerate(found):
        of_this_run = {"launches": options.launches, "resume": False, "tag": options.tag, "typed": list(typed)}
        config = replace(recorded, runs=str(options.runs), run_id=run_id, **of_this_run)
        asked.append((config, cases))
        job = serving.Job(
            config=config,
            cases=cases,
            resolved=asdict(config),
            config_yaml=OmegaConf.to_yaml(OmegaConf.structured(config)),
            overrides=typed,
            folder=Path(options.runs) / store.SWEEPS / run_id / str(number),
        )
        with ending_as_interrupted():
            serving.run(job, Progress(console))
    return summarize(asked, run_id, console)


def parser() -> argparse.ArgumentParser:
    options = Parser(
        prog="prefixbench again",
        description="Measure the cases of these records once more, from the configurations that the records keep; "
        "presets and defaults of today play no part. Nothing that is recorded already is counted.",
    )
    add_selector(options)
    add_runs(options)
    options.add_argument("--launches", type=_at_least_one, default=3, help="server starts; default: 3")
    options.add_argument("--tag", help="a name for the new records; selectors know it")
    return options


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value
