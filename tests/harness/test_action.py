"""action.yml: every exit code of the gate becomes the outcome that it means, and inputs stay arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from prefixbench.analysis.gate.judge import EXIT_CODES

ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
STEP = ACTION["runs"]["steps"][0]


def run(tmp_path: Path, code: int, **inputs: str) -> tuple[int, str, list[str]]:
    """Runs the step's script with a stand-in for prefixbench; returns its exit code, outputs and the arguments seen."""
    (tmp_path / "output").unlink(missing_ok=True)
    command = tmp_path / "prefixbench"
    command.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/arguments\nexit {code}\n')
    command.chmod(0o755)
    values = {name: str(spec.get("default", "")) for name, spec in ACTION["inputs"].items()}
    values |= {"baseline": "reference", "command": str(command), **inputs}
    environment = {name: values[text.split(".")[-1].strip(" }")] for name, text in STEP["env"].items()}
    environment |= {
        "GITHUB_OUTPUT": f"{tmp_path}/output",
        "GITHUB_STEP_SUMMARY": f"{tmp_path}/summary",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(["bash", "-e", "-c", STEP["run"]], env=environment, cwd=tmp_path, check=False)
    return done.returncode, (tmp_path / "output").read_text(), (tmp_path / "arguments").read_text().splitlines()


@pytest.mark.parametrize(("outcome", "code"), EXIT_CODES.items())
def test_outcomes(tmp_path: Path, outcome: str, code: int) -> None:
    status, output, arguments = run(tmp_path, code)
    assert status == code
    assert output == f"outcome={outcome}\n"
    assert arguments[:4] == ["gate", "--baseline", "reference", "--candidate"]
    assert "--anchor" not in arguments


def test_undecided_may_pass_and_nothing_else_does(tmp_path: Path) -> None:
    assert run(tmp_path, 2, undecided="pass")[0] == 0
    assert run(tmp_path, 3, undecided="pass")[0] == 3
    assert run(tmp_path, 64)[1] == "outcome=error\n"


def test_inputs_are_arguments_never_code(tmp_path: Path) -> None:
    hostile = "tag=x $(touch owned) ; touch owned"
    _, _, arguments = run(tmp_path, 0, candidate=hostile, anchor="tag=v1 path=full", arguments="--margin 0.1")
    assert not (tmp_path / "owned").exists()
    assert arguments[arguments.index("--candidate") + 1] == "tag=x"
    assert arguments[arguments.index("--anchor") : arguments.index("--anchor") + 3] == [
        "--anchor",
        "tag=v1",
        "path=full",
    ]
    assert arguments[-2:] == ["--margin", "0.1"]
