"""`prefixbench calibrate` and `regret` as commands: from records to a profile's file, and to a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from prefixbench import cli
from prefixbench.config import config_dir
from prefixbench.config import kernels as kernels_config
from prefixbench.config.kernels import Request
from prefixonce.cost import CONSERVATIVE, load_profile, profile_for

ROOT = Path(__file__).parents[2]
RUNS = ["--runs", str(ROOT / "runs")]


def design(name: str) -> set[Request]:
    kernels_config.register_schema()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return set(kernels_config.requests(kernels_config.load(compose("kernels", overrides=[f"kernels={name}"]))))


def test_the_shipped_profile_comes_from_the_committed_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "again.json"
    assert cli.main(["calibrate", "--from", "reference", "tag=calibration", "-o", str(file), *RUNS]) == 0
    shipped, again = profile_for("NVIDIA H200"), load_profile(file)
    assert shipped is not CONSERVATIVE
    assert again.device == shipped.device
    assert again.memory_bytes_per_us == pytest.approx(shipped.memory_bytes_per_us, rel=1e-3)
    for part in ("stock", "shared"):
        for name in getattr(shipped, part).__slots__:
            assert getattr(getattr(again, part), name) == pytest.approx(getattr(getattr(shipped, part), name), rel=1e-2)
    said = capsys.readouterr().out
    assert "49 cells" in said
    assert f"PREFIXONCE_PROFILE={file}" in said
    about = json.loads(file.read_text())["calibration"]
    assert about["stock"] == "flashinfer-decode"
    assert set(about["relative_errors"]) == {"stock", "cascade", "dense"}


def test_regret_of_the_shipped_profile_meets_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["regret", "reference", "tag=regret", "--at-most", "0.02", *RUNS]
    assert cli.main(arguments) == 0
    assert "120 cells" in capsys.readouterr().out
    conservative = tmp_path / "conservative.json"
    CONSERVATIVE.dump(conservative)
    assert cli.main([*arguments, "--profile", str(conservative)]) == 1


def test_a_selection_without_such_cells_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["calibrate", "--from", "reference", "tag=h200 batch=8", "-o", str(tmp_path / "p.json"), *RUNS]) == 2
    )
    assert "a fit needs at least 12" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_the_grid_that_judges_shares_no_cell_with_the_one_that_is_fitted_to() -> None:
    fitted = {(r.prefix_len, r.suffix_len, r.batch, r.kv_heads) for r in design("calibration")}
    judged = {(r.prefix_len, r.suffix_len, r.batch, r.kv_heads) for r in design("regret")}
    assert not fitted & judged
    assert {heads for *_, heads in judged} == {1, 2, 4, 8}
    assert {min(column) for column in ([p for p, *_ in judged], [b for _, _, b, _ in judged])} == {64, 1}
    assert {max(column) for column in ([p for p, *_ in judged], [b for _, _, b, _ in judged])} == {16384, 512}


def test_a_cpu_calibrates_its_own_paths_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cpu.json"
    few = [
        "grids.two-kv-heads.batch=[2,4,8]",
        "repetitions=1",
        "warmup=0",
        "~grids.one-kv-head",
        "grids.two-kv-heads.prefix_len=[32,64,96,128]",
    ]
    code = cli.main(["calibrate", "--device", "cpu", *few, "-o", str(file), "--runs", str(tmp_path / "runs")])
    assert code == 0
    profile = load_profile(file)
    assert profile.device.startswith("CPU: ")
    assert profile.processors == 1
    assert "stock is paged" in profile.source
    assert "CPU: " in capsys.readouterr().out
