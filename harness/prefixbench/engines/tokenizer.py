"""A tokenizer for checkpoints of random weights, so that a text client can drive them: one word per token id."""

from __future__ import annotations

import json
import os
from pathlib import Path

_FILE = "tokenizer.json"


def ensure(folder: Path, vocab: int) -> None:
    """Writes a tokenizer into the checkpoint's folder unless it has one. Word `tN` is token N, so text that was made
    from ids comes back as the same ids."""
    if (folder / _FILE).exists() or (folder / "tokenizer.model").exists():
        return
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(vocab)}, unk_token="t0"))  # noqa: S106
    tokenizer.pre_tokenizer = WhitespaceSplit()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "model_max_length": 1 << 30}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    temporary = folder / f".{_FILE}-{os.getpid()}"
    tokenizer.save(str(temporary))
    temporary.rename(folder / _FILE)  # last and whole: its presence says that the tokenizer is complete
