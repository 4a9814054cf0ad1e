"""The store: written once and whole, every version readable, torn files reported and survived (O44), selectors."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prefixbench import store
from prefixbench.errors import StoreError, UsageError
from prefixbench.record import ServingMeasurement
from record_factory import make_record

V1 = Path(__file__).parents[1] / "data" / "record_v1.json"
V1_KERNEL = Path(__file__).parents[1] / "data" / "record_v1_kernel.json"


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    record = make_record()
    folder = store.save(record, tmp_path, {"config.yaml": "model: tiny\n"})
    assert folder == tmp_path / record.record_id
    assert (folder / "config.yaml").read_text() == "model: tiny\n"
    assert store.load((), tmp_path) == [record]


def test_a_gzipped_record_is_the_same_record_and_a_torn_one_is_reported(tmp_path: Path) -> None:
    record = make_record()
    path = store.save(record, tmp_path, {}) / "record.json"
    packed = path.with_name("record.json.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert store.load((), tmp_path) == store.load(str(packed)) == store.load(f"{tmp_path}/*/*/*.gz") == [record]
    packed.write_bytes(packed.read_bytes()[:-9])
    reading = store.read_tree(tmp_path)
    assert reading.records == ()
    assert len(reading.problems) == 1
    assert f"{packed} is torn or not a record" in reading.problems[0]


def test_records_are_never_replaced(tmp_path: Path) -> None:
    record = make_record()
    path = store.save(record, tmp_path, {}) / "record.json"
    before = path.read_bytes()
    with pytest.raises(StoreError, match="never replaced"):
        store.save(replace(record, status="failed"), tmp_path, {})
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.parent.iterdir()] == [path.parent.name], "the refused write left something"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_is_refused_and_leaves_nothing(tmp_path: Path, value: float) -> None:
    record = make_record()
    assert isinstance(record.measurement, ServingMeasurement)
    block = replace(record.measurement.blocks[0], wall_s=value)
    with pytest.raises(StoreError, match="cannot be written"):
        store.save(replace(record, measurement=replace(record.measurement, blocks=(block,))), tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_lone_surrogate_can_be_written_and_is_read_as_text_that_any_output_takes(tmp_path: Path) -> None:
    record = replace(make_record(model="\ud83d"), overrides=("tag=\ud83d",))
    path = store.save(record, tmp_path, {}) / "record.json"
    assert json.loads(path.read_text())["overrides"] == ["tag=\ud83d"]
    assert store.load((), tmp_path)[0].overrides == ("tag=?",)


def test_record_torn_after_every_byte_is_reported_and_the_others_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, torn = make_record("20300101T000001-aaaaaa"), make_record("20300101T000002-bbbbbb")
    store.save(whole, tmp_path, {})
    path = store.save(torn, tmp_path, {}) / "record.json"
    text = path.read_text().rstrip()
    for length in range(len(text)):
        path.write_text(text[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert store.load((), tmp_path) == [whole]
        assert str(path) in caplog.text
    path.write_text(text)
    assert len(store.load((), tmp_path)) == 2


def test_bare_nan_in_a_file_is_invalid(tmp_path: Path) -> None:
    path = store.save(make_record(), tmp_path, {}) / "record.json"
    path.write_text(path.read_text().replace('"wall_s":0.3', '"wall_s":NaN'))
    assert store.read_tree(tmp_path).problems == (f"{path} is torn or not a record (NaN is not JSON); it is left out",)


def test_newer_schema_is_refused_with_file_and_version(tmp_path: Path) -> None:
    path = store.save(make_record(), tmp_path, {}) / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(StoreError, match=f"{path} has schema version 99"):
        store.load((), tmp_path)


@pytest.mark.parametrize("path", [V1, V1_KERNEL])
def test_version_1_stays_readable(path: Path) -> None:
    record = store.read_record(path)
    assert record.schema_version == 1
    assert is_kept(json.loads(path.read_text()), json.loads(store.to_json(record)))


def is_kept(old: object, new: object) -> bool:
    """Everything that the file says is still there; fields that came later have no value."""
    if isinstance(old, dict):
        assert isinstance(new, dict)
        added = [new[name] for name in new.keys() - old.keys()]
        return all(is_kept(value, new[name]) for name, value in old.items()) and not any(added)
    if isinstance(old, list):
        assert isinstance(new, list)
        return len(old) == len(new) and all(map(is_kept, old, new))
    return old == new


def test_half_written_folders_are_not_records_and_are_cleared_once_their_writer_is_gone(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib; sys.path[:0] = sys.argv[2:]\n"
        "from prefixbench import store\n"
        "from record_factory import make_record\n"
        "store._sync_folder = lambda folder: os.kill(os.getpid(), 9)\n"
        "store.save(make_record(), pathlib.Path(sys.argv[1]), {})\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path), *sys.path], check=False)
    assert killed.returncode == -9
    left = list(tmp_path.glob("*/.writing-*"))
    assert len(left) == 1
    assert (left[0] / "record.json").exists()
    own = left[0].parent / f".writing-{os.uname().nodename}-{os.getpid()}-running"
    own.mkdir()
    assert store.load((), tmp_path) == []
    assert store.clear_leftovers(tmp_path) == 1
    assert own.exists()
    assert not left[0].exists()


def test_selectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cascade = make_record("20300101T000001-aaaaaa")
    stock = make_record("20300101T000001-aaaaaa", path="stock", plugin=False)
    later = replace(make_record("20300101T000002-bbbbbb", sweep="s2", model="llama"), status="failed")
    tagged = replace(make_record("20300101T000003-cccccc", sweep="s1"), notes={"sweep": "s1", "tag": "night"})
    root = tmp_path / "runs"
    for record in (cascade, stock, later, tagged):
        store.save(record, root, {})
    reference = make_record("20290101T000000-dddddd")
    store.save(reference, root / "reference", {})
    monkeypatch.chdir(tmp_path)

    def ids(selector: str | list[str]) -> set[str]:
        return {r.record_id for r in store.load(selector, root)}

    everything = {r.record_id for r in (cascade, stock, later, tagged)}
    assert ids("runs/") == ids([]) == everything
    assert ids("path=stock") == {stock.record_id}
    assert ids("plugin=true status=ok model=tiny,llama") == {cascade.record_id, tagged.record_id}
    assert ids("prefix_len=512") == set()
    assert ids("night") == ids("tag=night") == {tagged.record_id}
    assert ids("reference") == {reference.record_id}
    assert ids("reference runs/ path=stock") == {stock.record_id}
    assert ids(f"runs/{later.record_id}") == ids(later.record_id) == ids("20300101T000002") == {later.record_id}
    assert ids(cascade.case_hash) == {cascade.record_id, tagged.record_id}
    assert ids("runs/*/20300101T000001-*") == {cascade.record_id, stock.record_id}
    with pytest.raises(UsageError, match="did you mean 'path'"):
        ids("pth=stock")
    with pytest.raises(UsageError, match="nothing is called 'nonsense'"):
        ids("nonsense")


def test_latest_is_the_newest_sweep_with_what_it_reused(tmp_path: Path) -> None:
    old, done, new = (make_record(f"2030-{n}", sweep=s, path=p) for n, s, p in (
        ("aaaaaa", "s1", "stock"), ("bbbbbb", "s1", "cascade"), ("cccccc", "s2", "full")))  # fmt: skip
    for record in (old, done, new):
        store.save(record, tmp_path, {})
    for sweep, reused in (("s1", []), ("s2", [done.record_id])):
        plan = tmp_path / ".sweeps" / sweep / "0" / "plan.json"
        plan.parent.mkdir(parents=True)
        plan.write_text(json.dumps({"reused": reused}))
    assert store.load("latest", tmp_path) == [done, new]
    assert store.latest(tmp_path / "nothing") == []
