"""`prefixbench reproduce`: measures what this machine can say about the claims, then builds the report.

The plan comes from conf/reproduce.yaml and the GPUs that are here. Started again, on the same kind of machine and with
its records, it measures only what is missing; the report is built from all of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from prefixbench import cli, store
from prefixbench.config import config_dir
from prefixbench.config.overrides import quoted
from prefixbench.errors import BenchError, UsageError
from prefixbench.jobs import resume
from prefixbench.machine import environment
from prefixbench.verbs.parser import Parser

_BUDGET = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?$")


@dataclass(frozen=True)
class Step:
    """One verb with its arguments; `checks` are the claims that its records speak about.

    `runs` is how the verb is told where records go. A verb that `resumes` is always called; any other only while its
    records are not complete.
    """

    name: str
    what: str
    verb: str
    arguments: tuple[str, ...]
    minutes: float
    checks: tuple[str, ...]
    runs: str = "runs"
    resumes: bool = False

    @property
    def tag(self) -> str:
        return f"reproduce-{self.name}"

    def words(self, runs: Path, output: Path) -> list[str]:
        given = [argument.replace("{output}", str(output)) for argument in self.arguments]
        where = str(runs) if self.runs.startswith("-") else quoted(str(runs))
        return [*given, f"tag={self.tag}", f"{self.runs}={where}"]


@dataclass(frozen=True)
class Cut:
    """A way to shorten the plan. `arguments` None leaves the whole step out."""

    step: str
    drops: str
    arguments: tuple[str, ...] | None
    saves: float


@dataclass(frozen=True)
class Plan:
    """`dropped` says in words what a budget left out."""

    preset: str
    gpus: int
    steps: Mapping[str, Step]
    cuts: tuple[Cut, ...]
    dropped: tuple[str, ...] = ()

    @property
    def minutes(self) -> float:
        return sum(step.minutes for step in self.steps.values())


def main(argv: Sequence[str]) -> int:
    """Returns 0 when every point was measured and the report is built, else the worst code of the steps."""
    options = _parser().parse_args(argv)
    data = yaml.safe_load((config_dir() / "reproduce.yaml").read_text())
    here = len(environment.gpus())
    plan = fit(read_plan(data, options.preset or pick(data, here)), parse_budget(options.budget))
    console = Console(highlight=False, soft_wrap=True)
    for line in describe(plan, data["needs"], here):
        console.print(line, markup=False)
    if options.plan_only:
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    codes, runs = [], []
    for step in plan.steps.values():
        console.print(f"\n{step.what}", style="bold")
        run = None if step.resumes else complete_run(step.tag, options.runs)
        if run is not None:
            console.print(f"recorded already, by {run}")
        else:
            codes.append(_run(step, options.runs, options.output))
            run = store.latest_run(options.runs)
        if run is not None:
            runs.append(run)
    if runs:
        selector = [*dict.fromkeys(runs), "--runs", str(options.runs)]
        codes.append(cli.function("report")([*selector, "-o", str(options.output)]))
        console.print("")
        cli.function("scorecard")(selector)
        console.print(f"report: {(options.output / 'index.html').resolve()}")
    return max(codes, default=0)


def complete_run(tag: str, root: Path) -> str | None:
    """The newest run with this tag if it reached every case it had planned, on such a machine and with this code.

    A case that failed counts as reached: a peer that cannot run here would fail again.
    """
    tagged = [(record, record.notes) for record in store.read_tree(root).records if record.notes]
    made = [(record, notes) for record, notes in tagged if notes.get("tag") == tag]
    newest = max((str(notes["sweep"]) for _, notes in made), default=None)
    if newest is None:
        return None
    here, source = environment.observe(), environment.plugin_digest()
    now = resume.conditions(here, source)
    of_newest = [(record, notes) for record, notes in made if notes["sweep"] == newest]
    if any(resume.conditions(r.environment, notes.get("plugin_source", source)) != now for r, notes in of_newest):
        return None
    reached = {record.case_hash for record, _ in of_newest if record.failure is None or record.failure.kind != "budget"}
    planned = {case for plan in store.plans(root, newest) for case in plan.cases}
    return newest if planned and planned <= reached else None


def pick(data: Mapping[str, Any], gpus: int) -> str:
    """The preset that uses most of these GPUs."""
    fitting: dict[str, int] = {name: p["gpus"] for name, p in data["presets"].items() if p["gpus"] <= gpus}
    return max(fitting, key=lambda name: fitting[name])


def read_plan(data: Mapping[str, Any], preset: str) -> Plan:
    chosen = data["presets"][preset]
    steps = {
        name: Step(
            name,
            s["what"],
            s["verb"],
            tuple(s["arguments"]),
            float(s["minutes"]),
            tuple(s["checks"]),
            s.get("runs", "runs"),
            s.get("resumes", False),
        )
        for name, s in chosen["steps"].items()
    }
    cuts = tuple(
        Cut(c["step"], c["drops"], None if c["arguments"] is None else tuple(c["arguments"]), float(c["saves"]))
        for c in _flat(chosen["cuts"])
    )
    return Plan(preset, int(chosen["gpus"]), steps, cuts)


def _flat(cuts: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """A preset takes over another's cuts as a list inside its own."""
    for cut in cuts:
        if isinstance(cut, list):
            yield from _flat(cut)
        else:
            yield cut


