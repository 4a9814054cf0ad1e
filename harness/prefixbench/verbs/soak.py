"""`prefixbench soak`: a Hydra application that drives a server with everything at once and looks for any fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from prefixbench.config import hydra_app
from prefixbench.config import soak as soak_config
from prefixbench.config.overrides import compositions, one_line_errors
from prefixbench.errors import UsageError
from prefixbench.jobs import soak
from prefixbench.output import write_whole
from prefixbench.store import SWEEPS, new_run_id

_SUMMARY = "soak.json"


def main(argv: Sequence[str]) -> int:
    """0 when the soak met no fault, else 1."""
    soak_config.register_schema()
    arguments = hydra_app.parse(argv)
    with one_line_errors():
        if hydra_app.only_shows(arguments):
            return hydra_app.launch("soak", "soak", task, argv)
        if arguments.multirun:
            raise UsageError("a soak is one run; leave -m out")
        config = soak_config.load(compositions("soak", arguments, arguments.overrides)[0])
        run_id = new_run_id()
        code = hydra_app.launch("soak", "soak", task, [*argv, f"run_id={run_id}"])
        summary = json.loads((_folder(config.runs, run_id) / _SUMMARY).read_text())
        return code or (1 if summary["faults"] else 0)


def task(composed: DictConfig) -> None:
    """One Hydra job: the soak, its faults line by line, one line that sums it up, and the same as JSON."""
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    config = soak_config.load(composed)
    folder = _folder(config.runs, config.run_id)
    folder.mkdir(parents=True, exist_ok=True)
    summary = soak.run(config, folder, say)
    write_whole(folder / _SUMMARY, json.dumps(summary.to_json(), indent=1, allow_nan=False) + "\n")
    for fault in summary.faults:
        say(f"fault: {fault}")
    say(summary.line())
    say(f"as JSON: {folder / _SUMMARY}")


def _folder(runs: str, run_id: str) -> Path:
    """Below the runs folder whatever Hydra's own output folder is set to."""
    return Path(runs, SWEEPS, run_id)
