"""Environment and doctor: observed, never guessed; what is missing comes with how to get it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefixbench import cli
from prefixbench.machine import environment
from prefixbench.record import Gpu
from prefixbench.verbs import doctor


def test_observed_on_this_machine() -> None:
    seen = environment.observe()
    assert seen.packages["hydra-core"] == "1.3.2"
    assert seen.cpu_count >= 1
    assert seen.memory_bytes > 1 << 28
    assert (seen.git_commit is None) is (seen.git_dirty is None)


def test_git_state_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "harness" / "environment.py"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    monkeypatch.setattr(environment, "__file__", str(module))
    assert environment.git_state() == (None, None)

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    git("init", "-q")
    git("add", "harness")
    git("commit", "-q", "-m", "one")
    commit, dirty = environment.git_state()
    assert commit is not None
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "record.json").write_text("{}")
    assert environment.git_state() == (commit, False), "records are not code"
    (tmp_path / "harness" / "new.py").write_text("")
    assert environment.git_state() == (commit, True)


def test_the_plugin_digest_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "prefixonce"
    package.mkdir()
    (package / "__init__.py").write_text("")
    spec = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    empty = environment.plugin_digest()
    (package / "kernel.py").write_text("fast = True\n")
    assert environment.plugin_digest() != empty
    (package / "kernel.py").rename(package / "renamed.py")
    assert environment.plugin_digest() not in (empty, None)


def _levels() -> dict[str, str]:
    return {finding.subject: finding.level for finding in doctor.examine()}


def test_doctor_names_what_the_job_needs() -> None:
    expected = {"Python", "sglang", "torch", "triton", "FlashInfer", "SGLang plugin", "platform", "disk", "CPU"}
    assert expected <= set(_levels())


@pytest.mark.parametrize(("found", "level"), [("0.5.16", "ok"), ("0.5.18", "missing"), (None, "missing")])
def test_doctor_compares_versions(monkeypatch: pytest.MonkeyPatch, found: str | None, level: str) -> None:
    monkeypatch.setattr(environment, "version", lambda name: found if name == "sglang" else "1")
    finding = next(f for f in doctor.examine() if f.subject == "sglang")
    assert finding.level == level
    assert level == "ok" or "pip install" in finding.remedy


def test_doctor_sees_a_plugin_or_platform_that_is_not_registered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    monkeypatch.setattr(environment, "gpus", tuple)
    assert _levels()["SGLang plugin"] == "missing"
    assert _levels()["platform"] == "missing"
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "missing SGLang plugin: not registered; pip install -e ." in out
    monkeypatch.setattr(environment, "gpus", lambda: (Gpu("NVIDIA H200", 1 << 37, "580"),))
    assert _levels()["platform"] == "ok"
    assert _levels()["GPU 0"] == "ok"


def test_doctor_notices_a_whitelist_that_leaves_the_plugin_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(name="prefixonce", value="prefixonce.step:Mode")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: (entry,))
    assert _levels()["SGLang plugin"] == "ok"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert _levels()["SGLang plugin"] == "note"
