"""Closed-form answers and fp64 answers through every path: in the interpreter, and on the GPU where marked."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kernel_problems import Group, Problem, Shape, bound, build, random_shape, shared
from prefixonce import attend as attend_module
from prefixonce.attend import attend
from prefixonce.errors import LayoutError, UnsupportedError
from prefixonce.limits import HeadSpec
from prefixonce.planner import Pass, StepPlanner
from prefixonce.step import Mode

MODES = (Mode.PAGED, Mode.CASCADE, Mode.DENSE)
SHARING = (Mode.CASCADE, Mode.DENSE)


def uniform(problem: Problem, prefix_value: float = 1.0, suffix_value: float = 0.0) -> Problem:
    """Every key weighs the same: K = 0, one value in the prefixes and one elsewhere."""
    problem.k.copy_(torch.where(torch.isnan(problem.k.float()), torch.nan, 0.0))
    problem.v.copy_(torch.where(torch.isnan(problem.v.float()), torch.nan, suffix_value))
    for group in problem.step.groups:
        problem.v[problem.slots[group.rows[0]][: group.prefix_tokens]] = prefix_value
    return problem


def graded(problem: Problem) -> Problem:
    """K = 0 and V[t] = t mod 64: an off-by-one page changes the mean."""
    uniform(problem)
    for slots in problem.slots:
        values = (torch.arange(len(slots), device=problem.device) % 64).to(problem.v.dtype)
        problem.v[slots] = values[:, None, None]
    return problem


def assert_rows(out, expected, atol=2e-3):
    expected = torch.as_tensor(expected, dtype=torch.float64, device=out.device)
    while expected.dim() < out.dim():
        expected = expected.unsqueeze(-1)
    torch.testing.assert_close(out.double(), expected.expand(out.shape), atol=atol, rtol=1e-3)


@pytest.mark.parametrize("mode", SHARING)
def test_no_suffix_at_all(device, mode):
    problem = uniform(build(shared(4, 512, 0), device))
    out, lse = problem.solve(mode)
    assert_rows(out, 1.0, atol=0)
    assert_rows(lse, math.log(512), atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_some_suffixes_are_empty(device, mode):
    shape = dataclasses.replace(shared(4, 512, 0), suffixes=(0, 1, 0, 17))
    out, lse = uniform(build(shape, device)).solve(mode)
    assert_rows(out, [1.0, 512 / 513, 1.0, 512 / 529])
    assert_rows(lse, [math.log(n) for n in (512, 513, 512, 529)], atol=1e-5)


@pytest.mark.parametrize("mode", SHARING)
def test_both_producers_hand_over_natural_logs(device, mode):
    shape = dataclasses.replace(shared(2, 128, 0), suffixes=(384, 384))
    out, lse = uniform(build(shape, device), 1.0, 3.0).solve(mode)
    assert_rows(out, 2.5)
    assert_rows(lse, math.log(512), atol=1e-5)


@pytest.mark.parametrize("split_tokens", [1024, 512, 128])
@pytest.mark.parametrize("mode", SHARING)
def test_heads_keep_their_place_whatever_the_split(device, mode, split_tokens):
    batch, kv_heads, head_dim = (2, 2, 64) if device == "cpu" else (16, 8, 128)
    shape = shared(batch, 1024, 0, q_heads=4 * kv_heads, kv_heads=kv_heads, head_dim=head_dim)
    problem = uniform(build(dataclasses.replace(shape, suffixes=tuple(range(1, batch + 1))), device))
    prefix = problem.slots[0][:1024]
    values = torch.arange(1.0, kv_heads + 1)
    problem.v[prefix] = values.to(problem.v)[None, :, None]
    out, _ = problem.solve(mode, split_tokens=split_tokens, max_batch=64)
    share = 1024 / (1024 + torch.arange(1.0, batch + 1, dtype=torch.float64))
    assert_rows(out, share[:, None] * values.repeat_interleave(4)[None, :], atol=8e-3)


@pytest.mark.parametrize(("batch", "heads"), [(1, (40, 8)), (17, (7, 1)), (3, (14, 2)), (3, (64, 4)), (8, (9, 3))])
def test_group_sizes_that_fill_no_tile(device, heads, batch):
    check_heads(device, heads, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(40, 8), (28, 4), (14, 2), (64, 4), (9, 3), (12, 2), (32, 32)])
@pytest.mark.parametrize("batch", [1, 3, 8, 17])
def test_all_group_sizes(heads, batch):
    check_heads("cuda", heads, batch)


def check_heads(device, heads, batch):
    q_heads, kv_heads = heads
    problem = uniform(build(shared(batch, 256, 3, q_heads=q_heads, kv_heads=kv_heads), device))
    problem.v[problem.slots[0][:256]] = torch.arange(1.0, kv_heads + 1, device=device).half()[None, :, None]
    for mode in SHARING:
        out, _ = problem.solve(mode)
        share = 256 / torch.tensor(problem.step.seq_lens, dtype=torch.float64)
        values = torch.arange(1.0, kv_heads + 1).repeat_interleave(q_heads // kv_heads)
        assert_rows(out, share[:, None] * values[None, :], atol=0.02)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("prefix", [1, 15, 16, 17, 63, 65, 100, 1023])
def test_prefix_that_ends_inside_a_page(device, page_size, prefix):
    few = device == "cpu"
    for suffix in (16,) if few else (0, 1, 16):
        shape = dataclasses.replace(shared(2, prefix, 0, page_size=page_size), suffixes=(suffix, suffix))
        problem = graded(build(shape, device))
        total = prefix + suffix
        mean = sum(t % 64 for t in range(total)) / total
        for mode in (SHARING[page_size == 64],) if few else SHARING:
            out, _ = problem.solve(mode)
            assert_rows(out, mean, atol=0.02)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(device, head_dim):
    tokens = 130 if device == "cpu" else 2048
    problem = build(shared(2 if device == "cpu" else 16, tokens, 9, q_heads=4, kv_heads=1, head_dim=head_dim), device)
    for mode in MODES:
        error, lse_error = problem.errors(problem.solve(mode))
        assert error <= bound(problem)
        assert lse_error <= 1e-5


def test_unserved_head_dim_is_refused_before_anything_is_launched():
    with pytest.raises(UnsupportedError, match=r"head_dim 512 is not one of 64, 80"):
        StepPlanner(HeadSpec(8, 2, 512), max_batch=4, max_tokens=64, device="cpu")


@pytest.mark.parametrize("mode", MODES)
def test_query_cut_from_a_wider_tensor(device, mode):
    problem = build(shared(5, 200, 9), device)
    planner = problem.planner()
    problem.update(planner, mode)
    plain = problem.run(planner)
    wide = torch.full((5, 12, 64), torch.nan, dtype=torch.float16, device=device)
    wide[:, :8] = problem.q
    problem.q = wide[:, :8]
    strided = problem.run(planner)
    assert torch.equal(plain[0], strided[0])
    assert torch.equal(plain[1], strided[1])


@pytest.mark.parametrize("layout", ["wider_v", "heads_first"])
@pytest.mark.parametrize("mode", MODES)
def test_k_and_v_laid_out_differently(device, mode, layout):
    problem = build(shared(5, 200, 9), device)
    plain = problem.solve(mode)
    slots, heads, dim = problem.v.shape
    if layout == "wider_v":
        wide = torch.full((slots, heads, 2 * dim), torch.nan, dtype=torch.float16, device=device)
        wide[..., dim:] = problem.v
        problem.v = wide[..., dim:]
    else:
        problem.v = problem.v.transpose(0, 1).contiguous().transpose(0, 1)
    assert problem.v.stride() != problem.k.stride()
    result = problem.solve(mode)
    assert torch.equal(plain[0], result[0])
    assert torch.equal(plain[1], result[1])


def test_output_and_lse_may_be_views(device):
    problem = build(shared(5, 200, 9), device)
    planner = problem.planner()
    problem.update(planner, Mode.CASCADE)
    out, lse = problem.run(planner)
    wide = torch.zeros(5, 8, 80, dtype=torch.float16, device=device)
    transposed = torch.empty(8, 5, device=device).t()
    attend(planner, problem.q, problem.k, problem.v, wide[..., 16:], scale=problem.scale, lse=transposed)
    assert torch.equal(wide[..., 16:], out)
    assert torch.equal(transposed, lse)
    assert not wide[..., :16].any()


def test_soft_cap_and_its_extremes(device):
    shape = Shape(1, 1, 64, (2, 2, 2), dtype=torch.float16)
    problem = build(shape, device)
    problem.q.zero_()
    problem.q[..., 0] = 1.0
    for row, logit in enumerate((10.0, 5000.0, 10.0)):
        first, second = problem.slots[row]
        problem.k[first], problem.k[second] = 0.0, 0.0
        problem.k[first, :, 0] = logit
        problem.v[first], problem.v[second] = 1.0, 0.0
    problem.scale = 1.0
    problem.shape.soft_cap = 5.0
    out, lse = problem.solve(Mode.PAGED)
    capped = 5 * math.tanh(2.0)
    assert_rows(out[0], 1 / (1 + math.exp(-capped)))
    assert_rows(lse[0], capped + math.log1p(math.exp(-capped)), atol=1e-5)
    problem.shape.soft_cap = 50.0
    out, lse = problem.solve(Mode.PAGED)
    assert_rows(out[1], 1.0, atol=0)
    assert_rows(lse[1], 50.0, atol=1e-4)
    problem.shape.soft_cap = 0.0
    out, _ = problem.solve(Mode.PAGED)
    assert_rows(out[0], 1 / (1 + math.exp(-10)), atol=6e-4)


@pytest.mark.parametrize("mode", MODES)
def test_soft_cap_reaches_every_pass(device, mode):
    problem = build(shared(3, 200, 9, soft_cap=0.7), device)
    error, lse_error = problem.errors(problem.solve(mode))
    assert error <= bound(problem)
    assert lse_error <= 1e-5
    problem.shape.soft_cap = 0.0
    assert problem.errors(problem.solve(mode))[1] > 0.01  # the control: without the cap the answer is another


@pytest.mark.parametrize("mode", MODES)
def test_fp8_scales(device, mode):
    fp8 = torch.float8_e4m3fn
    problem = uniform(build(shared(2, 64, 0, kv_dtype=fp8, k_scale=0.5, v_scale=2.0), device))
    assert_rows(problem.solve(mode)[0], 2.0, atol=0)
    mixed = build(shared(3, 130, 20, kv_dtype=fp8, k_scale=0.5, v_scale=2.0), device)
    error, lse_error = mixed.errors(mixed.solve(mode))
    assert error <= bound(mixed)
    assert lse_error <= 1e-4
    mixed.shape.k_scale, mixed.shape.v_scale = 2.0, 0.5
    assert mixed.errors(mixed.solve(mode))[0] > 10 * bound(mixed)  # the control: the two scales are not alike


def test_padding_rows_are_zero_and_touch_nothing(device):
    problem = build(dataclasses.replace(shared(5, 140, 9, q_heads=4, kv_heads=1), padding_rows=3), device)
    planner = problem.planner()
    for mode in MODES:
        problem.update(planner, mode)
        alone = attend(
            planner, problem.q[:5], problem.k, problem.v, torch.empty_like(problem.q[:5]), scale=problem.scale
        )
        problem.update(planner, mode, padded_batch=8)
        out, lse = problem.run(planner)
        assert torch.equal(out[:5], alone)
        assert torch.equal(out[5:], torch.zeros_like(out[5:]))
        assert torch.isneginf(lse[5:]).all()
    assert torch.isnan(problem.k[0]).all()  # slot 0


def test_passes_follow_the_step(device, monkeypatch):
    launched = []
    for name in ("prefix", "suffix", "merge"):
        original = getattr(attend_module._Call, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            launched.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(attend_module._Call, name, spy)
    problem = build(shared(2, 0, 5), device)
    out, _ = problem.solve(Mode.CASCADE)
    assert launched == ["suffix"], "no prefix, short rows: one launch that writes the output itself"
    assert problem.errors((out, problem.solve(Mode.PAGED)[1]))[0] <= bound(problem)
    planner = problem.planner()
    assert problem.update(planner, Mode.DENSE) == Pass.SUFFIX


def test_a_graph_that_lacks_a_pass_refuses_the_step(device):
    problem = build(shared(2, 140, 5), device)
    planner = problem.planner()
    with pytest.raises(LayoutError, match=r"needs .*DENSE.* recorded .*SUFFIX"):
        problem.update(planner, Mode.DENSE, captured=Pass.SUFFIX | Pass.MERGE)
    problem.update(planner, Mode.DENSE)
    with pytest.raises(LayoutError, match="asked to launch only"):
        problem.run(planner, passes=Pass.SUFFIX)


@pytest.mark.parametrize("seed", range(3))
def test_random_shapes_in_the_interpreter(interpreted, seed):
    problem = build(random_shape(seed, (8, 2, 64), torch.float16, most_tokens=200))
    for mode in MODES:
        result = problem.solve(mode)
        error, lse_error = problem.errors(result)
        assert error <= bound(problem), problem.shape
        assert lse_error <= 1e-5
        assert not result[0][problem.step.batch_size :].any()


def test_mismatches_are_named():
    problem = build(shared(2, 140, 5))
    planner = problem.planner()
    q, k, v, out = problem.q, problem.k, problem.v, torch.empty_like(problem.q)
    for arguments, message in (
        ((q[:, :4], k, v, out), "q is"),
        ((q.float(), k, v, out), "dtypes of"),
        ((q, k, v[:, :1], out), r"both must be \[slots"),
        ((q, k, v[..., ::2].repeat(1, 1, 2)[..., ::1].transpose(0, 2), out), "both must be"),
        ((q, k.transpose(1, 2).contiguous().transpose(1, 2), v, out), "it must be 1"),
    ):
        with pytest.raises(LayoutError, match=message):
            attend(planner, *arguments, scale=0.1)
    with pytest.raises(LayoutError, match="must be positive"):
        attend(planner, q, k, v, out, scale=0.0)
    with pytest.raises(LayoutError, match="float32"):
        attend(planner, q, k, v, out, scale=0.1, lse=torch.empty(2, 8, dtype=torch.float16))


def test_rows_of_two_groups_are_refused():
    problem = build(Shape(8, 2, 64, (3, 3), (Group((0, 1), ((140, True),)),)))
    problem.step = dataclasses.replace(problem.step, groups=problem.step.groups * 2)
    with pytest.raises(LayoutError, match="two groups"):
        problem.update(problem.planner(), Mode.DENSE)
