"""The folder that a server loads: real weights where given, else the model's shape with random ones."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from prefixbench.config.run import ModelConfig
from prefixbench.errors import UsageError

_NAMES = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefixbench" / "models"


def prepare(model: ModelConfig) -> Path:
    """A folder with config.json, and safetensors unless the weights are dummy. Written once, then reused."""
    if model.path is not None:
        return _checked(Path(model.path), model)
    shape = json.dumps(vars(model), sort_keys=True)
    folder = cache_dir() / f"{model.name}-{hashlib.sha256(shape.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    temporary.mkdir(parents=True, exist_ok=True)
    if model.weights == "written":
        from prefixbench.engines.checkpoint import write_tiny

        write_tiny(
            temporary,
            seed=model.weights_seed,
            hidden=model.hidden,
            intermediate=model.intermediate,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            vocab=model.vocab,
            max_context=model.max_context,
        )
    else:
        (temporary / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
    try:
        temporary.rename(folder)
    except OSError:  # another run wrote the same checkpoint meanwhile
        return folder
    return folder


def _config(model: ModelConfig) -> dict[str, object]:
    return {
        "architectures": [model.architecture],
        "model_type": model.architecture.removesuffix("ForCausalLM").lower(),
        **{theirs: getattr(model, ours) for ours, theirs in _NAMES.items()},
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_context,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": model.dtype,
    }


def _checked(folder: Path, model: ModelConfig) -> Path:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path={folder}: needs a folder with a Hugging Face config.json ({error})") from None
    for ours, theirs in _NAMES.items():
        if config.get(theirs) != getattr(model, ours):
            raise UsageError(
                f"model.path={folder}: {theirs} is {config.get(theirs)} where model={model.name} says "
                f"{getattr(model, ours)}; choose the model= of that shape or set model.{ours}"
            )
    return folder
