"""Every kernel compiles for the GPUs it is meant for, A100 and Hopper, on a machine that has neither."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from prefixonce.cascade import prefix_kernel
from prefixonce.limits import HEAD_DIMS
from prefixonce.merge import merge_step_kernel
from prefixonce.paged import grow_kernel, paged_kernel, snapshot_kernel
from prefixonce.prefixwork import COPY_WIDTH
from prefixonce.workplan import PREFIX_ITEM_WIDTH, SUFFIX_ITEM_WIDTH


class _Target:
    """As much of a device driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return self._target.arch  # compiled kernels are kept per device

    def get_current_stream(self, device=0):
        return 0


@pytest.fixture
def target(request, monkeypatch):
    monkeypatch.setattr(driver, "_active", _Target(request.param), raising=False)
    return request.param


WORDS, FLOATS = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
STRIDES = (4096, 128, 1024, 128, 1024, 128)


def pool(head_dim, dtype=torch.bfloat16):
    return torch.zeros(16, 8, head_dim, dtype=dtype)


def compile_paged(capability, head_dim, kv_dtype=torch.bfloat16, soft_cap=False):
    kv = pool(head_dim, kv_dtype)
    return paged_kernel.warmup(
        pool(head_dim), kv, kv, pool(head_dim), None, FLOATS, FLOATS, WORDS, WORDS, WORDS, 64,
        *STRIDES, 4096, 128, 0, 0, 0.1, 0.0, 1.0,
        KV_HEADS=8, GQA=4, HEAD_DIM=head_dim, BLOCK_G=16, BLOCK_D=1 << (head_dim - 1).bit_length(),
        BLOCK_N=128 if head_dim <= 128 else 64, HAS_CAP=soft_cap, WITH_LSE=False, ITEM_WIDTH=SUFFIX_ITEM_WIDTH,
        HAS_DEPENDENT=capability >= 90, num_warps=4, num_stages=2, grid=(1,),
    )  # fmt: skip


def compile_prefix(contiguous, head_dim):
    tile = 128 if head_dim <= 128 else 64
    return prefix_kernel.warmup(
        pool(head_dim), pool(head_dim), pool(head_dim), FLOATS, FLOATS, WORDS, WORDS, WORDS,
        *STRIDES, 0.1, 0.0, 1.0,
        GQA=4, HEAD_DIM=head_dim, TILE=tile, BLOCK_D=1 << (head_dim - 1).bit_length(),
        BLOCK_N=64 if head_dim <= 128 else 32, CONTIGUOUS=contiguous, HAS_CAP=False, ITEM_WIDTH=PREFIX_ITEM_WIDTH,
        num_warps=8 if tile == 128 else 4, num_stages=3 if head_dim <= 128 else 2, grid=(1,),
    )  # fmt: skip


def shared_memory(kernel) -> int:
    return kernel.metadata.shared


@pytest.mark.parametrize("target", [80, 90], indirect=True)
@pytest.mark.parametrize("head_dim", [128, max(HEAD_DIMS)])
def test_portable_kernels(target, head_dim):
    limit = {80: 163, 90: 227}[target] * 1024
    kernels = [compile_paged(target, head_dim), *(compile_prefix(run, head_dim) for run in (False, True))]
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert shared_memory(kernel) <= limit
        assert f".target sm_{target}" in kernel.asm["ptx"]
        assert "wgmma" not in kernel.asm["ptx"] or target == 90
        assert "cp.async" in kernel.asm["ptx"], "K and V are copied ahead"
    assert ("griddepcontrol" in kernels[0].asm["ptx"]) == (target == 90)


@pytest.mark.parametrize("target", [80, 90], indirect=True)
def test_merge(target):
    early = target == 90
    kernel = merge_step_kernel.warmup(
        pool(128), None, FLOATS, FLOATS, WORDS, WORDS, WORDS, WORDS, 4096, 128, 0, 0, 64, 32,
        GQA=4, HEAD_DIM=128, BLOCK_H=8, BLOCK_D=128, UNROLL=4, WITH_LSE=False, DEPENDENT=early,
        num_warps=4, launch_pdl=early, grid=(1,),
    )  # fmt: skip
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == early


@pytest.mark.parametrize("target", [80, 90], indirect=True)
def test_planning_kernels(target):
    slots = torch.zeros(64, dtype=torch.int64)
    packed = snapshot_kernel.warmup(WORDS, slots, WORDS, WORDS, 131072, COPY_WIDTH=COPY_WIDTH, BLOCK=1024, grid=(1,))
    assert packed.asm["cubin"]
    first, *others = (
        grow_kernel.warmup(
            WORDS, slots, WORDS, WORDS, WORDS, WORDS, first_copy, steps, batch, 131072,
            COPY_WIDTH=COPY_WIDTH, ITEM_WIDTH=SUFFIX_ITEM_WIDTH, BLOCK=128, grid=(1,),
        )
        for first_copy, steps, batch in ((0, 1, 1), (1, 16, 512), (3, 7, 33))
    )  # fmt: skip
    assert first.asm["cubin"]
    assert all(other is first for other in others), "no step waits for a compiler because its numbers are others"


@pytest.mark.parametrize("target", [90], indirect=True)
def test_fp8_and_soft_cap(target):
    assert compile_paged(target, 128, torch.float8_e4m3fn, soft_cap=True).asm["cubin"]


@pytest.mark.parametrize("target", [90], indirect=True)
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_kernel(target, gather, head_dim, tmp_path):
    from prefixonce import hopper

    kv = pool(head_dim)
    kernel = hopper._prefix_kernel.warmup(
        kv, kv, kv, hopper._descriptor(kv), hopper._descriptor(kv), FLOATS, FLOATS, WORDS, WORDS,
        WORDS if gather else None, *STRIDES, 0.1, 1.0,
        GQA=4, GATHER=gather, STAGES=2, WIDTH=PREFIX_ITEM_WIDTH, num_warps=4, grid=(1,),
    )  # fmt: skip
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert ("cp.async.bulk.tensor" in ptx) != gather
    assert ("cp.async.cg.shared.global" in ptx) == gather, "16-byte copies"
    assert shared_memory(kernel) <= 227 * 1024
    assert stack_bytes(kernel, tmp_path) == 0, "registers spill"


def stack_bytes(kernel, folder) -> int:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", report)))
