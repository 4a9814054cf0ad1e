"""`prefixbench outside`: SGLang's own serving benchmark against the servers we measure. Do both clients see the same?

Takes the configuration of `prefixbench run` as key=value. Both clients take turns on the same servers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from rich.console import Console

from prefixbench import store
from prefixbench.analysis.outside import TOLERANCE, Agreement, agreements, speed_ups
from prefixbench.analysis.stats import Interval
from prefixbench.case import OutsideCase
from prefixbench.config import checks as config_checks
from prefixbench.config import config_dir, hydra_app
from prefixbench.config.cases import sweep_cases
from prefixbench.config.overrides import one_line_errors, prepare
from prefixbench.config.run import register_schema
from prefixbench.engines import create
from prefixbench.engines.bench_serving import DATA_SETS, BenchServing
from prefixbench.errors import UsageError
from prefixbench.jobs import outside, sweep
from prefixbench.jobs.progress import describe
from prefixbench.machine.signals import ending_as_interrupted
from prefixbench.record import Record
from prefixbench.verbs.parser import Parser


def main(argv: Sequence[str]) -> int:
    """0 when every figure agrees or is undecided; 1 when some figure differs or some point failed."""
    options = _parser().parse_intermixed_args(list(argv))
    if not options.tolerance > 0:
        raise UsageError(f"--tolerance {options.tolerance:g}: a share above 0 is needed, such as {TOLERANCE}")
    console = Console(highlight=False, soft_wrap=True)
    job = _job(options, console)
    if options.plan_only:
        for line in plan_lines(job):
            console.print(line, markup=False)
        return 0
    with ending_as_interrupted():
        records = outside.run(job)
    return report(records, options.tolerance, console)


def report(records: Sequence[Record], tolerance: float, console: Console) -> int:
    """Both clients side by side, then the speed-up that each measured, then what failed; returns the exit code."""
    found = agreements(records, tolerance)
    for agreement in found:
        console.print(_agreement_line(agreement), markup=False)
    for gain in speed_ups(records):
        said = f"ours {_interval(gain.ours)}, SGLang's client {_interval(gain.theirs)}"
        console.print(f"{_name(gain.case)}: times stock without the plugin: {said}", markup=False)
    failed = [record for record in records if record.status != "ok"]
    for record in failed:
        console.print(f"failed: {record.record_id}: {record.failure.message if record.failure else ''}", markup=False)
    if any(agreement.verdict == "undecided" for agreement in found):
        console.print("undecided: the interval is wider than the tolerance; more pairs (measure.blocks) narrow it")
    return 1 if failed or any(agreement.verdict == "differ" for agreement in found) else 0


def plan_lines(job: outside.Job) -> list[str]:
    config = job.config
    cases = sweep_cases(config)
    launches = len(sweep.plan(cases, config.launches, {}, config.engine.side_by_side))
    head = f"{launches} launches, {config.measure.blocks} pairs of blocks each, data set {job.data_set}"
    return [head, *(f"  {describe(case)}" for case in cases)]


def _job(options: argparse.Namespace, console: Console) -> outside.Job:
    typed = list(options.overrides)
    preset = [] if any(word.startswith("sweep=") for word in typed) else ["sweep=outside"]
    register_schema()
    with one_line_errors(), initialize_config_dir(str(config_dir()), version_base="1.3"):
        run_id = f"run_id={store.new_run_id()}"
        composed = compose("config", overrides=[*preset, *prepare(typed, multirun=True), run_id])
    config = config_checks.load(composed)
    config_checks.check_destination(config.runs, config.tag)
    if not config.engine.tokenizer:
        raise UsageError("engine.tokenizer=false: SGLang's client reads text; use engine.tokenizer=true")
    if config.measure.watch != "always":
        raise UsageError(f"measure.watch={config.measure.watch}: here every block is watched; use `prefixbench run`")
    return outside.Job(
        config=config,
        data_set=options.data_set,
        resolved=hydra_app.plain(composed),
        overrides=(f"--data-set={options.data_set}", *preset, *typed),
        engine=create(config),
        new_client=BenchServing,
        say=lambda line: console.print(line, markup=False),
    )


def _agreement_line(found: Agreement) -> str:
    values = f"ours {found.ours:,.1f}, SGLang's client {found.theirs:,.1f}"
    return f"{found.verdict:<9}  {_name(found.case)}: {found.figure}: {values}, ratio {_interval(found.ratio)}"


def _interval(interval: Interval) -> str:
    if interval.estimate is None:
        return f"unknown ({interval.note})"
    if interval.low is None or interval.high is None:
        return f"{interval.estimate:.3f} (no interval)"
    return f"{interval.estimate:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _name(case: OutsideCase) -> str:
    return describe(case.serving)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prefixbench outside",
        description=__doc__,
        epilog="Exit codes: 0 the clients agree, or nothing shows that they differ; 1 they differ, or a point failed; "
        "2 bad option or configuration; 5 the engine cannot be used here.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `prefixbench run`; sweep=outside")
    parser.add_argument(
        "--data-set",
        choices=DATA_SETS,
        default=DATA_SETS[0],
        help="autobench: the very prompts of our client; generated-shared-prefix: SGLang's own text of these sizes",
    )
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"for `agree`; default: {TOLERANCE}")
    parser.add_argument("--plan-only", action="store_true", help="say what would be measured, and stop")
    return parser
