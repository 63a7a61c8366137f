"""Tiny models with random weights, saved as Hugging Face folders: any machine loads them in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Wide enough for attention to matter: with the usual .02 a random model repeats one token for ever.
    "initializer_range": 0.15,
}


def make_tiny_llama(path: Path, seed: int = 0, **sizes: Any) -> Path:
    """A float32 Llama of 8 layers; ``sizes`` override :data:`SIZES`."""
    return _save(LlamaForCausalLM, LlamaConfig(**(SIZES | sizes)), path, seed)


def make_tiny_qwen3(path: Path, seed: int = 0, **sizes: Any) -> Path:
    """A float32 Qwen3 of 8 layers; ``sizes`` override :data:`SIZES`."""
    return _save(Qwen3ForCausalLM, Qwen3Config(**(SIZES | sizes)), path, seed)


def _save(model_class: type[PreTrainedModel], config: PretrainedConfig, path: Path, seed: int) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_class(config).float().save_pretrained(path, safe_serialization=True)
    return path
