"""`prefixbench VERB ...`: imports the verb only when it is asked for, turns errors into one line and an exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from prefixbench.errors import BenchError, StoreError, UsageError
from prefixbench.hints import unknown

_VERBS = {
    "run": ("prefixbench.verbs.run:main", "measure points of a sweep; records go to runs/"),
    "again": ("prefixbench.verbs.again:main", "measure the cases of recorded points once more"),
    "reproduce": (
        "prefixbench.verbs.reproduce:main",
        "measure what this machine can check of the claims, build the report",
    ),
    "report": ("prefixbench.verbs.report:main", "build one HTML file from records"),
    "show": ("prefixbench.verbs.records:show", "print records"),
    "compare": ("prefixbench.verbs.records:compare", "compare two selections of records"),
    "export": ("prefixbench.verbs.records:export", "write records as a table"),
    "scorecard": ("prefixbench.verbs.scorecard:main", "judge the claims from records"),
    "watching": ("prefixbench.verbs.watching:main", "say what telemetry cost in tokens per second"),
    "gate": ("prefixbench.verbs.gate:main", "judge whether a change made something slower"),
    "predict": ("prefixbench.verbs.predict:main", "predict a speed-up from measured shares"),
    "kernels": ("prefixbench.verbs.kernels:main", "time kernels beside their peers"),
    "outside": ("prefixbench.verbs.outside:main", "drive the same server with SGLang's own client, and compare"),
    "workcounts": ("prefixbench.verbs.workcounts:main", "count the planned work of fixed steps; no clock, any machine"),
    "numerics": (
        "prefixbench.verbs.numerics:main",
        "compare the paths' log-probabilities with stock's own noise",
    ),
    "dispatch": ("prefixbench.verbs.dispatch:main", "time what the host decides and plans for a decode step"),
    "calibrate": ("prefixbench.verbs.calibrate:main", "fit the dispatcher's cost model to this device"),
    "regret": ("prefixbench.verbs.regret:main", "say what the dispatcher's choices cost beside the best possible ones"),
    "targets": ("prefixbench.verbs.targets:main", "check measured figures against stated targets"),
    "soak": ("prefixbench.verbs.soak:main", "drive a server with everything at once and look for any fault"),
    "fragmentation": ("prefixbench.verbs.fragmentation:main", "how contiguous prefixes stay under hours of churn"),
    "doctor": ("prefixbench.verbs.doctor:main", "say what this machine has, lacks, and how to get it"),
}
_RESUMED = ("run", "reproduce", "outside")
_EXIT_CODES = """exit codes
  0  done
  1  something failed, regressed or did not meet what was asked; all of it is listed
  2  bad option, configuration, selector or input file
  3  two selections differ in something that is not under test
  4  a record or another file could not be written or read
  5  the engine cannot be used here, or did not behave
  130  interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code (the table is in --help)."""
    _prepare_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    logger = logging.getLogger("prefixbench")  # the root logger is Hydra's to configure
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    try:
        return _run(arguments)
    except BenchError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("prefixbench", "prefixonce"):
            raise
        return _fail(f"this needs the package {error.name!r}; pip install 'prefixonce[bench]'", 2)
    except KeyboardInterrupt:
        goes_on = ", the same command goes on from there" if arguments[0] in _RESUMED else ""
        return _fail(f"interrupted; what was recorded is kept{goes_on}", 130)
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        _discard_output()
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}; what was recorded is kept", StoreError.exit_code)


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0 if arguments else 2
    _check_folder()
    code = function(arguments[0])(list(arguments[1:]))
    sys.stdout.flush()  # a full disk behind it must not show only after the exit code is decided
    return code


def verbs() -> dict[str, str]:
    """The verbs of this installation and what each does."""
    return {verb: text for verb, (target, text) in _VERBS.items() if find_spec(target.partition(":")[0]) is not None}


def function(verb: str) -> Callable[[list[str]], int]:
    """The function behind a verb, imported now; UsageError when this installation has no such verb."""
    available = verbs()
    if verb not in available:
        raise unknown("verb", verb, available)
    module, _, name = _VERBS[verb][0].partition(":")
    found: Callable[[list[str]], int] = getattr(import_module(module), name)
    return found


def _prepare_streams() -> None:
    """Whatever terminal, pipe or locale this is, no name in a record may stop the output; nor may a missing stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - it stays for the life of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """What could not be written is not tried again at the end of the process, which would complain in many lines."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more; change to one that does") from None


def _help() -> str:
    available = verbs()
    width = max(map(len, available))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in available.items()]
    return "\n".join(("usage: prefixbench VERB ...   (VERB --help says more)\n", *lines, "", _EXIT_CODES, ""))


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"prefixbench: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
