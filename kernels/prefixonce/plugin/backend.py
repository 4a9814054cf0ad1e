"""The attention backend: decode steps with shared prefixes run our kernels, all others the wrapped stock backend."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from prefixonce.errors import UnsupportedError
from prefixonce.plugin.kernels import Kernels
from prefixonce.plugin.runtime import Runtime
from prefixonce.step import Path, PrefixGroup


class GraphChoice(Protocol):
    """Which recorded set of launches the step in hand is for; None is the stock backend's own graph."""

    current: Any


class PrefixOnceBackend(AttentionBackend):  # type: ignore[misc]
    """SGLang plans a step through `init_forward_metadata*` and then calls `forward_decode` once per layer."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, stock: Any, kernels: Kernels, runtime: Runtime, graphs: GraphChoice) -> None:
        super().__init__()
        self.stock = stock
        # SGLang reads both attributes from whichever backend is active.
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._kernels = kernels
        self._runtime = runtime
        self._graphs = graphs
        self._shared: tuple[PrefixGroup, ...] = ()
        self._plan: Any = None

    def __getattr__(self, name: str) -> Any:
        """Whatever SGLang asks of special backends is the stock backend's to answer."""
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if self._stock_serves(forward_batch):
            self.stock.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture and self._graphs.current is not None:
            table = self.req_to_token_pool.req_to_token
            self._shared = ()
            self._plan = self._kernels.plan_capture(self._graphs.current, table, forward_batch.req_pool_indices)
            return
        if self._stock_serves(forward_batch):
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if self._plan is None:
            self.stock.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.stock.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        value: int = self.stock.get_cuda_graph_seq_len_fill_value()
        return value

    def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
        return self.stock.forward_extend(*args, **kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        with self._runtime.timers.span("attention_s"):
            if self._plan is not None:
                return self._forward_shared(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
            out: Tensor = self.stock.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return out

    def _forward_shared(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> Tensor:
        unknown = [name for name, value in extras.items() if value is not None]
        if unknown:
            raise UnsupportedError(f"the model passes {unknown[0]!r} to attention; allowed: plain q, k, v")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        heads, head_dim = layer.tp_q_head_num, layer.head_dim
        queries = q.reshape(-1, heads, head_dim)
        out = queries.new_empty(queries.shape)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        keys, values = self._runtime.settings.fault.corrupt(self._shared, keys, values)
        self._kernels.run(
            self._plan, queries, keys, values, scale=layer.scaling, soft_cap=float(layer.logit_cap or 0.0), out=out
        )
        return out.view(-1, heads * head_dim)

    def _stock_serves(self, forward_batch: Any) -> bool:
        """Plans the step; true if the wrapped backend has to plan it instead."""
        self._plan = self._graphs.current = None
        if not forward_batch.forward_mode.is_decode() or forward_batch.seq_lens_cpu is None:
            return True
        rows = forward_batch.batch_size - (getattr(forward_batch, "num_padding", None) or 0)
        planned = self._runtime.take(forward_batch.seq_lens_cpu[:rows].numpy(), self._kernels.fits)
        self._runtime.settings.fault.delay()
        if planned is None or planned.choice.path is Path.STOCK:
            return True
        began_s = perf_counter()
        self._shared = planned.sharing.groups
        self._plan = self._graphs.current = self._kernels.plan(
            planned.step,
            planned.choice,
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices[:rows],
            padded_batch=forward_batch.batch_size,
        )
        self._runtime.counters.plan_s += perf_counter() - began_s
        return False
