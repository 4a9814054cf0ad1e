"""Dockerfile: the rules that a linter has, and what its targets promise; `make container-steps` runs the steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from container.cpu_steps import stage

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_targets_end_as_a_user_without_rights_at_the_same_entry_point(target: str) -> None:
    steps = stage(TEXT, target)
    said = {step.instruction: step.text for step in steps}
    assert (said["USER"], said["WORKDIR"]) == ("bench", "/out")
    assert (said["ENTRYPOINT"], said["CMD"]) == ('["prefixbench"]', '["doctor"]')
    order = [step.instruction for step in steps]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name == "RUN"), "nothing is installed as user"


@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_everything_that_is_copied_is_there_and_reaches_the_build(target: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for step in stage(TEXT, target):
        if step.instruction == "COPY":
            for source in step.text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source not in ignored
    assert "!runs/reference" in ignored, "the committed records come along, a user's own do not"


def test_versions_are_pinned() -> None:
    for target in ("gpu", "cpu"):
        steps = stage(TEXT, target)
        assert ":" in steps[0].text
        assert ":latest" not in steps[0].text
    for step in stage(TEXT, "cpu"):
        if "pip install" in step.text:
            assert "--require-hashes" in step.text or "--no-deps" in step.text
    assert "--no-install-recommends" in TEXT
    assert "rm -rf /var/lib/apt/lists/*" in TEXT


def test_stages_are_read_as_they_are_written() -> None:
    steps = stage("# c\nFROM a:1 AS x\nRUN one \\\n    && two\nFROM b:2 AS y\n# RUN no\nUSER u\n", "x")
    assert [(step.instruction, step.text) for step in steps] == [("FROM", "a:1 AS x"), ("RUN", "one && two")]
