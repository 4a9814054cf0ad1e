"""Predicates name what they refuse; errors and planner ask the same ones."""

from __future__ import annotations

import dataclasses

import pytest

from prefixonce.errors import UnsupportedError
from prefixonce.limits import (
    HEAD_DIMS,
    HeadSpec,
    check,
    hopper_layout_reason,
    hopper_unsupported_reason,
    layout_reason,
    unsupported_reason,
)

A100, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
LLAMA = HeadSpec(32, 8, 128)


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_served(group, head_dim, dtype):
    spec = HeadSpec(2 * group, 2, head_dim, dtype, dtype)
    assert unsupported_reason(spec, A100) is None
    check(spec, HOPPER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_q_heads": 30}, "30 query heads do not divide by 8"),
        ({"num_q_heads": 17, "num_kv_heads": 1}, "GQA group 17 is outside 1..16"),
        ({"head_dim": 512}, "head_dim 512 is not one of 64, 80, 96, 128, 192, 256"),
        ({"q_dtype": "float32"}, "query dtype float32"),
        ({"kv_dtype": "float16"}, "neither the query's bfloat16 nor float8_e4m3fn"),
        ({"kv_dtype": "float8_e4m3fn"}, "needs compute capability 8.9, this GPU has 8.0"),
        ({"sliding_window": 250}, "sliding window of 250 keys"),
    ],
)
def test_refused_with_a_reason(change, reason):
    spec = dataclasses.replace(LLAMA, **change)
    assert reason in unsupported_reason(spec, A100)
    with pytest.raises(UnsupportedError, match="serve this model with the stock backend"):
        check(spec, A100)


def test_old_gpus_are_refused():
    assert "7.5 is under 8.0" in unsupported_reason(LLAMA, (7, 5))


def test_fp8_from_ada_on():
    spec = dataclasses.replace(LLAMA, kv_dtype="float8_e4m3fn")
    assert unsupported_reason(spec, ADA) is None
    assert "differs from the query's" in hopper_unsupported_reason(spec, HOPPER)


def test_hopper_kernel_takes_what_it_can():
    assert hopper_unsupported_reason(LLAMA, HOPPER) is None
    assert "is not Hopper" in hopper_unsupported_reason(LLAMA, A100)
    assert "is not Hopper" in hopper_unsupported_reason(LLAMA, (10, 0))
    assert "head_dim 96" in hopper_unsupported_reason(dataclasses.replace(LLAMA, head_dim=96), HOPPER)


def test_layouts():
    shape, stride = (100, 8, 128), (1024, 128, 1)
    assert layout_reason(shape, shape, stride, (2048, 256, 1), LLAMA) is None
    assert "both must be" in layout_reason(shape, (100, 4, 128), stride, stride, LLAMA)
    assert "planned for 8 of 128" in layout_reason((100, 8, 64), (100, 8, 64), (512, 64, 1), (512, 64, 1), LLAMA)
    assert "it must be 1" in layout_reason(shape, shape, stride, (1024, 1, 8), LLAMA)


def test_sixteen_byte_copies():
    shape, stride = (100, 8, 128), (1024, 128, 1)
    assert hopper_layout_reason(shape, (stride,) * 3, (0, 256, 512)) is None
    assert "16 bytes" in hopper_layout_reason(shape, (stride,) * 3, (0, 8, 512))
    assert "multiples of 16" in hopper_layout_reason(shape, (stride, (1032, 128, 1), stride), (0, 0, 0))
    assert "2^31" in hopper_layout_reason(shape, (stride, stride, (128, 2**28, 1)), (0, 0, 0))
