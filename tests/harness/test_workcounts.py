"""workcounts: the committed counts are those of this code, and a plan that does more work turns the check red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from prefixbench import cli
from prefixbench.config import config_dir
from prefixbench.measures import workcounts
from prefixbench.verbs.workcounts import compare, read_baseline
from prefixonce.dispatch import Limits, choose
from prefixonce.planner import StepPlanner

BASELINE = config_dir() / "workcounts-baseline.json"
DESIGN = yaml.safe_load((config_dir() / "workcounts.yaml").read_text())


def test_the_accepted_counts_are_those_of_this_code(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["workcounts", "--check"])
    assert code == 0, capsys.readouterr().out


def test_more_splits_for_each_tile_turn_the_check_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def split_finer(spec: object, **options: object) -> StepPlanner:
        return StepPlanner(spec, **options, split_tokens=1024)

    monkeypatch.setattr(workcounts, "StepPlanner", split_finer)
    assert cli.main(["workcounts", "--check"]) == 1
    told = capsys.readouterr().out
    assert "worse: headline/dense: prefix_items was 160 and is 1,024" in told
    assert "worse: headline/dense: most_partials_of_a_row was 3 and is 16" in told


def test_a_dispatcher_that_shares_less_turns_the_check_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        workcounts, "choose", lambda step, mode, limits: choose(step, mode, Limits(min_prefix_tokens=1000))
    )
    assert cli.main(["workcounts", "--check"]) == 1
    told = capsys.readouterr().out
    assert "worse: short-prefix/full: prefix_tokens_saved was 130,560 and is 0" in told
    assert "worse: short-prefix/full: kv_bytes" in told
    assert "headline" not in told


def test_every_kind_of_difference_is_told_apart() -> None:
    accepted = {"a": {"launches": 3, "groups": 2, "prefix_tokens_saved": 10, "flops": 5}, "b": {"launches": 1}}
    counted = {"a": {"launches": 2, "groups": 3, "prefix_tokens_saved": 9, "flops": 5}, "c": {"launches": 1}}
    assert list(compare(accepted, counted)) == [
        "changed: a: groups was 2 and is 3",
        "better: a: launches was 3 and is 2",
        "worse: a: prefix_tokens_saved was 10 and is 9",
        "b: no longer counted",
        "c: not in the baseline",
    ]


def test_shared_nodes_and_copies_make_the_groups_that_were_meant() -> None:
    nodes = {"system": (1024, "contiguous"), "tenant": (512, "paged")}
    asked = [
        {"path": ["system", "tenant"], "count": 3, "copies": 2, "own": [10, 30]},
        {"path": [], "count": 1, "own": 7},
    ]
    batch = workcounts._batch(asked, nodes)
    assert batch.own_tokens == [10, 20, 30, 10, 20, 30, 7]
    assert [chain[-1].end_tokens if chain else 0 for chain in batch.chains] == [1536] * 6 + [0]
    assert len({chain[0].node_id for chain in batch.chains if chain}) == 1, "all tenants are below one system prompt"
    assert len({chain[1].node_id for chain in batch.chains if chain}) == 2


def test_a_missing_baseline_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="prefixbench workcounts -o"):
        read_baseline(tmp_path / "none.json")
    assert json.loads(BASELINE.read_text()).keys() == {
        f"{step}/{mode}" for step in DESIGN["steps"] for mode in DESIGN["modes"]
    }
