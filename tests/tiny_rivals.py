"""Rivals with random weights for a tiny target, written as their published checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.models.attention import Rope
from vllm_jetspecpp.models.checkpoint import CheckpointInfo
from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.eagle3 import Eagle3Head, save_head
from vllm_jetspecpp.models.logit_correction import GruCorrection, LogitCorrection, MarkovCorrection
from vllm_jetspecpp.models.rival_checkpoint import RivalParts, save_rival
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import TargetParts, TargetWeights, load_target_config

TAPS = (1, 3, 5)
METHODS = ("dflash", "jetspec", "dspark", "domino")


def randomise(model: DraftModel) -> None:
    """Wide enough that drafts vary and corrections, which add nothing when fresh, decide some of them."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5 if name.startswith("correction.") else 0.2)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.4, 1.6)  # of ones nobody would see whose norm is whose


def make_tiny_rival(target: Path, folder: Path, method: str, draft_vocab_size: int = 100, seed: int = 0) -> Path:
    """A rival of two layers and blocks of 8."""
    hf_config = load_target_config(target)
    info = CheckpointInfo(folder, TAPS, 8, 2, (1, 1, 1), draft_vocab_size, hf_config.max_position_embeddings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        corrections: dict[str, LogitCorrection] = {
            "dspark": MarkovCorrection(hf_config.vocab_size, draft_vocab_size, 8),
            "domino": GruCorrection(hf_config.hidden_size, draft_vocab_size, 16, 8),
        }
        config = LayerConfig.from_hf(hf_config)
        model = DraftModel(config, 2, len(TAPS), corrections.get(method))
        randomise(model)
        token_ids = torch.randperm(hf_config.vocab_size)[:draft_vocab_size].sort().values
    weights = TargetWeights(target)
    parts = RivalParts(model, weights.lm_head()[token_ids], token_ids, weights.embedding())
    save_rival(info, hf_config, parts, method=method, causal=method == "jetspec", mask_token_id=3, training={})
    return folder


def make_tiny_eagle3(target: Path, folder: Path, draft_vocab_size: int = 100, seed: int = 0) -> Path:
    """A small EAGLE-3 head with random weights, wide enough that every step's state and token matter."""
    hf_config = load_target_config(target)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = Eagle3Head(LayerConfig.from_hf(hf_config))
        for parameter in head.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                torch.nn.init.uniform_(parameter, 0.4, 1.6)
        token_ids = torch.randperm(hf_config.vocab_size)[:draft_vocab_size].sort().values
    save_head(head, hf_config, list(TAPS), token_ids, folder, {})
    return folder


@torch.inference_mode()
def eagle3_logits(head: Eagle3Head, parts: TargetParts, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """One sequence the plain way, no block masks: logits [count, draft_vocab] of the steps that read known tokens.

    Args:
        states: [n, 3 * hidden], the target's over the first n tokens.
        tokens: [n + count] int64; the token at n is the anchor.
    """
    n, embeddings = len(states), parts.embed(tokens[None])
    causal = torch.ones(1, n, n, dtype=torch.bool).tril()
    out, own = head.midlayer(embeddings[:, 1 : n + 1], head.fc(states[None]), rope_at(parts, 0, n), [], causal)
    rows, context = [out[:, -1:]], [own]
    for at in range(n, len(tokens) - 1):
        seen = torch.ones(1, 1, at + 1, dtype=torch.bool)
        row, own = head.midlayer(embeddings[:, at + 1 : at + 2], rows[-1], rope_at(parts, at, at + 1), context, seen)
        rows.append(row)
        context.append(own)
    return parts.logits(head.norm(torch.cat(rows, dim=1)))[0]


def rope_at(parts: TargetParts, start: int, end: int) -> Rope:
    return parts.rotary(torch.arange(start, end)[None])


def make_tiny_small_model(folder: Path) -> Path:
    """A causal LM of two layers over the target's vocabulary, for SSD."""
    return make_tiny_llama(folder, seed=5, num_hidden_layers=2)


def rewrite(
    folder: Path, out: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str = ""
) -> Path:
    """A copy of a rival with other keys in its config and more tensors, all names with ``prefix``."""
    out.mkdir()
    said = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({k: v for k, v in (said | config).items() if v is not None}))
    stored = {prefix + name: value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(stored | tensors, out / "model.safetensors")
    return out
