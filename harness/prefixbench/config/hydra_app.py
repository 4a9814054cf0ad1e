"""Runs a function as a Hydra application from inside a verb: its command line in, its errors out as exceptions."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from prefixbench.config import config_dir
from prefixbench.errors import BenchError, UsageError
from prefixbench.machine.signals import ending_as_interrupted


def parse(argv: Sequence[str]) -> Namespace:
    """Hydra's own command line; what cannot be read or names no folder is a UsageError."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # Hydra builds the parser, which would print and exit
    arguments = parser.parse_intermixed_args(list(argv))
    for option in ("config_path", "config_dir"):
        folder = getattr(arguments, option)
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(f"--{option.replace('_', '-')} {folder}: there is no such folder")
    return arguments


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message}; --help shows what is allowed")


def only_shows(arguments: Namespace) -> bool:
    """True for a command line that asks about the application instead of running it (--help, --cfg, ...)."""
    return bool(arguments.help or arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion)


def plain(composed: DictConfig) -> dict[str, object]:
    """The composed configuration as data for a record, interpolations resolved."""
    data = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def typed() -> tuple[str, ...]:
    """The overrides of the running job as they were typed."""
    return tuple(override for override in HydraConfig.get().overrides.task if not override.startswith("run_id="))


def launch(verb: str, config_name: str, task: Callable[[DictConfig], None], argv: Sequence[str]) -> int:
    """Hydra's own entry with this command line; 0, or the code of --help and the like."""
    if any(word.lstrip("+").startswith("hydra.job.chdir=") for word in argv):
        raise UsageError("hydra.job.chdir: records go to a folder relative to where you are, which must not change")
    refused: list[BenchError] = []

    @wraps(task)
    def kept_from_hydra(composed: DictConfig) -> None:
        try:
            task(composed)
        except BenchError as error:  # Hydra would put a line of its own before ours
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise
            refused.append(error)

    application = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(
        kept_from_hydra
    )
    argv_before, full_before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"prefixbench {verb}", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra prints an error and exits instead of raising it
    try:
        with ending_as_interrupted():
            application()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = argv_before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_before is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_before
    if refused:
        raise refused[0]
    return 0
