"""Runs killed at any moment, and two runs at once: nothing recorded is lost, nothing shared, every record parses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from prefixbench import store
from prefixbench.engines.base import ServerFailedError
from prefixbench.engines.process import OWNER_VARIABLE, ServerProcess, end_orphans
from prefixbench.record import Record

PATHS = "path=stock,cascade,full"
POINTS = 6 * (3 + 1) * 2
COMMAND = (
    *(sys.executable, "-m", "prefixbench.cli", "run", "engine=fake", "engine.extra_args=['latency_s=0.05']"),
    *(PATHS, "prefix_len=64,128,256,512,1024,2048", "launches=2", "measure.blocks=1", "-m"),
)


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen((*COMMAND, *overrides), cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def recorded(folder: Path) -> dict[str, int]:
    return {str(p.parent.relative_to(folder)): p.stat().st_mtime_ns for p in folder.glob("runs/*/2*/record.json")}


def per_case(records: list[Record]) -> set[int]:
    counts: dict[str, int] = {}
    for record in records:
        counts[record.case_hash] = counts.get(record.case_hash, 0) + 1
    return set(counts.values())


def test_killed_at_five_random_moments_nothing_is_lost(tmp_path: Path) -> None:
    rng = random.Random(20301)
    kept: dict[str, int] = {}
    for _ in range(5):
        run = start(tmp_path)
        deadline = time.monotonic() + 300
        while recorded(tmp_path).keys() == kept.keys() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.25))
        assert run.poll() is None, "the run ended before it could be killed; give it more latency"
        run.send_signal(signal.SIGKILL)
        run.wait()
        now = recorded(tmp_path)
        assert kept.items() <= now.items(), "a record was lost or rewritten"
        assert len(now) > len(kept)
        reading = store.read_tree(tmp_path / "runs")
        assert (len(reading.records), reading.problems) == (len(now), ())
        kept = now
    assert len(kept) < POINTS
    assert start(tmp_path).wait(300) == 0
    assert kept.items() <= recorded(tmp_path).items()
    records = store.load((), tmp_path / "runs")
    assert len(records) == POINTS
    assert per_case(records) == {2}
    assert not list(tmp_path.glob("runs/*/.writing-*"))
    assert len(store.load("latest", tmp_path / "runs")) == POINTS, "the newest run with what it counted as done"


def test_two_runs_started_at_once_share_nothing(tmp_path: Path) -> None:
    # Whichever starts later would count what the other has recorded by then as done: how much is a race.
    runs = [start(tmp_path, "resume=false"), start(tmp_path, "resume=false")]
    assert [run.wait(300) for run in runs] == [0, 0]
    records = store.load((), tmp_path / "runs")
    assert len(records) == 2 * POINTS
    by_launch: dict[str, set[object]] = {}
    for record in records:
        assert record.notes is not None
        by_launch.setdefault(record.launch.launch_id, set()).add(record.notes["sweep"])
    assert all(len(sweeps) == 1 for sweeps in by_launch.values())
    assert len({sweep for sweeps in by_launch.values() for sweep in sweeps}) == 2


def test_a_server_dies_with_the_run_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, os; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from prefixbench.engines.process import ServerProcess\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "server = ServerProcess([sys.executable, '-c', code], os.environ, Path(sys.argv[1]))\n"
        "server.wait_until(lambda: server.tail().strip().isdigit(), 300)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    log = tmp_path / "server.log"
    assert subprocess.run([sys.executable, "-c", script, str(log), *sys.path], check=False).returncode == -9
    pid = int(log.read_text())
    for _ in range(1200):
        if not psutil.pid_exists(pid):
            return
        time.sleep(0.05)
    psutil.Process(pid).kill()
    pytest.fail("the server outlived its run")


def test_orphans_of_a_dead_run_are_ended_and_others_left(tmp_path: Path) -> None:
    sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
    me = psutil.Process()
    owned = subprocess.Popen(sleeper, env={**os.environ, OWNER_VARIABLE: f"{me.pid}:{me.create_time()}"})
    orphan = subprocess.Popen(sleeper, env={**os.environ, OWNER_VARIABLE: f"{me.pid}:12345.0"})
    try:
        assert end_orphans() == 1
        assert orphan.wait(60) == -signal.SIGKILL
        assert owned.poll() is None
    finally:
        owned.kill()
        orphan.kill()


def test_stopping_ends_the_whole_tree_and_an_early_death_is_quoted(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    command = [sys.executable, "-c", f"{child}; print('up', flush=True); time.sleep(600)"]
    server = ServerProcess(command, os.environ, tmp_path / "log")
    server.wait_until(lambda: "up" in server.tail(), 300)
    tree = psutil.Process(server.pid).children(recursive=True)
    assert tree
    server.stop()
    server.stop()
    assert not any(process.is_running() for process in tree)

    deaths = (("raise ValueError('page_size 3')", "failed"), ("raise MemoryError('CUDA out of memory')", "oom"))
    for code, status in deaths:
        server = ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / status)
        with pytest.raises(ServerFailedError, match=r"ended with code 1: \w+Error: ") as died:
            server.wait_until(lambda: False, 300)
        assert died.value.status == status
        server.stop()


def test_a_server_that_never_answers_is_a_timeout(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path / "log")
    with pytest.raises(ServerFailedError, match="not ready after 1 s") as late:
        server.wait_until(lambda: False, 1.0)
    assert late.value.status == "timeout"
    server.stop()
