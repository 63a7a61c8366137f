"""Train SSD's draft model: a small causal LM of the target's family, without target states, distilled like the others.

The paper takes a published small sibling of the target (Qwen3-0.6B beside Qwen3-8B). Where there is none, this makes
one: a few of the target's own layers, its embedding and LM head, trained on the same sequences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vllm_jetspecpp.models.target_layers import LayerConfig, LayerStack, RMSNorm
from vllm_jetspecpp.models.target_parts import TargetWeights, copy_layer
from vllm_jetspecpp.training.blocks import BlockBatch, held_out_batches
from vllm_jetspecpp.training.config import DraftConfig
from vllm_jetspecpp.training.losses import DISTANCES, forward_kl, masked_mean
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateSource


class SmallModel(nn.Module):
    """Some layers and a norm: a causal LM less its embedding and LM head."""

    def __init__(self, config: LayerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = LayerStack(config, num_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def spread_layers(num_target_layers: int, count: int) -> list[int]:
    """Target layers to copy: from the first to the last, spread evenly."""
    return [round(i * (num_target_layers - 1) / max(count - 1, 1)) for i in range(count)]


class AutoregressiveObjective(nn.Module):
    """Next-token distillation over whole sequences, counted at the blocks' positions as the rivals' losses are.

    Args:
        setup: the frozen surroundings.
        source: the training sequences and the target's distributions.
        config: distance and initial weights.
    """

    def __init__(self, setup: Setup, source: StateSource, config: DraftConfig) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.setup, self.config, self.progress = setup, config, 0.0
        self.model = SmallModel(setup.layer_config, setup.info.num_draft_layers)
        if config.initialise == "target":
            sources = spread_layers(setup.hf_config.num_hidden_layers, setup.info.num_draft_layers)
            with torch.no_grad():
                self.model.norm.weight.copy_(setup.weights.tensor("model.norm.weight"))
                for index, layer in zip(sources, self.model.layers, strict=True):
                    copy_layer(setup.weights, index, layer)
        elif config.initialise != "random":
            self.model.load_state_dict(load_file(config.initialise))
        self.model.to(setup.device)
        gen = torch.Generator().manual_seed(config.seed + 1)
        self._held_out = held_out_batches(source, setup.held_out, 16, setup.info.block_size, gen)

    def make(self, batch: BlockBatch, gen: torch.Generator) -> BlockBatch:
        """Nothing here is random."""
        return batch.to(self.setup.device)

    def logits(self, batch: BlockBatch) -> Tensor:
        """Next-token logits at every block position but the last, [N, A, γ, draft_vocab]."""
        setup = self.setup
        n, length = batch.sequence.shape
        rope = setup.rope(batch.context_positions)
        mask = torch.ones(length, length, dtype=torch.bool, device=setup.device).tril().expand(n, -1, -1)
        x = setup.parts.embed(batch.sequence)
        for layer in self.model.layers:
            x, _ = layer(x, rope, [], mask)
        at = torch.minimum(batch.positions[:, :, :-1], batch.lengths[:, None, None] - 1).flatten(1)
        rows = x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return setup.parts.logits(self.model.norm(rows)).view(*batch.tokens[..., 1:].shape, -1)

    def forward(self, batch: BlockBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean distance to the target's distribution."""
        target = self.setup.target_logits(batch.final[:, :, :-1])
        return masked_mean(DISTANCES[self.config.loss](target, self.logits(batch)), batch.inside[..., 1:]), {}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """As the other draft models' figures: a greedy draft goes on being right as long as every argmax is."""
        loss, runs, first = [], [], []
        for held_out in self._held_out:
            batch = held_out.to(self.setup.device)
            logits, target = self.logits(batch), self.setup.target_logits(batch.final[:, :, :-1])
            inside = batch.inside[..., 1:]
            loss.append(forward_kl(target, logits)[inside])
            right = (self.setup.parts.head_token_ids[logits.argmax(-1)] == batch.tokens[..., 1:]) & inside
            runs.append(right.long().cumprod(-1).sum(-1).flatten())
            first.append(right[..., 0].flatten())
        means = [torch.cat(values).float().mean().item() for values in (loss, runs, first)]
        return {"loss": means[0], "tau_J0": 1 + means[1], "top1_first": means[2]}


def save_small_model(weights: dict[str, Tensor], setup_folder: Path, hf_config: Any, out: Path) -> None:
    """A Hugging Face folder of the small model: its layers, the target's embedding, LM head and tokenizer-free config.

    Args:
        weights: state dict of :class:`SmallModel`.
        setup_folder: folder of the target.
        hf_config: the target's text config.
    """
    out.mkdir(parents=True, exist_ok=True)
    target = TargetWeights(setup_folder)
    state = {f"model.{name}": value.bfloat16().contiguous() for name, value in weights.items()}
    state["model.embed_tokens.weight"] = target.embedding().bfloat16()
    if not hf_config.tie_word_embeddings:
        state["lm_head.weight"] = target.lm_head().bfloat16()
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    layers = len({name.split(".")[2] for name in state if name.startswith("model.layers.")})
    config = hf_config.to_dict() | {"num_hidden_layers": layers, "dtype": "bfloat16"}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    (out / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
