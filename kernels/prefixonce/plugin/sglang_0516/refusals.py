"""What this version does not serve, refused by name before the first request."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from prefixonce.errors import UnsupportedError
from prefixonce.plugin.runtime import ModelShape

NAME = "prefixonce"


def check_server_args(server_args: Any) -> None:
    """Raises for options that the plugin would serve wrongly; silent if the plugin was not asked for."""
    if not asked_for(server_args):
        return
    if server_args.decode_attention_backend != NAME or server_args.radix_cache_backend != NAME:
        raise UnsupportedError(
            f"--decode-attention-backend {NAME} and --radix-cache-backend {NAME} belong together; give both"
        )
    if NAME in (server_args.attention_backend, server_args.prefill_attention_backend):
        raise UnsupportedError(f"{NAME} serves decode only; name a stock backend with --attention-backend")
    if server_args.attention_backend not in _STOCK_BACKENDS:
        raise UnsupportedError(
            f"--attention-backend {server_args.attention_backend} cannot be wrapped by {NAME}; "
            f"allowed: {', '.join(_STOCK_BACKENDS)}"
        )
    for name, meaning, allowed in _OPTIONS:
        if attrgetter(name)(server_args) not in allowed:
            flag = "--" + name.replace("_", "-")
            raise UnsupportedError(f"{flag} ({meaning}) is not supported by {NAME}; leave it out")


def asked_for(server_args: Any) -> bool:
    names = (
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
        server_args.radix_cache_backend,
    )
    return NAME in names


# Others want the KV pool in a layout of their own, or are for models that are refused anyway.
_STOCK_BACKENDS = ("flashinfer", "fa3", "triton", "torch_native")

# Option, what it is in words, values under which the plugin may serve.
_OPTIONS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("disable_radix_cache", "no prefix cache", (False,)),
    ("enable_hierarchical_cache", "HiCache", (False,)),
    ("enable_lmcache", "LMCache", (False,)),
    ("enable_flexkv", "FlexKV", (False,)),
    ("enable_hisparse", "hierarchical sparse attention", (False,)),
    ("enable_unified_memory", "unified memory pool", (False,)),
    ("enable_page_major_kv_layout", "page-major KV layout", (False,)),
    ("prefill_only_disable_kv_cache", "no KV cache", (False,)),
    # It remembers which token every slot holds, and the plugin moves K/V between slots.
    ("kv_canary", "KV canary", ("none",)),
    ("enable_streaming_session", "streaming sessions", (False,)),
    ("enable_session_radix_cache", "session cache", (False,)),
    ("speculative_algorithm", "speculative decoding", (None,)),
    ("dllm_algorithm", "diffusion decoding", (None,)),
    ("kv_cache_dtype", "quantised KV cache", ("auto", "bf16", "bfloat16")),
    ("disaggregation_mode", "prefill/decode disaggregation", ("null",)),
    ("enable_dp_attention", "data-parallel attention", (False,)),
    ("enable_two_batch_overlap", "two-batch overlap", (False,)),
    ("enable_pdmux", "prefill/decode multiplexing", (False,)),
    ("cuda_graph_config.decode.backend", "decode graphs in pieces", ("full", "disabled")),
    ("enable_deterministic_inference", "deterministic inference", (False,)),
    ("enable_torch_compile", "torch.compile", (False,)),
    ("pp_size", "pipeline parallelism", (1,)),
    ("dcp_size", "decode context parallelism", (1,)),
    ("attn_cp_size", "context parallelism", (1,)),
)


def shape_of_model(runner: Any) -> ModelShape:
    """Checks the loaded model and its KV pool, layer by layer; returns what a decode step looks like on this rank."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if runner.use_mla_backend:
        raise UnsupportedError(f"multi-head latent attention is not supported by {NAME}; allowed: MHA and GQA models")
    pool = runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise UnsupportedError(
            f"KV pool {type(pool).__name__} is not supported by {NAME} (hybrid or quantised cache, or another layout)"
        )
    if pool.dtype != runner.dtype:
        raise UnsupportedError(f"K/V in {pool.dtype} under a model in {runner.dtype} is not supported by {NAME}")
    for name, _ in runner.model.named_parameters():
        if "sink" in name.rpartition(".")[2]:
            raise UnsupportedError(f"attention sinks ({name}) are not supported by {NAME}")
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    for layer in layers:
        _check_layer(layer, AttentionType.DECODER)
    shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedError(f"attention layers of {len(shapes)} shapes are not supported by {NAME}; allowed: one")
    num_q_heads, num_kv_heads, head_dim = shapes.pop()
    token_bytes = sum(buffer[0].nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    return ModelShape(num_q_heads, num_kv_heads, head_dim, token_bytes)


def _check_layer(layer: Any, decoder: object) -> None:
    problem = None
    if layer.sliding_window_size > -1:
        problem = f"sliding-window attention ({layer.sliding_window_size} tokens)"
    elif layer.is_cross_attention or layer.attn_type is not decoder:
        problem = "cross or encoder attention"
    elif layer.qk_head_dim != layer.v_head_dim:
        problem = f"K heads of {layer.qk_head_dim} and V heads of {layer.v_head_dim}"
    elif layer.logit_cap and layer.logit_capping_method != "tanh":
        problem = f"soft cap {layer.logit_capping_method!r}"
    elif layer.pos_encoding_mode != "NONE":
        problem = f"position encoding {layer.pos_encoding_mode!r} inside attention"
    elif layer.xai_temperature_len > 0 or layer.use_irope:
        problem = "attention whose scale depends on the position"
    if problem is not None:
        raise UnsupportedError(f"layer {layer.layer_id}: {problem} is not supported by {NAME}")