def fit(plan: Plan, budget_minutes: float | None) -> Plan:
    """Cuts the plan, least informative first, until it fits; UsageError when even the shortest does not."""
    fitted = plan
    for cut in plan.cuts:
        if budget_minutes is None or fitted.minutes <= budget_minutes:
            return fitted
        steps = dict(fitted.steps)
        if cut.arguments is None:
            del steps[cut.step]
        else:
            old = steps[cut.step]
            steps[cut.step] = replace(
                old, arguments=(*old.arguments, *cut.arguments), minutes=max(0.0, old.minutes - cut.saves)
            )
        fitted = replace(fitted, steps=steps, dropped=(*fitted.dropped, cut.drops))
    if budget_minutes is not None and fitted.minutes > budget_minutes:
        raise UsageError(
            f"--budget {budget_minutes:g}m is too short: the shortest plan of {plan.preset} takes {fitted.minutes:g}m"
        )
    return fitted


def parse_budget(text: str | None) -> float | None:
    """ "1h30m" or "25m" in minutes."""
    if text is None:
        return None
    found = _BUDGET.match(text)
    if not text or found is None:
        raise UsageError(f"--budget {text!r} cannot be read; allowed: 25m, 2h, 1h30m")
    return 60.0 * int(found[1] or 0) + int(found[2] or 0)


def describe(plan: Plan, needs: Mapping[str, int], gpus: int) -> list[str]:
    """What will run, how long, and which claims nothing here can be said about, with the reason."""
    lines = [f"{gpus} GPUs here: plan {plan.preset}, about {plan.minutes:g} minutes where nothing is recorded yet"]
    lines += [f"  {step.minutes:>4g} min  {step.what}" for step in plan.steps.values()]
    lines += [f"  left out by --budget: {dropped}" for dropped in plan.dropped]
    checked = {claim for step in plan.steps.values() for claim in step.checks}
    lines.append(f"Claims this speaks about: {', '.join(claim for claim in needs if claim in checked)}")
    by_reason: dict[str, list[str]] = {}
    for claim, needed in needs.items():
        if claim not in checked:
            by_reason.setdefault(_why_not(plan, needed, gpus), []).append(claim)
    lines += [f"Not checked here: {', '.join(claims)} ({reason})" for reason, claims in by_reason.items()]
    return lines


def _why_not(plan: Plan, needed: int, gpus: int) -> str:
    if needed > gpus:
        return f"needs {needed} GPU{'s' * (needed > 1)}, this machine has {gpus}"
    return "left out by --budget" if plan.dropped else f"the plan {plan.preset} does not measure it"


def _run(step: Step, runs: Path, output: Path) -> int:
    try:
        return cli.function(step.verb)(step.words(runs, output))
    except BenchError as error:  # the other steps and the report still say what they can
        sys.stderr.write(f"prefixbench {step.verb}: {error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="prefixbench reproduce", description=__doc__)
    parser.add_argument("--preset", choices=["cpu", "one-gpu", "two-gpu", "four-gpu"], help="instead of what fits here")
    parser.add_argument("--budget", metavar="25m", help="shorten the plan to this time, least informative parts first")
    parser.add_argument("--plan-only", action="store_true", help="say what would run, and stop")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the records; default: runs")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/latest"), help="folder of the report")
    return parser
