"""Runs a function as a Hydra application from inside a verb: its command line in, its errors out as exceptions."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

import hydra
from omegaconf import DictConfig

from prefixbench.config import config_dir


def only_shows(arguments: Namespace) -> bool:
    """True for a command line that asks about the application instead of running it (--help, --cfg, ...)."""
    return bool(arguments.help or arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion)


def launch(verb: str, config_name: str, task: Callable[[DictConfig], None], argv: Sequence[str]) -> int:
    """Hydra's own entry with this command line; 0, or the code of --help and the like."""
    application = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(task)
    argv_before, full_before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"prefixbench {verb}", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra prints an error and exits instead of raising it
    try:
        application()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = argv_before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_before is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_before
    return 0
