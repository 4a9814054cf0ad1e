"""Chromium for the tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")  # playwright's event loop must not outlive it: tests after it run loops of their own
def chromium() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        advice = f"no {CHROMIUM}: install Debian's package chromium"
        pytest.fail(advice) if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip(advice)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
