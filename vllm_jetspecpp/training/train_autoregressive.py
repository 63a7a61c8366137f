"""Train SSD's draft model: a small causal LM of the target's family, without target states, distilled like the others.

The paper takes a published small sibling of the target (Qwen3-0.6B beside Qwen3-8B). Where there is none, this makes
one: a few of the target's own layers, its embedding and LM head, trained on the same sequences.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_jetspecpp.models.small_model import SmallModel, spread_layers
from vllm_jetspecpp.models.target_parts import copy_layer
from vllm_jetspecpp.training.blocks import BlockBatch, held_out_batches
from vllm_jetspecpp.training.config import DraftConfig
from vllm_jetspecpp.training.losses import DISTANCES, forward_kl, masked_mean
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateSource
from vllm_jetspecpp.training.train_draft import run_lengths


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
            runs.append(run_lengths(right))
            first.append(right[..., 0].flatten())
        means = [torch.cat(values).float().mean().item() for values in (loss, runs, first)]
        return {"loss": means[0], "tau_J0": 1 + means[1], "top1_first": means[2]}
