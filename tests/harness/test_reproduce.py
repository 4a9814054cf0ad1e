"""reproduce: the plan fits the machine and the budget, says what it leaves out, runs, resumes and builds the report."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from harness.builders import kernel_record
from prefixbench import cli, store
from prefixbench.case import ServingCase, case_hash
from prefixbench.config import checks as config_checks
from prefixbench.config import config_dir
from prefixbench.config import dispatch as dispatch_config
from prefixbench.config import kernels as kernels_config
from prefixbench.config.cases import sweep_cases
from prefixbench.config.overrides import prepare
from prefixbench.config.run import RunConfig, register_schema
from prefixbench.errors import UsageError
from prefixbench.machine import environment
from prefixbench.record import Failure
from prefixbench.targets.table import read_targets
from prefixbench.verbs import calibrate as calibrate_cli
from prefixbench.verbs import reproduce

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
    fitted = reproduce.fit(plan, 23.8)
    assert fitted.minutes <= 23.8 < plan.minutes
    assert fitted.dropped == ("the rollouts", "the ShareGPT-like workload")
    workloads = {case.workload for case in cases_of(fitted.steps["grid"])[1]}
    assert workloads == {"shared-prefix", "distinct"}
    shortest = reproduce.fit(plan, 9.0)
    assert "concurrency=256" in shortest.steps["grid"].arguments
    assert "kernels" not in shortest.steps
    said = "\n".join(reproduce.describe(shortest, DATA["needs"], 1))
    assert "left out by --budget: the kernels" in said
    assert "Not checked here: K1, K2, K3, K4, D1 (left out by --budget)" in said
    assert reproduce.fit(plan, None) == plan
    with pytest.raises(UsageError, match="shortest plan of one-gpu takes"):
        reproduce.fit(plan, 4.0)


def test_one_gpu_fits_into_twenty_five_minutes_with_everything() -> None:
    plan = reproduce.read_plan(DATA, "one-gpu")
    assert reproduce.fit(plan, 25.0) == plan


def test_the_cells_of_the_headline_have_three_launches_and_every_stock_backend() -> None:
    """The later steps ask for the very cases of the grid, so that their launches add up."""
    steps = reproduce.read_plan(DATA, "four-gpu").steps
    grid, headline, fa3 = (cases_of(steps[name]) for name in ("grid", "headline", "fa3"))
    assert {case_hash(case) for case in headline[1]} <= {case_hash(case) for case in grid[1]}
    assert (grid[0].launches, headline[0].launches) == (1, 3)
    whole = [case for case in grid[1] if (case.workload, case.output_tokens) == ("shared-prefix", 256)]
    cells = {(case.prefix_tokens, case.concurrency) for case in whole}
    assert cells >= {(prefix, rows) for prefix in (512, 2048, 8192, 16384) for rows in (64, 256, 512)}
    assert {(case.path, case.plugin) for case in headline[1]} == {
        ("stock", False),
        ("cascade", True),
        ("full", True),
        ("auto", True),
    }
    assert {case.stock_backend for case in grid[1]} == {"flashinfer"}
    assert {(case.stock_backend, case.path, case.plugin) for case in fa3[1]} == {("fa3", "stock", False)}
    assert {case.output_tokens for case in fa3[1]} == {256}


def test_every_cell_of_every_engine_target_is_measured_with_ours_and_with_stock() -> None:
    _, cases = cases_of(reproduce.read_plan(DATA, "one-gpu").steps["grid"])
    measured = {(c.workload, c.prefix_tokens, c.concurrency, c.path, c.plugin) for c in cases}
    sizes = {(c.workload, c.prefix_tokens, c.concurrency) for c in cases}
    targets = read_targets(config_dir() / "targets.yaml").engine
    assert len(targets) == 7
    for target in targets:
        cells = target.cells
        for workload in cells.workload:
            prefixes = cells.prefix_tokens or {prefix for name, prefix, _ in sizes if name == workload}
            counts = cells.concurrency or {count for name, _, count in sizes if name == workload}
            assert prefixes, target.name
            for prefix, count in product(prefixes, counts):
                arms = {("stock", False)} | {(path, True) for path in target.ours}
                assert {(workload, prefix, count, *arm) for arm in arms} <= measured, target.name


@pytest.mark.parametrize("preset", DATA["presets"])
def test_every_step_and_every_cut_is_a_command_that_its_verb_takes(preset: str) -> None:
    plan = reproduce.read_plan(DATA, preset)
    shortest = replace(plan, cuts=())
    for cut in plan.cuts:
        if cut.arguments is not None:
            step = shortest.steps[cut.step]
            shortened = replace(step, arguments=(*step.arguments, *cut.arguments))
            shortest = replace(shortest, steps={**shortest.steps, cut.step: shortened})
    for step in (*plan.steps.values(), *shortest.steps.values()):
        assert step.verb in cli.verbs()
        if step.verb in ("run", "outside"):
            config, cases = cases_of(step)
            assert cases
            assert config.gpus.count <= max(1, plan.gpus)
        elif step.verb == "calibrate":
            given = calibrate_cli._parser().parse_args(step.words(Path("runs"), Path("out")))
            assert (given.runs, given.output) == (Path("runs"), Path("out/profile.json"))
        else:
            schema = {"kernels": kernels_config, "dispatch": dispatch_config}[step.verb]
            schema.register_schema()
            with initialize_config_dir(str(config_dir()), version_base="1.3"):
                schema.load(compose(step.verb, overrides=step.words(Path("runs"), Path("out"))))


def cases_of(step: reproduce.Step) -> tuple[RunConfig, tuple[ServingCase, ...]]:
    register_schema()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        words = prepare(step.words(Path("runs"), Path("out")), multirun=False)
        config = config_checks.load(compose("config", overrides=words))
    return config, sweep_cases(config)


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
    step = reproduce.Step(
        "fake", "fakes", "run", ("engine=fake", "path=[stock,full]", "launches=2"), 1.0, (), resumes=True
    )
    plan = reproduce.Plan("cpu", 0, {"fake": step}, ())
    monkeypatch.setattr("prefixbench.verbs.reproduce.read_plan", lambda data, preset: plan)
    assert cli.main(["reproduce"]) == 0
    first = {record.record_id for record in store.load("latest")}
    assert len(first) == 6
    assert (tmp_path / "reports" / "latest" / "index.html").is_file()
    assert f"report: {tmp_path / 'reports' / 'latest' / 'index.html'}" in capsys.readouterr().out
    assert cli.main(["reproduce"]) == 0
    assert {record.record_id for record in store.load("latest")} == first, "the second run starts no server"


def test_a_verb_that_always_measures_is_called_until_its_records_are_complete(tmp_path: Path) -> None:
    planned = [
        kernel_record("dense", environment=environment.observe()),
        kernel_record("cascade", environment=environment.observe()),
    ]
    notes = {"tag": "reproduce-kernels", "sweep": "run-1", "plugin_source": environment.plugin_digest()}
    folder = tmp_path / store.SWEEPS / "run-1"
    folder.mkdir(parents=True)
    (folder / store.PLAN_FILE).write_text(json.dumps({"cases": [r.case_hash for r in planned], "reused": []}))
    store.save(replace(planned[0], notes=notes), tmp_path, {})
    assert reproduce.complete_run("reproduce-kernels", tmp_path) is None, "one of two is missing"
    late = replace(planned[1], notes=notes, status="timeout", failure=Failure("budget", "the time budget was spent"))
    path = store.save(late, tmp_path, {})
    assert reproduce.complete_run("reproduce-kernels", tmp_path) is None, "no time was left for it"
    (path / store.RECORD_FILE).unlink()
    path.rmdir()
    store.save(
        replace(planned[1], notes=notes, status="failed", failure=Failure("unsupported", "not here")), tmp_path, {}
    )
    assert reproduce.complete_run("reproduce-kernels", tmp_path) == "run-1", "it cannot run here, and was tried"
    assert reproduce.complete_run("reproduce-calibration", tmp_path) is None
    other = replace(kernel_record("dense", 1), notes=notes | {"sweep": "run-2"})
    store.save(other, tmp_path, {})
    assert reproduce.complete_run("reproduce-kernels", tmp_path) is None, "the newest is of another machine"
