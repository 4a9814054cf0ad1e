"""The command line: verbs that exist, one line per error, documented exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prefixbench import cli
from prefixbench.errors import BenchError, EngineError, NotComparableError, StoreError, UsageError


def test_help_lists_verbs_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in cli.verbs())
    for error in (BenchError, UsageError, NotComparableError, StoreError, EngineError):
        assert f"\n  {error.exit_code}  " in out


def test_every_listed_verb_can_be_imported() -> None:
    assert {"run", "reproduce", "report", "doctor"} <= set(cli.verbs())
    assert all(callable(cli.function(verb)) for verb in cli.verbs())


def test_a_verb_whose_module_is_missing_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli._VERBS, "later", ("prefixbench.later_cli:main", "not built"))
    assert "later" not in cli.verbs()


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rpeort"]) == UsageError.exit_code
    err = capsys.readouterr().err
    assert "verb 'rpeort' is unknown; did you mean 'report'?" in err
    assert err.count("\n") == 1
    assert cli.main([]) == UsageError.exit_code


@pytest.mark.parametrize("error", [UsageError, StoreError, EngineError, NotComparableError])
def test_errors_are_one_line_and_their_exit_code(
    error: type[BenchError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(argv: list[str]) -> int:
        raise error("first\n  second")

    monkeypatch.setattr(cli, "function", lambda verb: fails)
    assert cli.main(["run"]) == error.exit_code
    assert capsys.readouterr().err == "prefixbench: first second\n"


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'plotly'", name="plotly.graph_objects")

    monkeypatch.setattr(cli, "function", lambda verb: fails)
    assert cli.main(["report"]) == 2
    assert "pip install 'prefixonce[bench]'" in capsys.readouterr().err


def test_an_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'prefixbench.gone'", name="prefixbench.gone")

    monkeypatch.setattr(cli, "function", lambda verb: fails)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["report"])


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    script = "import sys; import prefixbench.cli as c; c.verbs(); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"hydra", "torch", "sglang", "pandas", "plotly", "pydantic"} & set(eval(done.stdout))
