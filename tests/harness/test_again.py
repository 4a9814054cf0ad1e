"""again: the cases of old records are measured once more, from what the records keep and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.builders import kernel_record
from prefixbench import cli, store
from prefixbench.case import case_hash
from prefixbench.config.recorded import configurations
from prefixbench.errors import UsageError
from prefixbench.report.sections.again import again_section
from prefixbench.report.view import Commands

ROOT = Path(__file__).parents[2]
RUN = ("run", "engine=fake", "path=[stock,full]", "prefix_len=[64,128]", "concurrency=4", "launches=2", "output_len=8")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    assert cli.main([*RUN, "+workload@also.apart.workload=distinct", "tag=first", f"runs={tmp_path / 'runs'}"]) == 0
    return tmp_path / "runs"


def test_the_selected_cases_and_no_others_are_measured_beside_the_old_records(runs: Path) -> None:
    words = ["path=full", "prefix_len=64", "tag=first"]
    assert cli.main(["again", *words, "--runs", str(runs), "--launches", "3", "--tag", "second"]) == 0
    old, new = (store.load(tag, runs) for tag in (" ".join(words), "tag=second"))
    assert {r.case.workload for r in old} == {"shared-prefix", "distinct"}  # type: ignore[union-attr]
    assert {r.case_hash for r in new} == {r.case_hash for r in old}
    assert (len(old), len(new)) == (2 * 2, 2 * 3)
    assert not {r.launch.launch_id for r in new} & {r.launch.launch_id for r in old}
    said = again_section(new, "tag=second", "prefixbench report")
    commands = [line for block in said.blocks if isinstance(block, Commands) for line in block.lines]
    assert any(line.startswith("prefixbench again path=full prefix_len=64 tag=first") for line in commands)


def test_a_gate_takes_both(runs: Path) -> None:
    assert cli.main(["again", "tag=first", "--runs", str(runs), "--tag", "second"]) == 0
    gate = ["gate", "--baseline", "tag=first", "--candidate", "tag=second", "--runs", str(runs)]
    assert cli.main([*gate, "--margin", "0.9"]) in (0, 2), "the same cases on the same machine can be compared"


def test_it_can_be_done_again_from_its_own_records(runs: Path) -> None:
    assert cli.main(["again", "path=full", "--runs", str(runs), "--launches", "1", "--tag", "second"]) == 0
    assert cli.main(["again", "tag=second", "--runs", str(runs), "--launches", "1", "--tag", "third"]) == 0
    second, third = (store.load(f"tag={tag}", runs) for tag in ("second", "third"))
    assert sorted(r.case_hash for r in second) == sorted(r.case_hash for r in third)


def test_the_committed_reference_can_be_measured_again() -> None:
    """Whatever becomes of presets and defaults, its configurations must go on giving the cases that it holds."""
    records = store.load("reference", ROOT / "runs")
    served = {record.case_hash for record in records if record.case.kind == "serving"}
    assert served
    assert {case_hash(case) for _, cases in configurations(records) for case in cases} == served


def test_a_configuration_that_gives_other_cases_today_is_refused(runs: Path) -> None:
    record = store.load("path=full", runs)[0]
    with pytest.raises(UsageError, match=f"{record.record_id} cannot be measured again: .* gives other cases"):
        configurations([replace(record, config={**record.config, "seed": 99})])
    with pytest.raises(UsageError, match="cannot be measured again: its configuration: key 'nothing' is unknown"):
        configurations([replace(record, config={**record.config, "nothing": 1})])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tag=nobody"], "no record matches 'tag=nobody'"),
        (["implementation=dense"], "holds no record of `prefixbench run`"),
    ],
)
def test_what_holds_no_served_record_is_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.save(kernel_record("dense"), tmp_path, {})
    assert cli.main(["again", *words, "--runs", str(tmp_path)]) == 2
    assert line in capsys.readouterr().err
