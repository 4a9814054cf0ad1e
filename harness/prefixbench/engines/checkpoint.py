"""Writes a tiny Llama checkpoint whose random weights are large enough for attention to reach the output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from prefixbench.errors import UsageError

# SGLang's dummy weights are so small that wiping the whole K/V cache changes no log-probability.
EMBEDDING_STD = 1.0
ATTENTION_STD = 0.12
MLP_STD = 0.02


def write_tiny(
    directory: Path | str,
    *,
    seed: int,
    hidden: int = 256,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 32000,
    intermediate: int = 512,
    max_context: int = 32768,
) -> Path:
    """Writes `config.json` and `model.safetensors` (float32) of a Llama; the same arguments give the same bytes."""
    if heads % kv_heads:
        raise UsageError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; choose a divisor of the head count")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    shapes = _shapes(hidden, layers, heads * head_dim, kv_heads * head_dim, vocab, intermediate)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if std is None else torch.randn(shape, generator=generator) * std
        for name, shape, std in shapes
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _shapes(
    hidden: int, layers: int, q_width: int, kv_width: int, vocab: int, intermediate: int
) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """Yields (name, shape, standard deviation); `None` is a norm's weight, which stays 1."""
    yield "model.embed_tokens.weight", (vocab, hidden), EMBEDDING_STD
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (q_width, hidden), ATTENTION_STD
        yield f"{prefix}.self_attn.k_proj.weight", (kv_width, hidden), ATTENTION_STD
        yield f"{prefix}.self_attn.v_proj.weight", (kv_width, hidden), ATTENTION_STD
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_width), ATTENTION_STD
        yield f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden), MLP_STD
        yield f"{prefix}.mlp.up_proj.weight", (intermediate, hidden), MLP_STD
        yield f"{prefix}.mlp.down_proj.weight", (hidden, intermediate), MLP_STD
        yield f"{prefix}.input_layernorm.weight", (hidden,), None
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), None
    yield "model.norm.weight", (hidden,), None
    yield "lm_head.weight", (vocab, hidden), ATTENTION_STD
