"""compute-sanitizer finds no bad access, and no race but the one that it reports of any warp-specialised Triton kernel.

Triton tells the extra warps which partition to run by one byte each in shared memory, written before a barrier of all
warps (`barrier.sync 1`) and read after it. Racecheck does not follow that barrier and calls the pair a hazard. Where
those bytes lie is read from the kernel's own PTX, so that a race anywhere else fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitized.py")
# Shared memory that the driver keeps for itself lies before the kernel's own, from Hopper on.
RESERVED_BYTES = 1024

_HAZARD = re.compile(r"Error: .*hazard detected at __shared__ (0x[0-9a-f]+)")
_TOLD = re.compile(
    r"st\.shared\.v(?P<words>[24])\.b32\s+\[global_smem\+(?P<offset>\d+)\], \{[^}]*\};\s+barrier\.sync\s+1;"
)


def hazards(log: str) -> set[int]:
    """Addresses in shared memory of every hazard that racecheck calls an error."""
    return {int(address, 16) for address in _HAZARD.findall(log)}


def partition_bytes(ptx: str) -> set[int]:
    """Addresses, as racecheck gives them, of the bytes that tell warps their partition; empty without any."""
    return {
        RESERVED_BYTES + int(told["offset"]) + byte
        for told in _TOLD.finditer(ptx)
        for byte in range(4 * int(told["words"]))
    }


PTX = """
\t.loc\t1 234 0                         // hopper.py:234
\tst.shared.v2.b32 \t[global_smem+164128], {0, 50397698};
\tbarrier.sync \t1;
\tst.shared.v2.b32 \t[global_smem+512], {%r1, %r2};
\tbar.sync \t0, 128;
"""
LOG = """
========= Error: Potential RAW hazard detected at __shared__ 0x28523 in block (110,0,0) :
=========     Write Thread (31,0,0) at _prefix_kernel+0x6ce0 in hopper.py:234
=========     Read Thread (224,0,0) at _prefix_kernel+0xf0 in hopper.py:234
========= Warning: Potential WAR hazard detected at __shared__ 0x10 in block (0,0,0) :
"""


def test_hazards_are_read_from_what_racecheck_prints() -> None:
    assert hazards(LOG) == {0x28523}
    assert hazards(LOG.replace("0x28523", "0x600")) == {0x600}


def test_only_the_bytes_before_the_barrier_of_all_warps_tell_partitions() -> None:
    told = partition_bytes(PTX)
    assert told == set(range(0x28520, 0x28528))
    assert hazards(LOG) <= told
    assert not partition_bytes(PTX.replace("barrier.sync \t1", "bar.sync \t1, 128"))


def sanitize(tool: str, cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, *options, sys.executable, str(SCRIPT)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.gpu
def test_memcheck_is_clean(tmp_path: Path) -> None:
    ended = sanitize("memcheck", tmp_path, "--error-exitcode", "9")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


@pytest.mark.gpu
def test_racecheck_reports_no_race_of_ours(tmp_path: Path) -> None:
    ended = sanitize("racecheck", tmp_path, "--racecheck-report", "all", "--print-limit", "100000")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "RACECHECK SUMMARY" in ended.stdout
    told = set().union(*(partition_bytes(ptx.read_text()) for ptx in tmp_path.rglob("_prefix_kernel.ptx")))
    ours = hazards(ended.stdout) - told
    assert not ours, f"races at {sorted(map(hex, ours))}"
