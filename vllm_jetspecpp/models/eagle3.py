"""EAGLE-3's draft head: one layer that reads the next token beside the target's states, then its own states.

The method is that of "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv 2503.01840). Row p stands at position p, reads the target's states there and token p + 1, and drafts token p + 2;
every further step reads the state that the step before left behind. Stored under ``checkpoints/rivals`` a head is int8
without what it shares with the target; :func:`materialise` makes the folder that vLLM's ``eagle3`` loads.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues, Rope
from vllm_jetspecpp.models.checkpoint import write_json
from vllm_jetspecpp.models.json_files import read_json, require, require_int
from vllm_jetspecpp.models.target_layers import MLP, Attention, LayerConfig, RMSNorm
from vllm_jetspecpp.models.target_parts import TargetWeights, load_target_config
from vllm_jetspecpp.models.weight_files import load_tensors, load_weights, save_weights

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_TAPS = 3
WEIGHTS, TOKEN_IDS = "model.safetensors", "token_ids.safetensors"
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
"""Of config.json: how many layers the target has run where a state is tapped, so 0-based layer + 1."""
SMALL = "small"
"""Of config.json's ``jetspecpp``: the head lacks what it shares with the target."""


def head_config(config: LayerConfig) -> LayerConfig:
    """Sizes of the head's layer: those of a Llama layer, which is what vLLM makes of it for every target."""
    return replace(config, qk_norm=False, attention_bias=False, mlp_bias=False)


