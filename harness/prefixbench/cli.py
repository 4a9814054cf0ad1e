"""`prefixbench VERB ...`: imports the verb only when it is asked for, turns errors into one line and an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

from prefixbench.errors import BenchError
from prefixbench.hints import unknown

_VERBS = {
    "run": ("prefixbench.verbs.run:main", "measure points of a sweep; records go to runs/"),
    "reproduce": (
        "prefixbench.verbs.reproduce:main",
        "measure what this machine can check of the claims, build the report",
    ),
    "report": ("prefixbench.verbs.report:main", "build one HTML file from records"),
    "show": ("prefixbench.verbs.records:show", "print records"),
    "compare": ("prefixbench.verbs.records:compare", "compare two selections of records"),
    "export": ("prefixbench.verbs.records:export", "write records as a table"),
    "scorecard": ("prefixbench.verbs.scorecard:main", "judge the claims from records"),
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
_EXIT_CODES = """exit codes
  0  done
  1  something failed, regressed or did not meet what was asked; all of it is listed
  2  bad option, configuration, selector or input file
  3  two selections differ in something that is not under test
  4  a record could not be written or read
  5  the engine cannot be used here, or did not behave
  130  interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code (the table is in --help)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logger = logging.getLogger("prefixbench")  # the root logger is Hydra's to configure
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0 if arguments else 2
    try:
        return function(arguments[0])(arguments[1:])
    except BenchError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("prefixbench", "prefixonce"):
            raise
        return _fail(f"this needs the package {error.name!r}; pip install 'prefixonce[bench]'", 2)
    except KeyboardInterrupt:
        return _fail("interrupted; what was recorded is kept, the same command goes on from there", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 1


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
