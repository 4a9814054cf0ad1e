"""What the verbs share that measure as Hydra applications: check every job, run them, sum up what they recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from prefixbench import store
from prefixbench.config import hydra_app
from prefixbench.config.overrides import compositions, one_line_errors
from prefixbench.record import Record


def measure(
    verb: str,
    argv: Sequence[str],
    task: Callable[[DictConfig], None],
    runs_of: Callable[[DictConfig], str],
    summarize: Callable[[Sequence[Record], Console], int],
) -> int:
    """Runs `task` for every job of this command line of `conf/{verb}.yaml`; returns the exit code. `runs_of` checks a
    composed job before the first one starts, and says where its records go."""
    arguments = hydra_app.parse(argv)
    with one_line_errors():
        if hydra_app.only_shows(arguments):
            return hydra_app.launch(verb, verb, task, argv)
        roots = {runs_of(composed) for composed in compositions(verb, arguments, arguments.overrides)}
        run_id = store.new_run_id()
        code = hydra_app.launch(verb, verb, task, [*argv, f"run_id={run_id}"])
        return code or summarize([r for root in sorted(roots) for r in store.of_run(Path(root), run_id)], Console())
