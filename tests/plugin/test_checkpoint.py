"""The tiny checkpoint: reproducible, complete, and with weights that do not vanish."""

import json

import pytest
from safetensors.torch import load_file

from prefixbench.engines.checkpoint import ATTENTION_STD, EMBEDDING_STD, write_tiny
from prefixbench.errors import UsageError

SMALL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512, "intermediate": 96}


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    one, two, other = (
        write_tiny(tmp_path / name, seed=seed, **SMALL) / "model.safetensors"
        for name, seed in (("one", 5), ("two", 5), ("other", 6))
    )
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def test_weights_match_the_configuration_and_are_large(tmp_path):
    directory = write_tiny(tmp_path, seed=0, **SMALL)
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    assert config["num_hidden_layers"] == 2
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (4 * 16, 64)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (2 * 16, 64)
    assert weights["lm_head.weight"].shape == (512, 64)
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(EMBEDDING_STD, rel=0.05)
    assert weights["model.layers.0.self_attn.v_proj.weight"].std().item() == pytest.approx(ATTENTION_STD, rel=0.1)
    assert len(weights) == 3 + 2 * 9


def test_heads_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(UsageError, match="kv_heads=3"):
        write_tiny(tmp_path, seed=0, heads=8, kv_heads=3)
