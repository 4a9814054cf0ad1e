"""reproduce: the plan fits the machine and the budget, says what it leaves out, runs, resumes and builds the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from prefixbench import cli, reproduce, store
from prefixbench.config import config_dir
from prefixbench.errors import UsageError

DATA = yaml.safe_load((config_dir() / "reproduce.yaml").read_text())
CLAIMS = yaml.safe_load((config_dir() / "claims.yaml").read_text())["claims"]


@pytest.mark.parametrize(
    ("gpus", "preset"), [(0, "cpu"), (1, "one-gpu"), (2, "two-gpu"), (3, "two-gpu"), (4, "four-gpu"), (8, "four-gpu")]
)
def test_the_plan_uses_most_of_what_is_there(gpus: int, preset: str) -> None:
    assert reproduce.pick(DATA, gpus) == preset


@pytest.mark.parametrize("preset", DATA["presets"])
def test_presets_are_whole_and_every_claim_is_spoken_for(preset: str) -> None:
    plan = reproduce.read_plan(DATA, preset)
    assert {cut.step for cut in plan.cuts} <= set(plan.steps)
    assert set(DATA["needs"]) == set(CLAIMS)
    for step in plan.steps.values():
        assert all(DATA["needs"][claim] <= plan.gpus for claim in step.checks)
    said = " ".join(reproduce.describe(plan, DATA["needs"], plan.gpus))
    assert all(claim in said for claim in CLAIMS)


def test_a_budget_drops_the_least_informative_first_and_says_so() -> None:
    plan = reproduce.read_plan(DATA, "one-gpu")
    fitted = reproduce.fit(plan, 45.0)
    assert fitted.minutes <= 45.0 < plan.minutes
    assert fitted.dropped == ("prefix 2048",)
    assert "prefix_len=[512,8192,16384]" in fitted.steps["llama-8b"].arguments
    shortest = reproduce.fit(plan, 25.0)
    assert "kernels" not in shortest.steps
    said = "\n".join(reproduce.describe(shortest, DATA["needs"], 1))
    assert "left out by --budget: the kernels" in said
    assert "Not checked here: K1, K2, K3, K4, D1, D2 (left out by --budget)" in said
    assert reproduce.fit(plan, None) == plan
    with pytest.raises(UsageError, match="shortest plan of one-gpu takes 21m"):
        reproduce.fit(plan, 5.0)


@pytest.mark.parametrize(("text", "minutes"), [("25m", 25.0), ("2h", 120.0), ("1h30m", 90.0), (None, None)])
def test_budgets(text: str | None, minutes: float | None) -> None:
    assert reproduce.parse_budget(text) == minutes


@pytest.mark.parametrize("text", ["", "25", "m", "soon", "-5m", "30m1h"])
def test_budgets_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="allowed: 25m, 2h, 1h30m"):
        reproduce.parse_budget(text)


def test_it_measures_reports_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    step = reproduce.Step("fake", "run", ("engine=fake", "path=stock,full", "launches=2", "-m"), 1.0, ())
    plan = reproduce.Plan("cpu", 0, {"fake": step}, ())
    monkeypatch.setattr("prefixbench.reproduce.read_plan", lambda data, preset: plan)
    assert cli.main(["reproduce"]) == 0
    first = {record.record_id for record in store.load("latest")}
    assert len(first) == 6
    assert (tmp_path / "reports" / "latest" / "index.html").is_file()
    assert f"report: {tmp_path / 'reports' / 'latest' / 'index.html'}" in capsys.readouterr().out
    assert cli.main(["reproduce"]) == 0
    assert {record.record_id for record in store.load("latest")} == first, "the second run starts no server"
