"""The verb: settings, refusals, and a JSON that says the same."""

from __future__ import annotations

import json

import pytest

from prefixbench.cli import main as cli
from prefixbench.verbs.predict import main


def test_the_question_users_start_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama-3.1-8b", "gpu=h200", "prefix_len=512,16384", "concurrency=256", "--residuals"]) == 0
    printed = capsys.readouterr().out
    assert "a model, not a measurement" in printed
    assert printed.count("auto") == 2
    assert "dense 8192x256" in printed


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefix_len=16384", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row["path"] for row in rows] == ["stock", "cascade", "full", "auto"]
    assert all(row["step_ms"]["low"] <= row["step_ms"]["expected"] <= row["step_ms"]["high"] for row in rows)


def test_a_gpu_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu=custom", "copy_gb_s=3000", "matmul_tflop_s=600"]) == 0
    assert "No kernel of custom is known" in capsys.readouterr().out


def test_the_machine_on_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--paper"]) == 0
    assert "R1 full (tok/s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["gpu=h20"], "did you mean 'h200'?"),
        (["prefix=1"], "setting 'prefix' is unknown"),
        (["prefix_len=-1"], "whole numbers from 0 on"),
        (["concurrency=0"], "whole numbers from 1 on"),
        (["16384"], "is no setting"),
        (["gpu=custom"], "gpu=custom needs copy_gb_s and matmul_tflop_s"),
        (["gpu=custom", "copy_gb_s=fast", "matmul_tflop_s=1"], "a positive number is needed"),
        (["copy_gb_s=1"], "only with gpu=custom"),
        (["output_len=1,2"], "one number is needed"),
        (["gpus=1,3"], "gpus=3: must divide the 32 heads and 8 K/V heads of llama-3.1-8b"),
        (
            ["prefix_len=512,131072"],
            "prefix_len + suffix_len + output_len = 131264: llama-3.1-8b has a context of 131072",
        ),
        (["prefix_len=512", "prefix_len=1024"], "prefix_len is given twice"),
        (["gpu=custom", "copy_gb_s=1e300", "matmul_tflop_s=1"], "a positive number is needed, from 0.001 to 1,000,000"),
    ],
)
def test_refusals_are_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
