"""The traffic model against figures worked out by hand."""

from __future__ import annotations

import dataclasses

from prefixonce.dispatch import Limits, choose
from prefixonce.limits import HeadSpec
from prefixonce.step import DecodeStep, Mode, Path, PrefixGroup, Segment
from prefixonce.traffic import attention_flops, kv_token_bytes, step_traffic

SPEC = HeadSpec(32, 8, 128)


def step(batch=256, prefix=8192, suffix=0):
    group = PrefixGroup(tuple(range(batch)), prefix, (Segment(0, prefix),))
    return DecodeStep((prefix + suffix,) * batch, 32, 8, 128, (group,))


def traffic(mode, **shape):
    return step_traffic(SPEC, step(**shape), choose(step(**shape), mode, Limits()))


def test_one_launch_of_256_requests_reads_a_230th():
    """8.59 GB when every request reads its prefix; 33.55 MB, and 2.1 MB each of query and output, when one does."""
    paged, shared = traffic(Mode.PAGED), traffic(Mode.CASCADE)
    assert paged.prefix_kv_bytes == 8_589_934_592
    assert shared.prefix_kv_bytes == 33_554_432
    assert shared.qo_bytes == 2 * 2_097_152
    assert 226 < paged.kv_bytes / (shared.kv_bytes + shared.qo_bytes) < 229
    assert (paged.prefix_reads, shared.prefix_reads) == (256, 1)


def test_flops_do_not_depend_on_the_path():
    assert traffic(Mode.PAGED).flops == traffic(Mode.DENSE).flops == 4 * 256 * 32 * 8192 * 128
    assert attention_flops(SPEC, 256, 8192) == traffic(Mode.PAGED).flops


def test_suffix_bytes_are_the_same_on_every_path():
    for mode in (Mode.STOCK, Mode.PAGED, Mode.CASCADE, Mode.DENSE):
        assert traffic(mode, suffix=256).suffix_kv_bytes == 256 * 256 * 4096


def test_partials_cost_only_where_something_is_merged():
    assert traffic(Mode.PAGED).partial_bytes == 0
    one, two = (
        step_traffic(SPEC, step(), choose(step(), Mode.DENSE, Limits()), prefix_splits=splits).partial_bytes
        for splits in (1, 2)
    )
    assert (one, two) == (256 * 2 * 2 * 4 * 32 * 129, 256 * 3 * 2 * 4 * 32 * 129)


def test_mixed_groups():
    first, second = PrefixGroup((0, 1), 100, (Segment(0, 100),)), PrefixGroup((2, 3, 4), 50, (Segment(200, 50),))
    mixed = DecodeStep((110, 110, 60, 60, 60, 7), 32, 8, 128, (first, second))
    choice = dataclasses.replace(choose(mixed, Mode.CASCADE, Limits()), paths=(Path.CASCADE, Path.STOCK))
    token = kv_token_bytes(SPEC)
    modelled = step_traffic(SPEC, mixed, choice)
    assert modelled.prefix_kv_bytes == (100 + 3 * 50) * token
    assert modelled.suffix_kv_bytes == (2 * 10 + 3 * 10 + 7) * token
    assert modelled.prefix_reads == 1 + 3
    assert modelled.total_bytes == modelled.kv_bytes + modelled.qo_bytes + modelled.partial_bytes


def test_fp8_halves_the_kv_bytes():
    assert kv_token_bytes(SPEC) == 2 * kv_token_bytes(dataclasses.replace(SPEC, kv_dtype="float8_e4m3fn")) == 4096
