"""Vendored files are the ones that were pinned, with their licences beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    ROOT / "harness/prefixbench/report/templates/vendor": "plotly-basic",
    ROOT / "tests/report/vendor": "axe",
}


@pytest.mark.parametrize(("folder", "name"), FOLDERS.items(), ids=FOLDERS.values())
def test_vendored_files_match_their_checksum(folder: Path, name: str) -> None:
    (line,) = (folder / "SHA256SUMS").read_text().splitlines()
    digest, file = line.split()
    assert file == f"{name}.min.js"
    assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest
    assert len((folder / f"{name}.LICENSE").read_text()) > 500


def test_the_vendored_script_cannot_end_its_element() -> None:
    script = (ROOT / "harness/prefixbench/report/templates/vendor/plotly-basic.min.js").read_text()
    assert "</script" not in script.lower()
    assert "<!--" not in script
