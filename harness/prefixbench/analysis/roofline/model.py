"""Roofline model of a decode step: bytes over bandwidth, FLOPs over rate, and a fixed cost where one was measured.

On paper (`PAPER`) every rate is the ceiling and nothing else costs time: a bound, not a forecast. With the
efficiencies fitted to measured kernels and steps (`roofline_fit`) it forecasts, with the residuals as error bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PathName = Literal["stock", "cascade", "dense", "full", "auto"]
PATHS: tuple[PathName, ...] = ("stock", "cascade", "full", "auto")
DENSE_M_EFF = 1024  # the seed's rule for `full`, fitted on an A100


@dataclass(frozen=True)
class Ceilings:
    """One GPU: bytes/s of a device copy, FLOP/s of a large matmul, bytes/s of re-reading shared pages through L2."""

    name: str
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    l2_bytes_per_s: float
    memory_bytes: float
    source: str


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLP and grouped-query attention; counts are of the whole model."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    element_bytes: int = 2

    @property
    def matmul_parameters(self) -> int:
        """What every token is multiplied with: attention and MLP of each layer, and the output head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        return self.element_bytes * (self.matmul_parameters + self.hidden * self.vocab)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True)
class Load:
    """What decodes at once: `suffix_tokens` is the mean unique part of a request, its output so far included."""

    prefix_tokens: int
    suffix_tokens: int
    concurrency: int
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Attention:
    """One layer of one GPU."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2

    def kv_bytes(self, tokens: float) -> float:
        return 2 * tokens * self.kv_heads * self.head_dim * self.element_bytes

    def flops(self, queries: int, tokens: float) -> float:
        return 4 * queries * tokens * self.heads * self.head_dim


@dataclass(frozen=True)
class Term:
    """seconds = fixed + ideal / efficiency."""

    fixed_s: float = 0.0
    efficiency: float = 1.0

    def seconds(self, ideal_s: float) -> float:
        return self.fixed_s + ideal_s / self.efficiency if ideal_s > 0 else 0.0


@dataclass(frozen=True)
class Efficiencies:
    """One term per kind of work: attention per layer and launch, the rest of the step once."""

    dense: Term = Term()
    cascade: Term = Term()
    suffix: Term = Term()
    stock: Term = Term()
    rest: Term = Term()


PAPER = Efficiencies()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decode step. `prefix_s` is attention over the shared prefix, all layers."""

    path: PathName
    rest_s: float
    prefix_s: float
    suffix_s: float
    concurrency: int

    @property
    def total_s(self) -> float:
        return self.rest_s + self.prefix_s + self.suffix_s

    @property
    def tok_s(self) -> float:
        return self.concurrency / self.total_s

    @property
    def prefix_share(self) -> float:
        return self.prefix_s / self.total_s


def step_time(gpu: Ceilings, model: ModelShape, load: Load, path: PathName, found: Efficiencies = PAPER) -> StepTime:
    """The model's step time; `full` follows the M_eff rule, `auto` takes the fastest path."""
    if path == "auto":
        options = [step_time(gpu, model, load, p, found) for p in ("stock", "cascade", "dense")]
        best = min(options, key=lambda step: step.total_s)
        return StepTime("auto", best.rest_s, best.prefix_s, best.suffix_s, best.concurrency)
    kernel = path
    if path == "full":
        kernel = "dense" if load.concurrency * model.heads // model.kv_heads >= DENSE_M_EFF else "cascade"
    layer = Attention(
        max(1, model.heads // load.tensor_parallel),
        max(1, model.kv_heads // load.tensor_parallel),
        model.head_dim,
        model.element_bytes,
    )
    prefix_s = prefix_seconds(gpu, layer, load.prefix_tokens, load.concurrency, kernel, found)
    suffix_s = suffix_seconds(gpu, layer, load.suffix_tokens, load.concurrency, found)
    return StepTime(
        path=path,
        rest_s=found.rest.seconds(rest_ideal_s(gpu, model, load)),
        prefix_s=model.layers * prefix_s,
        suffix_s=model.layers * suffix_s,
        concurrency=load.concurrency,
    )


def prefix_seconds(
    gpu: Ceilings, layer: Attention, prefix: int, batch: int, kernel: str, found: Efficiencies = PAPER
) -> float:
    """One layer's attention over the shared prefix. Stock re-reads it for every request, mostly through L2."""
    term = {"stock": found.stock, "cascade": found.cascade, "dense": found.dense}[kernel]
    return term.seconds(prefix_ideal_s(gpu, layer, prefix, batch, kernel))


def prefix_ideal_s(gpu: Ceilings, layer: Attention, prefix: int, batch: int, kernel: str) -> float:
    compute_s = layer.flops(batch, prefix) / gpu.matmul_flops_per_s
    once_s = layer.kv_bytes(prefix) / gpu.copy_bytes_per_s
    if kernel == "stock":
        return max(compute_s, once_s, batch * layer.kv_bytes(prefix) / gpu.l2_bytes_per_s)
    return max(compute_s, once_s)


def suffix_seconds(gpu: Ceilings, layer: Attention, suffix: int, batch: int, found: Efficiencies = PAPER) -> float:
    return found.suffix.seconds(suffix_ideal_s(gpu, layer, suffix, batch))


def suffix_ideal_s(gpu: Ceilings, layer: Attention, suffix: int, batch: int) -> float:
    return batch * layer.kv_bytes(suffix) / gpu.copy_bytes_per_s


def unique_seconds(gpu: Ceilings, layer: Attention, tokens: int, batch: int) -> float:
    """One layer's attention when every request has its own copy: nothing comes from L2."""
    return batch * layer.kv_bytes(tokens) / gpu.copy_bytes_per_s


def rest_ideal_s(gpu: Ceilings, model: ModelShape, load: Load) -> float:
    """Everything but attention: the weights are read once and multiplied with every token."""
    read_s = model.weight_bytes / gpu.copy_bytes_per_s
    compute_s = 2 * model.matmul_parameters * load.concurrency / gpu.matmul_flops_per_s
    return max(read_s, compute_s) / load.tensor_parallel


def memory_bytes(model: ModelShape, load: Load, largest_suffix: int) -> float:
    """Weights and K/V of one GPU."""
    tokens = load.prefix_tokens + load.concurrency * largest_suffix
    return (model.weight_bytes + tokens * model.kv_bytes_per_token) / load.tensor_parallel
