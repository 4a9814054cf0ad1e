"""Bytes and FLOPs that each path must move for one layer of a decode step; pure formulas, no torch.

Bytes are what the algorithm asks of the memory system when nothing is cached: each K/V element once per reader, the
query and the output once, fp32 partials written and read back. Hardware counters are compared with these.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixonce.limits import FP8, HeadSpec
from prefixonce.step import Choice, DecodeStep, Path

_SHARED = (Path.CASCADE, Path.DENSE)
_PARTIAL_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """Modelled work of one layer. `kv_bytes` is K and V, `qo_bytes` query and output, `partial_bytes` both ways."""

    prefix_kv_bytes: int
    suffix_kv_bytes: int
    qo_bytes: int
    partial_bytes: int
    flops: int
    prefix_reads: int

    @property
    def kv_bytes(self) -> int:
        return self.prefix_kv_bytes + self.suffix_kv_bytes

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.qo_bytes + self.partial_bytes


def kv_token_bytes(spec: HeadSpec) -> int:
    """K and V of one token in one layer."""
    return 2 * spec.num_kv_heads * spec.head_dim * (1 if spec.kv_dtype == FP8 else 2)


def attention_flops(spec: HeadSpec, query_rows: int, keys: int) -> int:
    """Two products of `query_rows x keys x head_dim` for every query head; a multiply-add counts two."""
    return 4 * query_rows * spec.num_q_heads * keys * spec.head_dim


def step_traffic(spec: HeadSpec, step: DecodeStep, choice: Choice, prefix_splits: int = 1) -> Traffic:
    """What the chosen paths move. A group that is not shared reads its prefix once per row.

    `prefix_splits` is the number of fp32 partials per shared row (each of head_dim + 1 words, written and read).
    """
    token_bytes = kv_token_bytes(spec)
    shared = [(g, p) for g, p in zip(step.groups, choice.paths, strict=True) if p in _SHARED]
    prefix_bytes = sum(group.prefix_tokens for group, _ in shared) * token_bytes
    covered = sum(group.prefix_tokens * len(group.rows) for group, _ in shared)
    unshared = [(g, p) for g, p in zip(step.groups, choice.paths, strict=True) if p not in _SHARED]
    reread = sum(group.prefix_tokens * len(group.rows) for group, _ in unshared) * token_bytes
    own_bytes = (sum(step.seq_lens) - covered) * token_bytes - reread
    merged_rows = sum(len(group.rows) for group, _ in shared)
    partial_row_bytes = 2 * _PARTIAL_BYTES * spec.num_q_heads * (spec.head_dim + 1)
    return Traffic(
        prefix_kv_bytes=prefix_bytes + reread,
        suffix_kv_bytes=own_bytes,
        qo_bytes=2 * 2 * step.batch_size * spec.num_q_heads * spec.head_dim,
        partial_bytes=merged_rows * (prefix_splits + 1) * partial_row_bytes if shared else 0,
        flops=sum(attention_flops(spec, 1, length) for length in step.seq_lens),
        prefix_reads=len(shared) + sum(len(group.rows) for group, _ in unshared),
    )
