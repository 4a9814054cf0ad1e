"""How the peers are called: FlashInfer's real signatures with its arithmetic done by the reference, torch's packing."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import flashinfer
import pytest
import torch
from torch import Tensor

from prefixbench.measures.kernel import flashinfer_peers, registry, torch_peers
from prefixbench.measures.kernel.inputs import Shape, make_inputs
from prefixbench.measures.kernel.oracle import judge, oracle
from prefixonce import reference

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = Shape(64, 10, 4, 8, 2, 16, 16, "bfloat16", "shared-contiguous")


class ReferenceWrapper:
    """A FlashInfer wrapper whose calls are bound to the real signatures and answered by the fp64 reference."""

    real: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        inspect.signature(self.real.__init__).bind(self, *args, **options)

    def plan(self, *args: Any, **options: Any) -> None:
        bound = inspect.signature(self.real.plan).bind(self, *args, **options)
        bound.apply_defaults()
        self.planned = bound.arguments

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        inspect.signature(self.real.run).bind(self, q, cache, **options)
        planned = self.planned
        indptr, indices, last = (planned[name] for name in self.page_table)
        queries = planned.get("qo_indptr", torch.arange(len(indptr)))
        outs, lses = [], []
        for i in range(len(indptr) - 1):
            pages = indices[int(indptr[i]) : int(indptr[i + 1])].long()
            tokens = (len(pages) - 1) * planned["page_size"] + int(last[i])
            k, v = (pool[pages].flatten(0, 1)[:tokens] for pool in cache)
            rows = q[int(queries[i]) : int(queries[i + 1])]
            out, lse = reference.attention(rows, k, v, scale=planned["sm_scale"])
            outs.append(out.to(q.dtype))
            lses.append((lse / math.log(2)).float())
        return torch.cat(outs), torch.cat(lses)

    page_table: tuple[str, str, str]


class Decode(ReferenceWrapper):
    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    page_table = ("indptr", "indices", "last_page_len")


class Prefill(ReferenceWrapper):
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    page_table = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")

    def plan(self, *args: Any, **options: Any) -> None:
        super().plan(*args, **options)
        assert self.planned["causal"] is False


def single_prefill(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    inspect.signature(flashinfer.single_prefill_with_kv_cache).bind(q, k, v, **options)
    assert not options["causal"]
    out, lse = reference.attention(q, k, v, scale=options["sm_scale"])
    return out.to(q.dtype), (lse / math.log(2)).float()


def merge_in_place(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    ln2 = math.log(2)
    merged = reference.merge(
        reference.Partial(out.double(), lse.double() * ln2),
        reference.Partial(other_out.double(), other_lse.double() * ln2),
    )
    out.copy_(merged.out)
    lse.copy_(merged.lse / ln2)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "BatchDecodeWithPagedKVCacheWrapper", Decode)
    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Prefill)
    monkeypatch.setattr(flashinfer, "single_prefill_with_kv_cache", single_prefill)
    monkeypatch.setattr(flashinfer, "merge_state_in_place", merge_in_place)
    monkeypatch.setattr(flashinfer_peers, "_WORKSPACE_BYTES", 16)


@pytest.mark.parametrize("layout", ["shared-contiguous", "shared-slots", "unique"])
@pytest.mark.parametrize(("prefix", "suffix"), [(64, 10), (64, 0), (0, 10)])
def test_flashinfer_is_planned_over_the_right_pages(
    answered: None, monkeypatch: pytest.MonkeyPatch, layout: str, prefix: int, suffix: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = SHAPE._replace(layout=layout, prefix_tokens=prefix, suffix_tokens=suffix)
    inputs = make_inputs(shape, sets=2, device=CPU, seed=5)
    truth = oracle(inputs)
    serving = [found for found in flashinfer_peers.implementations() if found.unsupported(shape, GPU) is None]
    for found in serving:
        ready = found.prepare(inputs)
        verdict = judge(ready.result(ready.run(0)), truth, shape.keys)
        assert verdict.passed, (found.name, verdict)
        assert not judge(ready.result(ready.run(1)), truth, shape.keys).passed, "data set 1 is another"
    kinds = {found.name.removeprefix("flashinfer-").partition("-")[0] for found in serving}
    shared = layout != "unique" and prefix > 0
    expected = {"decode"}
    expected |= {"cascade"} if shared and suffix else set()
    expected |= {"paged"} if shared and not suffix else set()
    expected |= {"single"} if shared and not suffix and layout == "shared-contiguous" else set()
    assert kinds == expected


def test_fa3_is_offered_on_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    peers = {found.name: found for found in flashinfer_peers.implementations()}
    assert peers["flashinfer-cascade-fa2"].unsupported(SHAPE, GPU) is None
    assert peers["flashinfer-cascade-fa3"].unsupported(SHAPE, GPU) == "fa3 needs a Hopper GPU"


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("bhmd,bhld->bhml", q.double(), k.double()) * scale
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("bhml,bhld->bhmd", torch.exp(scores - lse.unsqueeze(-1)), v.double())
    return out.to(q.dtype), lse.float()


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("is_merged", [True, False])
def test_queries_are_packed_and_splits_merged_back(
    monkeypatch: pytest.MonkeyPatch, splits: int, is_merged: bool
) -> None:
    shape = SHAPE._replace(suffix_tokens=0, prefix_tokens=512)
    inputs = make_inputs(shape, sets=1, device=CPU, seed=2)
    monkeypatch.setattr(torch_peers, "_cudnn", plain_attention)
    monkeypatch.setattr(torch_peers, "_trial_us", lambda inputs, n: abs(n - splits))
    ready = torch_peers._split(is_merged, inputs)
    assert ready.note == {"splits": splits, "merge_timed": is_merged}
    ran = ready.run(0)
    assert isinstance(ran, tuple)
    assert len(ran[0]) == (1 if is_merged else splits)
    assert judge(ready.result(ran), oracle(inputs), shape.keys).passed


def test_plain_attention_is_unpacked_too() -> None:
    inputs = make_inputs(SHAPE._replace(suffix_tokens=0), sets=1, device=CPU, seed=2)
    ready = torch_peers._plain(plain_attention, inputs)
    assert judge(ready.result(ready.run(0)), oracle(inputs), inputs.shape.keys).passed


def test_torchs_own_operators_take_our_arguments() -> None:
    """Meta tensors run the operators' shape functions: wrong names or order of arguments raise."""
    meta = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k = meta(2, 2, 16, 64), meta(2, 2, 64, 64)
    out, lse = torch_peers._flash(q, k, k, 0.125)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [argument.name for argument in schema.arguments][:5] == [
        "query",
        "key",
        "value",
        "attn_bias",
        "compute_log_sumexp",
    ]
    assert schema.arguments[-1].name == "scale"


def test_peers_need_a_gpu_and_every_name_is_found() -> None:
    names = [name for name in registry.implementations() if name not in ("paged", "cascade", "dense")]
    assert len(names) == 12
    shape = SHAPE._replace(suffix_tokens=0)
    refusals = {name: registry.named(name).unsupported(shape, CPU) for name in names}
    assert {reason for name, reason in refusals.items() if "cascade" not in name} == {"it needs a CUDA GPU"}
