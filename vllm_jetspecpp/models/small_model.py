"""A small causal LM cut out of the target: SSD's draft model where no published sibling of the target exists.

On disk an ordinary Hugging Face folder, or, smaller by far, four-bit differences from the target's own layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vllm_jetspecpp.models.checkpoint import read_json
from vllm_jetspecpp.models.target_layers import LayerConfig, LayerStack, RMSNorm
from vllm_jetspecpp.models.target_parts import TargetWeights, load_target_config
from vllm_jetspecpp.models.weight_delta import decode_deltas, encode_deltas

WEIGHTS = "model.safetensors"
LAYERS_OF_TARGET = "layers_of_target"
"""Key of config.json: the weights are differences from these layers of the target."""


class SmallModel(nn.Module):
    """Some layers and a norm: a causal LM less its embedding and LM head."""

    def __init__(self, config: LayerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = LayerStack(config, num_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def spread_layers(num_target_layers: int, count: int) -> list[int]:
    """Target layers to copy: from the first to the last, spread evenly."""
    return [round(i * (num_target_layers - 1) / max(count - 1, 1)) for i in range(count)]


def _from_target(weights: TargetWeights, sources: list[int]) -> dict[str, Tensor]:
    """The layers a small model starts from, under its names."""
    return {
        f"layers.{i}.{name}": value
        for i, source in enumerate(sources)
        for name, value in weights.layer_state(source).items()
    }


def save_small_model(weights: dict[str, Tensor], target: Path, hf_config: Any, out: Path, delta: bool = False) -> None:
    """Write a small model.

    Args:
        weights: state dict of :class:`SmallModel`.
        target: folder of the target, whose embedding and LM head it shares.
        hf_config: the target's text config.
        delta: differences from the target's layers, which :func:`load_small_model` alone reads.
    """
    out.mkdir(parents=True, exist_ok=True)
    target_weights = TargetWeights(target)
    count = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    config = hf_config.to_dict() | {"num_hidden_layers": count, "dtype": "bfloat16"}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:count]
    if delta:
        config[LAYERS_OF_TARGET] = spread_layers(hf_config.num_hidden_layers, count)
        state = encode_deltas(weights, _from_target(target_weights, config[LAYERS_OF_TARGET]), bits=4)
    else:
        state = {f"model.{name}": value.bfloat16().contiguous() for name, value in weights.items()}
        state["model.embed_tokens.weight"] = target_weights.embedding().bfloat16()
        if not hf_config.tie_word_embeddings:
            state["lm_head.weight"] = target_weights.lm_head().bfloat16()
    save_file(state, out / WEIGHTS, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")


def load_small_model(folder: Path, target: Path, dtype: torch.dtype, device: Any = "cpu") -> Any:
    """Any Hugging Face causal LM over the target's vocabulary, or what :func:`save_small_model` wrote.

    Raises:
        ValueError: another vocabulary, or weights that do not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    own, expected = (
        AutoConfig.from_pretrained(folder, trust_remote_code=False).vocab_size,
        load_target_config(target).vocab_size,
    )
    if own != expected:
        raise ValueError(f"{folder}: the draft model has {own} tokens, the target {expected}")
    sources = read_json(folder / "config.json").get(LAYERS_OF_TARGET)
    if sources is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).to(device).eval()
    weights = TargetWeights(target)
    tensors = decode_deltas(load_file(folder / WEIGHTS), _from_target(weights, sources))
    state = {f"model.{name}": value for name, value in tensors.items()}
    state["model.embed_tokens.weight"] = weights.embedding()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    if not model.config.tie_word_embeddings:
        state["lm_head.weight"] = weights.lm_head()
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if name != "lm_head.weight" or not model.config.tie_word_embeddings]
    if missing or unexpected:
        raise ValueError(f"{folder}: missing tensors {missing}, unexpected tensors {unexpected}")
    return model.to(device, dtype).eval()
