"""`prefixbench run`: a Hydra application that measures many points of a sweep on one server.

Hydra's multirun makes one job of every point, and a job that starts its own server would spend its time starting. So
before Hydra sees the command, sweeps over what one server can measure side by side (sizes, concurrency, path) are
folded into lists: `prefix_len=512,2048 -m` becomes `prefix_len=[512,2048]`, one job. Every other axis stays a Hydra
sweep with one job per value, that is one job per server group. Nothing of Hydra is replaced: --cfg, --help, --info,
--multirun, sweeper and launcher plugins work as ever, and `hydra/launcher=submitit_slurm` or `ray` places one server
group per node. Whatever runs the jobs, the exit code comes from the records they left in `runs/`.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from prefixbench import store
from prefixbench.case import ServingCase, case_hash
from prefixbench.config import checks as config_checks
from prefixbench.config import hydra_app
from prefixbench.config.cases import sweep_cases
from prefixbench.config.overrides import compositions, one_line_errors, prepare, quoted
from prefixbench.config.run import RunConfig, register_schema
from prefixbench.errors import BenchError
from prefixbench.jobs import serving as runner
from prefixbench.jobs import sweep
from prefixbench.jobs.launch import build_workload
from prefixbench.jobs.progress import Progress, describe
from prefixbench.machine.signals import ending_as_interrupted
from prefixbench.record import Record

Asked = tuple[RunConfig, tuple[ServingCase, ...]]
"""A job's configuration and the cases that are wanted of it."""
_REFUSED_FILE = "refused.json"


def main(argv: Sequence[str]) -> int:
    """Runs the sweep; 0 when every point is recorded as ok, 1 when some point failed."""
    register_schema()
    arguments = hydra_app.parse(argv)
    with one_line_errors():
        typed = list(arguments.overrides)
        prepared = prepare(typed, arguments.multirun)
        options = [option for option in argv if option not in typed]
        if hydra_app.only_shows(arguments):
            return hydra_app.launch("run", "config", task, [*options, *prepared])
        run_id = store.new_run_id()  # after what was typed, so that no two runs share an id
        added = [f"run_id={run_id}", f"typed=[{','.join(map(quoted, typed))}]"]
        configs = _check(arguments, [*prepared, *added])
        hydra_app.launch("run", "config", task, [*options, *prepared, *added])
    asked = [(config, sweep_cases(config)) for config in configs]
    return _refusal(asked, run_id) or summarize(asked, run_id, Console())


def task(composed: DictConfig) -> None:
    """One Hydra job; runs where the launcher puts it. A job that cannot run at all leaves its reason in its folder: an
    exception would reach only launchers of this process, and Hydra would print it its own way."""
    config = config_checks.load(composed)
    job = runner.Job(
        config=config,
        cases=sweep_cases(config),
        resolved=hydra_app.plain(composed),
        config_yaml=OmegaConf.to_yaml(composed, resolve=True),
        overrides=tuple(config.typed or HydraConfig.get().overrides.task),
        folder=_job_folder(config),
    )
    try:
        with ending_as_interrupted():
            runner.run(job, Progress(Console()))
    except BenchError as error:
        reason = {"message": str(error), "exit_code": error.exit_code}
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / _REFUSED_FILE).write_text(json.dumps(reason) + "\n")


def _job_folder(config: RunConfig) -> Path:
    """Below the runs folder whatever Hydra's own output folder is set to: the plan must lie beside the records."""
    folder = Path(config.runs, store.SWEEPS, config.run_id)
    hydra_config = HydraConfig.get()
    return folder / str(hydra_config.job.num) if hydra_config.mode is RunMode.MULTIRUN else folder


def summarize(asked: Sequence[Asked], run_id: str, console: Console) -> int:
    """Lists every point of this run that is not recorded as ok; 0 when there is none, else 1."""
    failed: list[str] = []
    points = untagged = 0
    tags = {config.tag for config, _ in asked if config.tag is not None}
    for root in dict.fromkeys(Path(config.runs) for config, _ in asked):
        recorded = store.of_run(root, run_id)
        points += len(recorded)
        untagged += sum(bool(tags) and (record.notes or {}).get("tag") not in tags for record in recorded)
        failed += [_failed_line(record) for record in recorded if record.status != "ok"]
        ok = Counter(record.case_hash for record in recorded if record.status == "ok")
        seen = {record.case_hash for record in recorded if record.status != "ok"}
        for config, cases in ((config, cases) for config, cases in asked if Path(config.runs) == root):
            for case in cases:
                missing = config.launches - ok[case_hash(case)]
                if missing > 0 and case_hash(case) not in seen:
                    failed.append(f"{describe(case)}: {missing} of {config.launches} launches were not measured")
    where = ", ".join(dict.fromkeys(config.runs for config, _ in asked))
    console.print(f"{points} points recorded, {len(failed)} failed; records in {where}", highlight=False, markup=False)
    if untagged:
        console.print(f"{untagged} of them were there before, under no such tag; resume=false measures them again")
    for line in failed:
        console.print(f"  failed: {line}", highlight=False, markup=False, soft_wrap=True)
    return 1 if failed else 0


def _refusal(asked: Sequence[Asked], run_id: str) -> int:
    """Prints why jobs could not run at all, each reason once; the exit code of the last, 0 when all could."""
    roots = {Path(config.runs) for config, _ in asked}
    files = [path for root in roots for path in (root / store.SWEEPS / run_id).rglob(_REFUSED_FILE)]
    reasons = {reason["message"]: int(reason["exit_code"]) for reason in (json.loads(f.read_text()) for f in files)}
    for message in reasons:
        sys.stderr.write(f"prefixbench: {message}\n")
    if len(files) < len(asked):  # the other jobs did run: their points are listed too
        return 0 if not files else max(summarize(asked, run_id, Console()), *reasons.values())
    return max(reasons.values())


def _check(arguments: Namespace, overrides: Sequence[str]) -> list[RunConfig]:
    """Composes and checks every job before the first server starts: a typo in the last one must not cost an hour."""
    return [_checked(composed) for composed in compositions("config", arguments, overrides)]


def _checked(composed: DictConfig) -> RunConfig:
    config = config_checks.load(composed)
    config_checks.check_destination(config.runs, config.tag)
    for cell in sweep.by_size(sweep_cases(config)):
        build_workload(config, cell[0])
    return config


def _failed_line(record: Record) -> str:
    assert isinstance(record.case, ServingCase)
    reason = record.failure.message if record.failure else ""
    return f"{describe(record.case)}: {record.status}: {reason} ({record.record_id})"
