"""Markers, the order of the tests, which of them share a process, and that a required one which cannot run fails."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

_REQUIRED_BY = {"gpu": "--require-gpu", "browser": "REQUIRE_BROWSER=1"}
# What takes longest, in this order and after everything else: a broken formula is known before the first engine
# starts, and the processes that share the work end at the same time.
_LONGEST = (
    *("plugin/test_real_engine.py", "plugin/test_engine.py", "plugin/test_engine_extremes.py"),
    *("report/test_browser.py", "kernels/test_attend.py", "test_docs.py", "plugin/test_soak.py"),
    *("plugin/test_refusals.py", "plugin/test_tree.py", "harness/test_resume.py", "harness/test_runner.py"),
    *("plugin/test_engine_combinations.py", "harness/test_kernel_bench_counters.py", "harness/test_calibrate_cli.py"),
    *("harness/test_reproduce.py", "plugin/test_forced_tokens.py"),
)
_MARKED = ("engine", "browser", "gpu")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The tests are what runs in parallel: more threads in each would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Neither chance nor a slow machine decides: the same examples every time, as slowly as they like. Others are tried
# with --hypothesis-profile=default.
hypothesis.settings.register_profile("same-every-time", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same-every-time")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="a GPU test that cannot run fails instead of skipping")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "engine: starts a real SGLang engine on CPU (tens of seconds)")
    config.addinivalue_line("markers", "browser: drives Debian's Chromium")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0].removeprefix("tests/")
        if file in _LONGEST:
            return 1 + _LONGEST.index(file)
        return len(_LONGEST) + 1 if any(item.get_closest_marker(name) for name in _MARKED) else 0

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        """The tests of a file share a process, and with it what they start."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.endswith(("/test_tree.py", "/test_refusals.py")):
                return "SGLang is imported by the tests themselves"
            if file.endswith("/test_engine.py"):
                return f"{file}, {'page 16' if '[page16' in nodeid else 'page 1'}"
            return file

    config.option.loadscopereorder = False  # or the order would be that of the number of tests
    return Units(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail("a GPU is required (--require-gpu) and torch sees none")
    pytest.skip("no CUDA GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    for marker, switch in _REQUIRED_BY.items():
        count = sum(marker in getattr(report, "keywords", {}) for report in skipped)
        if count:
            terminalreporter.write_line(f"{count} {marker} tests skipped ({switch} makes that a failure)")
