"""The judge is judged: closed forms and torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch

from prefixonce.reference import Partial, attention, decode, merge


def test_uniform_keys_average_the_values() -> None:
    prefix, suffix = 512, 17
    k = torch.zeros(prefix + suffix, 2, 8)
    v = torch.cat([torch.ones(prefix, 2, 8), torch.zeros(suffix, 2, 8)])
    out, lse = attention(torch.randn(3, 4, 8), k, v, scale=1.0)
    assert torch.allclose(out, torch.full_like(out, prefix / (prefix + suffix)), rtol=1e-12)
    assert torch.allclose(lse, torch.full_like(lse, math.log(prefix + suffix)), rtol=1e-12)


def test_agrees_with_torch_on_grouped_heads() -> None:
    q, k, v = torch.randn(5, 6, 16).double(), torch.randn(33, 2, 16).double(), torch.randn(33, 2, 16).double()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    out = attention(q, k, v, scale=0.3).out
    assert (out - expected).abs().max() < 1e-12


def test_no_keys_give_zero_and_minus_infinity() -> None:
    out, lse = attention(torch.randn(2, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), scale=1.0)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_merge_uses_the_natural_logarithm() -> None:
    one = Partial(torch.ones(1, 1, 1).double(), torch.zeros(1, 1).double())
    three = Partial(torch.full((1, 1, 1), 3.0).double(), torch.tensor([[math.log(3.0)]], dtype=torch.float64))
    out, lse = merge(one, three)
    assert out.item() == pytest.approx(2.5, abs=1e-12)
    assert lse.item() == pytest.approx(1.386294, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("garbage", [7.0, math.nan])
def test_merge_ignores_what_an_empty_side_holds(rows: int, garbage: float) -> None:
    empty = Partial(torch.full((rows, 1, 2), garbage), torch.full((rows, 1), -math.inf))
    out, lse = merge(empty, empty)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    full = Partial(torch.full((rows, 1, 2), 2.0), torch.ones(rows, 1))
    for pair in ((empty, full), (full, empty)):
        out, lse = merge(*pair)
        assert (out == 2.0).all()
        assert (lse == 1.0).all()


def test_soft_cap() -> None:
    q, k = torch.ones(1, 1, 1), torch.tensor([10.0, 0.0]).view(2, 1, 1)
    v = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    assert attention(q, k, v, scale=1.0, soft_cap=5.0).out.item() == pytest.approx(0.991999, abs=1e-6)
    assert attention(q, k, v, scale=1.0).out.item() == pytest.approx(0.999955, abs=1e-6)
    assert attention(q, k * 500, v, scale=1.0, soft_cap=50.0).lse.item() == pytest.approx(50.0, abs=1e-6)


def test_fp8_scales_act_on_their_own_side() -> None:
    q, k, v = torch.randn(2, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    scaled = attention(q, k, v, scale=1.0, k_scale=0.5, v_scale=2.0)
    plain = attention(q, k * 0.5, v * 2.0, scale=1.0)
    swapped = attention(q, k, v, scale=1.0, k_scale=2.0, v_scale=0.5)
    assert (scaled.out - plain.out).abs().max() < 1e-12
    assert (swapped.out - plain.out).abs().max() > 1e-3


def test_decode_reads_each_row_from_its_own_slots() -> None:
    k = torch.zeros(10, 1, 4)
    v = torch.arange(10.0).view(10, 1, 1).expand(10, 1, 4).contiguous()
    out = decode(torch.randn(2, 2, 4), k, v, [torch.tensor([1, 3]), torch.tensor([9])], scale=1.0).out
    assert (out[0] - 2.0).abs().max() < 1e-12
    assert (out[1] - 9.0).abs().max() < 1e-12
