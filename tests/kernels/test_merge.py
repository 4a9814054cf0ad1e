"""The LSE merge: natural logs, empty pieces, garbage behind weight zero, strided views."""

from __future__ import annotations

import math

import pytest
import torch

from prefixonce import merge
from prefixonce.attend import merge_pieces
from prefixonce.errors import LayoutError


def _merge(values, lses, device, batch=1, head_dim=64):
    """Pieces of constant value: `values` and `lses` are per piece (or per piece and head)."""
    lse = torch.tensor(lses, dtype=torch.float32, device=device)
    lse = lse.reshape(len(lses), 1, -1).repeat(1, batch, 1)
    value = torch.tensor(values, dtype=torch.float32, device=device).reshape(len(values), 1, -1)
    outs = value.expand(len(values), batch, lse.shape[2])[..., None].repeat(1, 1, 1, head_dim)
    out = torch.full(outs.shape[1:], torch.nan, device=device)
    merged = torch.full(lse.shape[1:], torch.nan, device=device)
    merge_pieces(outs, lse, out, merged)
    return out, merged


def test_natural_logarithm(device):
    out, lse = _merge([1.0, 3.0], [0.0, math.log(3)], device)
    torch.testing.assert_close(out, torch.full_like(out, 2.5), atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, 1.386294), atol=1e-6, rtol=0)


@pytest.mark.parametrize("batch", [1, 33])
@pytest.mark.parametrize("values", [[[7.0, 7.0], [9.0, 9.0]], [[math.nan] * 2, [math.nan] * 2]])
def test_all_pieces_empty(device, batch, values):
    out, lse = _merge(values, [[-math.inf] * 2] * 2, device, batch)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("order", [1, -1])
def test_garbage_behind_weight_zero_does_not_leak(device, order):
    out, lse = _merge([math.nan, 2.0][::order], [-math.inf, 1.0][::order], device)
    assert torch.equal(out, torch.full_like(out, 2.0))
    assert torch.equal(lse, torch.ones_like(lse))


def test_views_give_the_bits_of_contiguous_tensors(device):
    torch.manual_seed(0)
    outs, lses = torch.randn(3, 5, 6, 80, device=device), torch.randn(3, 6, 5, device=device).transpose(1, 2)
    plain = torch.empty(5, 6, 80, device=device), torch.empty(5, 6, device=device)
    merge_pieces(outs, lses.contiguous(), *plain)
    wide = torch.empty(5, 6, 96, device=device)
    views = wide[..., 16:], torch.empty(6, 5, device=device).t()
    merge_pieces(outs, lses, *views)
    assert torch.equal(views[0], plain[0])
    assert torch.equal(views[1], plain[1])


def test_half_precision_lse_is_refused():
    outs, lses = torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 1, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"float16 in .*natural log"):
        merge_pieces(outs, lses, torch.zeros(1, 1, 64), torch.zeros(1, 1))


def test_shapes_that_do_not_merge_are_refused():
    with pytest.raises(LayoutError, match="do not merge"):
        merge_pieces(torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 2), torch.zeros(1, 1, 64), torch.zeros(1, 1))


def _merge_step(device, part_out, part_lse, block_h, unroll):
    """Four rows of 4 query and 2 KV heads: seven sources, one, none, and one the suffix pass has written itself."""
    words = {
        "row_first": [[3, 40], [80, 90], [0, 0], [0, 0]],
        "row_sources": [[5, 5], [1, 1], [0, 0], [0, 0]],
        "row_stride": [6, 4, 0, 0],
        "suffix_indptr": [0, 2, 2, 2, 3],
    }
    tensors = [torch.tensor(values, dtype=torch.int32, device=device) for values in words.values()]
    out = torch.full((4, 4, 80), torch.nan, device=device)
    lse = torch.full((4, 4), torch.nan, device=device)
    merge.merge_step_kernel[(4, 4 // block_h)](
        out, lse, part_out, part_lse, *tensors, *out.stride()[:2], *lse.stride(), 100, 4,
        GQA=2, HEAD_DIM=80, BLOCK_H=block_h, BLOCK_D=128, UNROLL=unroll, WITH_LSE=True, DEPENDENT=False,
    )  # fmt: skip
    return out, lse


def test_step_merge_is_right_and_bits_do_not_depend_on_what_is_in_flight(device):
    torch.manual_seed(0)
    rows = [[3 + 6 * i + h if h < 2 else 40 + 6 * i + h % 2 for i in range(5)] + [100 + h, 104 + h] for h in range(4)]
    used = torch.tensor(rows, device=device)
    single = torch.tensor([80, 81, 90, 91], device=device)
    part_out = torch.full((112, 80), torch.nan, device=device)
    part_lse = torch.full((112,), torch.nan, device=device)
    for index in (used.flatten(), single):
        part_out[index] = torch.randn(len(index), 80, device=device)
        part_lse[index] = 3 * torch.randn(len(index), device=device)
    out, lse = _merge_step(device, part_out, part_lse, 1, 8)
    weights = torch.softmax(part_lse[used].double(), dim=1)
    expected = (weights[..., None] * part_out[used].double()).sum(1)
    torch.testing.assert_close(out[0].double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse[0].double(), torch.logsumexp(part_lse[used].double(), 1), atol=1e-6, rtol=0)
    torch.testing.assert_close(out[1], part_out[single], atol=1e-6, rtol=0)
    assert not out[2].any()
    assert torch.isneginf(lse[2]).all()
    assert out[3].isnan().all(), "the suffix pass wrote this row"
    for block_h, unroll in ((1, 1), (2, 2), (4, 4), (4, 2), (1, 3)):
        again = _merge_step(device, part_out, part_lse, block_h, unroll)
        assert torch.equal(out[:3], again[0][:3]), (block_h, unroll)
        assert torch.equal(lse[:3], again[1][:3]), (block_h, unroll)
