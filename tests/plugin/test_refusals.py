"""Every option and model that would be served wrongly is refused by name; the same server without it is not."""

import dataclasses
import types

import pytest
import torch
from torch import nn

from prefixonce.errors import UnsupportedError

pytestmark = pytest.mark.engine


def server_args(**changed):
    """SGLang's own defaults, as they are after its checks on a CUDA machine."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.server_args import ServerArgs

    values = {field.name: field.default for field in dataclasses.fields(ServerArgs)}
    values |= {"attention_backend": "flashinfer", "decode_attention_backend": "prefixonce"}
    values |= {"radix_cache_backend": "prefixonce", "cuda_graph_config": CudaGraphConfig(decode=PhaseConfig("full"))}
    unknown = set(changed) - set(values)
    assert not unknown, f"SGLang has no option {unknown}"
    return types.SimpleNamespace(**(values | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"attention_backend": "fa3"},
        {"enable_mixed_chunk": True},
        {"disable_overlap_schedule": True},
        {"tp_size": 4},
        {"page_size": 64},
        {"enable_lora": True},
        {"enable_metrics": True},
        {"dtype": "float16"},
        {"radix_cache_backend": None, "decode_attention_backend": None, "speculative_algorithm": "EAGLE"},
    ],
)
def test_what_is_supported_or_none_of_our_business_starts(changed):
    from prefixonce.plugin.sglang_0516.refusals import check_server_args

    check_server_args(server_args(**changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_backend": "trtllm_mha"}, "trtllm_mha cannot be wrapped"),
        ({"attention_backend": "prefixonce"}, "serves decode only"),
        ({"prefill_attention_backend": "prefixonce"}, "serves decode only"),
        ({"decode_attention_backend": None}, "belong together"),
        ({"radix_cache_backend": None}, "belong together"),
        ({"disable_radix_cache": True}, "no prefix cache"),
        ({"enable_hierarchical_cache": True}, "HiCache"),
        ({"enable_lmcache": True}, "LMCache"),
        ({"enable_flexkv": True}, "FlexKV"),
        ({"enable_hisparse": True}, "hierarchical sparse attention"),
        ({"enable_unified_memory": True}, "unified memory pool"),
        ({"enable_page_major_kv_layout": True}, "page-major"),
        ({"prefill_only_disable_kv_cache": True}, "no KV cache"),
        ({"kv_canary": "log"}, "KV canary"),
        ({"enable_streaming_session": True}, "streaming sessions"),
        ({"enable_session_radix_cache": True}, "session cache"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"speculative_algorithm": "NGRAM"}, "speculative decoding"),
        ({"dllm_algorithm": "LowConfidence"}, "diffusion decoding"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "quantised KV cache"),
        ({"disaggregation_mode": "decode"}, "prefill/decode disaggregation"),
        ({"enable_dp_attention": True}, "data-parallel attention"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_pdmux": True}, "multiplexing"),
        ({"enable_deterministic_inference": True}, "deterministic inference"),
        ({"enable_torch_compile": True}, "torch.compile"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
    ],
)
def test_an_option_that_would_be_served_wrongly_is_named(changed, words):
    from prefixonce.plugin.sglang_0516.refusals import check_server_args

    with pytest.raises(UnsupportedError, match=words) as refusal:
        check_server_args(server_args(**changed))
    assert "\n" not in str(refusal.value)


def test_decode_graphs_in_pieces_are_named():
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from prefixonce.plugin.sglang_0516.refusals import check_server_args

    args = server_args(cuda_graph_config=CudaGraphConfig(decode=PhaseConfig("breakable")))
    with pytest.raises(UnsupportedError, match="decode graphs in pieces"):
        check_server_args(args)


def runner(*, layer=None, second_layer=None, pool=None, mla=False, parameter=None):
    """A loaded model of two layers as far as the plugin looks at it."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    plain = {"num_heads": 8, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2}
    model = nn.Module()
    model.first = RadixAttention(**plain | (layer or {}), layer_id=0)
    model.second = RadixAttention(**plain | (second_layer or layer or {}), layer_id=1)
    if parameter is not None:
        model.register_parameter(parameter, nn.Parameter(torch.zeros(1)))
    kv = MHATokenToKVPool.__new__(MHATokenToKVPool)
    buffers = [torch.zeros(4, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    vars(kv).update({"kv_cache_layout": "nhd", "dtype": torch.bfloat16, "k_buffer": buffers, "v_buffer": buffers})
    vars(kv).update(pool or {})
    return types.SimpleNamespace(use_mla_backend=mla, token_to_kv_pool=kv, model=model, dtype=torch.bfloat16)


def test_the_shape_of_a_supported_model_is_read():
    from prefixonce.plugin.runtime import ModelShape
    from prefixonce.plugin.sglang_0516.refusals import shape_of_model

    assert shape_of_model(runner()) == ModelShape(8, 2, 64, kv_token_bytes=2 * 2 * 2 * 64 * 2)
    assert shape_of_model(runner(layer={"logit_cap": 30.0})).head_dim == 64


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mla": True}, "latent attention"),
        ({"layer": {"sliding_window_size": 128}}, "sliding-window attention"),
        ({"layer": {"is_cross_attention": True}}, "cross or encoder attention"),
        ({"layer": {"attn_type": "encoder"}}, "cross or encoder attention"),
        ({"layer": {"v_head_dim": 32}}, "V heads of 32"),
        ({"layer": {"logit_cap": 30.0, "logit_capping_method": "rpc"}}, "soft cap"),
        ({"layer": {"pos_encoding_mode": "ALIBI"}}, "position encoding"),
        ({"layer": {"use_irope": True}}, "scale depends on the position"),
        ({"second_layer": {"num_heads": 4}}, "layers of 2 shapes"),
        ({"pool": {"kv_cache_layout": "hnd"}}, "another layout"),
        ({"pool": {"dtype": torch.float8_e4m3fn}}, "float8_e4m3fn under a model in"),
        ({"parameter": "sinks"}, "attention sinks"),
    ],
)
def test_a_model_that_would_be_served_wrongly_is_named(changed, words):
    from sglang.srt.layers.radix_attention import AttentionType

    from prefixonce.plugin.sglang_0516.refusals import shape_of_model

    if "attn_type" in changed.get("layer", {}):
        changed = {"layer": {"attn_type": AttentionType.ENCODER_ONLY}}
    with pytest.raises(UnsupportedError, match=words) as refusal:
        shape_of_model(runner(**changed))
    assert "\n" not in str(refusal.value)
