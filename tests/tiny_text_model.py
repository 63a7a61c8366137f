"""A tiny random target that speaks SmolLM2's tokens: for what depends on text, such as stop strings and grammars."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).parents[1]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "num_hidden_layers": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def tokenizer_folder() -> Path:
    """The demo's target, whose tokenizer is used; without it the test fails, or is skipped where that is allowed."""
    folder = Path(os.environ.get("JETSPECPP_DEMO_TARGET", ROOT / ".cache/smollm2-135m-instruct"))
    if not (folder / "tokenizer.json").is_file():
        reason = f"{folder}/tokenizer.json is missing; `make test` prepares the target"
        if os.environ.get("JETSPECPP_ALLOW_MISSING") == "1":
            pytest.skip(reason)
        pytest.fail(f"{reason} (JETSPECPP_ALLOW_MISSING=1 skips)")
    return folder


def make_tiny_text_model(path: Path, more_tokens: Sequence[str] = (), **sizes: Any) -> Path:
    """A float32 Llama of 4 layers over SmolLM2's 49,152 tokens and ``more_tokens``, with its tokenizer."""
    source = tokenizer_folder()
    make_tiny_llama(path, **(SIZES | {"vocab_size": SIZES["vocab_size"] + len(more_tokens)} | sizes))
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, path / name)
    if more_tokens:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.add_tokens(list(more_tokens))
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def tokenize(model: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(model).encode(text)
