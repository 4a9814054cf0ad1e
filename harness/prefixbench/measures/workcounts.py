"""Counts the work that a decode step is planned to be: integers that no machine's speed enters, so that any can judge.

Everything is made by the code that serves: radix paths -> groups -> choice -> prefix and suffix plan -> traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixonce import workplan
from prefixonce.dispatch import Limits, choose
from prefixonce.limits import HeadSpec
from prefixonce.planner import Overlap, StepPlanner
from prefixonce.plugin.grouping import Chain, Link, group_rows
from prefixonce.step import DecodeStep, Mode, Path, Piece, Segment, SlotPiece
from prefixonce.traffic import kv_token_bytes, step_traffic

Counts = dict[str, dict[str, int]]
"""Metrics of each "<step>/<mode>"."""

MORE_IS_BETTER = frozenset({"prefix_tokens_saved"})
NEITHER_IS_BETTER = frozenset({"groups", "cascade_groups", "prefix_thread_blocks"})
"""Every metric of neither set is work, of which less is better."""


@dataclass(frozen=True)
class _Batch:
    """The rows of one step: the radix path of each, and how many tokens each has below it."""

    chains: list[Chain]
    own_tokens: list[int]

    def step(self, spec: HeadSpec) -> DecodeStep:
        lengths = (chain[-1].end_tokens if chain else 0 for chain in self.chains)
        seq_lens = tuple(shared + own for shared, own in zip(lengths, self.own_tokens, strict=True))
        return DecodeStep(seq_lens, spec.num_q_heads, spec.num_kv_heads, spec.head_dim, groups=group_rows(self.chains))


def count_all(design: Mapping[str, Any]) -> Counts:
    """Counts of every step and mode of conf/workcounts.yaml."""
    specs = {name: HeadSpec(*heads) for name, heads in design["shapes"].items()}
    planners = {
        name: StepPlanner(spec, max_batch=design["max_batch"], max_tokens=1, device="cpu", num_ctas=design["num_ctas"])
        for name, spec in specs.items()
    }
    return {
        f"{name}/{mode}": count(_batch(asked["requests"], design["nodes"]), Mode.parse(mode), planners[asked["shape"]])
        for name, asked in design["steps"].items()
        for mode in design["modes"]
    }


def count(batch: _Batch, mode: Mode, planner: StepPlanner) -> dict[str, int]:
    """Metrics of one step: planned launches and work of the kernels per layer, modelled bytes, size of the plan."""
    spec, geometry = planner.spec, planner.geometry
    step = batch.step(spec)
    choice = choose(step, mode, Limits())
    size = workplan.prefix_size(step, choice, geometry)
    shared = workplan.shared_groups(step, choice)
    saved = sum((len(group.rows) - 1) * group.prefix_tokens for group, _ in shared)
    own = sum(step.seq_lens) - sum(len(group.rows) * group.prefix_tokens for group, _ in shared)
    num_ctas = Overlap().prefix_ctas(size, own * kv_token_bytes(spec), geometry.num_ctas)
    prefix = workplan.plan_prefix(step, choice, geometry, num_ctas)
    suffix = workplan.plan_suffix(step.seq_lens, prefix, planner.suffix_capacity(step.batch_size))
    partials = np.diff(prefix.source_indptr)
    moved = step_traffic(spec, step, choice, prefix_splits=int(partials.max(initial=0)))
    needs_merge = int(suffix.items[:, 3].sum()) < step.batch_size
    passes = (len(prefix.dense.items), len(prefix.gather.items), len(suffix.items), needs_merge)
    return {
        "groups": len(step.groups),
        "prefix_tokens_saved": saved,
        "launches": sum(map(bool, passes)),
        "cascade_groups": sum(path is Path.CASCADE for _, path in shared),
        "query_tiles": size.tiles,
        "prefix_items": len(prefix.dense.items) + len(prefix.gather.items),
        "prefix_thread_blocks": _busy(prefix.dense) + _busy(prefix.gather),
        "prefix_longest_thread_block": _longest(prefix.dense, geometry) + _longest(prefix.gather, geometry),
        "prefix_key_blocks": _key_blocks(prefix.dense, geometry) + _key_blocks(prefix.gather, geometry),
        "prefix_partial_rows": prefix.partial_rows,
        "most_partials_of_a_row": int(partials.max(initial=0)),
        "suffix_items": len(suffix.items),
        "suffix_longest_item": int(suffix.items[:, 2].max(initial=0)),
        "copied_slot_lists": len(prefix.copies) + len(suffix.copies),
        "packed_slots": suffix.packed_tokens,
        "kv_bytes": moved.kv_bytes,
        "partial_bytes": moved.partial_bytes,
        "total_bytes": moved.total_bytes,
        "flops": moved.flops,
    }


def _batch(requests: Sequence[Mapping[str, Any]], nodes: Mapping[str, tuple[int, str]]) -> _Batch:
    made: dict[str, tuple[int, Piece]] = {}
    chains: list[Chain] = []
    own_tokens: list[int] = []
    first_slot = 0

    def link(key: str, name: str, start_tokens: int) -> Link:
        nonlocal first_slot
        tokens, layout = nodes[name]
        if key not in made:
            is_run = layout == "contiguous"
            made[key] = (len(made) + 1, Segment(first_slot, tokens) if is_run else _loose(first_slot, tokens))
            first_slot += 2 * tokens  # a gap behind each node, so that no two are one run by chance
        node_id, piece = made[key]
        return Link(node_id, start_tokens + tokens, piece)

    for index, asked in enumerate(requests):
        for copy in range(asked.get("copies", 1)):
            chain: Chain = ()
            for depth, name in enumerate(asked["path"]):
                is_last = depth == len(asked["path"]) - 1
                key = f"{index}/{copy}/{name}" if is_last else name
                chain = (*chain, link(key, name, chain[-1].end_tokens if chain else 0))
            chains += [chain] * asked["count"]
            own_tokens += _spread(asked["own"], asked["count"])
    return _Batch(chains, own_tokens)


def _loose(first_slot: int, tokens: int) -> SlotPiece:
    return SlotPiece(torch.arange(first_slot, first_slot + 2 * tokens, 2), tokens)


def _spread(own: int | Sequence[int], count: int) -> list[int]:
    first, last = (own, own) if isinstance(own, int) else own
    return [first + (last - first) * row // max(1, count - 1) for row in range(count)]


def _busy(items: workplan.ItemList) -> int:
    return int((np.diff(items.cta_indptr) > 0).sum())


def _longest(items: workplan.ItemList, geometry: workplan.Geometry) -> int:
    """Key blocks of the thread block that has most: what the pass waits for."""
    return max((sum(blocks) for blocks in _blocks(items, geometry)), default=0)


def _key_blocks(items: workplan.ItemList, geometry: workplan.Geometry) -> int:
    return sum(sum(blocks) for blocks in _blocks(items, geometry))


def _blocks(items: workplan.ItemList, geometry: workplan.Geometry) -> Iterator[list[int]]:
    """Key blocks of every item, by thread block."""
    blocks = -(-items.items[:, 4] // geometry.block_tokens)
    for begin, end in zip(items.cta_indptr, items.cta_indptr[1:], strict=False):
        yield blocks[begin:end].tolist()