class WideLayer(nn.Module):
    """A Llama layer whose attention reads embedding and state side by side, each under a norm of its own."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * narrow.in_features, narrow.out_features, bias=False))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def _wide(self, embeddings: Tensor, states: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)

    def keys_values(self, embeddings: Tensor, states: Tensor, rope: Rope) -> KeysValues:
        """Keys and values of rows [batch, length, hidden] that ask nothing themselves."""
        return self.self_attn.keys_values(self._wide(embeddings, states), rope)

    def forward(
        self, embeddings: Tensor, states: Tensor, rope: Rope, context: list[KeysValues], mask: Tensor
    ) -> tuple[Tensor, KeysValues]:
        """Rows [batch, length, hidden] → their new states and own keys; ``mask`` [batch, length, keys + length]."""
        attended, own = self.self_attn(self._wide(embeddings, states), rope, context, mask)
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states)), own


class Eagle3Head(nn.Module):
    """Fusion, layer and norm, named as in published files; embedding and LM head are the target's."""

    def __init__(self, config: LayerConfig, num_taps: int = NUM_TAPS) -> None:
        super().__init__()
        self.fc = nn.Linear(num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = WideLayer(head_config(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def eagle3_taps(target_layer_ids: tuple[int, ...]) -> list[int]:
    """Which of the tapped states a head reads: a low, a middle and a high one; places in ``target_layer_ids``.

    Raises:
        ValueError: fewer than three layers are tapped.
    """
    count = len(target_layer_ids)
    if count < NUM_TAPS:
        raise ValueError(f"eagle3 reads {NUM_TAPS} tapped layers, got {list(target_layer_ids)}: raise --num-taps")
    return [0, count // 2, count - 1]


@torch.no_grad()
def initialise(head: Eagle3Head, weights: TargetWeights, num_target_layers: int) -> None:
    """Start from the target: its last layer reads the states, its first layer's attention the embeddings.

    ``fc`` is the identity on the deepest tap.
    """
    hidden = head.fc.out_features
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    head.norm.weight.copy_(weights.tensor("model.norm.weight"))
    first, last = (weights.layer_state(layer) for layer in (0, num_target_layers - 1))
    own = head.midlayer.state_dict()
    for name, value in own.items():
        if name == "input_layernorm.weight":
            value.copy_(first[name])
        elif name == "hidden_norm.weight":
            value.copy_(last["input_layernorm.weight"])
        elif value.shape == last[name].shape:
            value.copy_(last[name])
        else:
            value.copy_(torch.cat([first[name], last[name]], dim=1))


def _config(target_config: Any, taps: list[int], draft_vocab_size: int, section: dict[str, Any]) -> dict[str, Any]:
    config = head_config(LayerConfig.from_hf(target_config))
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": target_config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": target_config.rope_parameters,
        "max_position_embeddings": target_config.max_position_embeddings,
        "vocab_size": target_config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        TAPS_KEY: [tap + 1 for tap in taps],
        "jetspecpp": section,
    }


def save_head(
    head: Eagle3Head,
    target_config: Any,
    taps: list[int],
    token_ids: Tensor,
    out: Path,
    training: dict[str, Any],
    weights: TargetWeights | None = None,
) -> None:
    """Write a head as vLLM loads it, or small: int8 matrices, nothing of the target's, for :func:`materialise`.

    Args:
        taps: tapped layers, 0-based, three.
        token_ids: [draft_vocab] int64, ascending: token of each row of the shortened LM head.
        training: how it came to be.
        weights: the target's, whose LM head goes into the file; None: small.
    """
    out.mkdir(parents=True, exist_ok=True)
    section = {SMALL: True, **training} if weights is None else training
    write_json(out / "config.json", _config(target_config, taps, len(token_ids), section))
    if weights is None:
        save_weights(head, out / WEIGHTS, torch.int8)
        save_file({"token_ids": token_ids.int()}, out / TOKEN_IDS)
    else:
        _write_full(out, head, token_ids, weights, target_config.vocab_size)


def is_head(folder: Path) -> bool:
    """Whether a checkpoint, small or whole, is an EAGLE-3 head."""
    return read_json(folder / "config.json").get("architectures") == [ARCHITECTURE]


def load_head(folder: Path, target_config: Any) -> tuple[Eagle3Head, Tensor]:
    """A small head in float32 and the tokens [draft_vocab] it drafts.

    Raises:
        ValueError: one line: not a small head, for another target, or its tensors do not fit.
    """
    path = folder / "config.json"
    config = read_json(path)
    if not is_head(folder) or SMALL not in config.get("jetspecpp", {}):
        found = config.get("architectures")
        raise ValueError(f"{path}: expected a small head of architectures [{ARCHITECTURE!r}], found {found}")
    expected = _config(target_config, [], 0, {})
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        if require(config, key, path) != expected[key]:
            raise ValueError(f"{path}: {key} is {config[key]}, the target's is {expected[key]}: another target's head")
    head = Eagle3Head(LayerConfig.from_hf(target_config))
    load_weights(head, folder / WEIGHTS)
    token_ids = load_tensors(folder / TOKEN_IDS)["token_ids"].long()
    if len(token_ids) != require_int(config, "draft_vocab_size", path, 1, target_config.vocab_size):
        raise ValueError(f"{path}: draft_vocab_size is {config['draft_vocab_size']}, token_ids has {len(token_ids)}")
    return head, token_ids


def _write_full(folder: Path, head: Eagle3Head, token_ids: Tensor, weights: TargetWeights, vocab_size: int) -> None:
    """Write the tensors of a published head: bfloat16, its rows of the target's LM head, both maps of tokens."""
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in head.state_dict().items()}
    tensors["lm_head.weight"] = weights.lm_head()[token_ids].bfloat16()
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def materialise(folder: Path, target: Path, out: Path) -> Path:
    """The checkpoint that vLLM's ``eagle3`` loads, from a small head and its target; the embedding stays the target's.

    Args:
        folder: what :func:`save_head` wrote.
        target: folder of the target's weights.
        out: folder to write; replaced as a whole where it is there already.

    Returns:
        ``out``, for ``--speculative-config``'s ``model``.

    Raises:
        ValueError: the head is no small one, or another target's.
    """
    target_config = load_target_config(target)
    head, token_ids = load_head(folder, target_config)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    _write_full(partial, head, token_ids, TargetWeights(target), target_config.vocab_size)
    config = read_json(folder / "config.json")
    config["jetspecpp"] = {key: value for key, value in config["jetspecpp"].items() if key != SMALL}
    write_json(partial / "config.json", config)
    partial.chmod(0o755)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return out
