"""Markers and the rule that a required test which could not run is a failure, not a skip."""

from __future__ import annotations

import os

import pytest

_REQUIRED_BY = {"gpu": "--require-gpu", "browser": "REQUIRE_BROWSER=1"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="a GPU test that cannot run fails instead of skipping")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "engine: starts a real SGLang engine on CPU (tens of seconds)")
    config.addinivalue_line("markers", "browser: drives Debian's Chromium")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first: a broken formula is known before the first engine starts."""
    items.sort(key=lambda item: sum(item.get_closest_marker(name) is not None for name in ("engine", "browser", "gpu")))


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


@pytest.fixture
def browser_required() -> bool:
    return os.environ.get("REQUIRE_BROWSER") == "1"
