"""Train EAGLE-3's head by training-time test: unrolled as it drafts, later steps read the head's own states.

Where the published method unrolls from every position of a sequence, this one does from the blocks' anchors, as all
rivals here are trained: a step costs no more however many positions are unrolled.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues
from vllm_jetspecpp.models.eagle3 import Eagle3Head, eagle3_taps, initialise
from vllm_jetspecpp.training.blocks import BlockBatch, held_out_batches
from vllm_jetspecpp.training.config import DraftConfig
from vllm_jetspecpp.training.losses import DISTANCES, forward_kl, masked_mean
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateSource
from vllm_jetspecpp.training.train_draft import run_lengths


class Eagle3Objective(nn.Module):
    """A head with the distance of its γ unrolled steps to the target's distributions.

    Args:
        setup: the frozen surroundings, LM head included.
        source: the training sequences and their states.
        config: distance, weights of the steps and initial weights.

    Raises:
        ValueError: fewer than three layers are tapped.
    """

    def __init__(self, setup: Setup, source: StateSource, config: DraftConfig) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.setup, self.config, self.progress = setup, config, 0.0
        self.taps = eagle3_taps(setup.info.target_layer_ids)
        self.model = Eagle3Head(setup.layer_config)
        if config.initialise == "target":
            initialise(self.model, setup.weights, setup.hf_config.num_hidden_layers)
        elif config.initialise != "random":
            self.model.load_state_dict(load_file(config.initialise))
        self.model.to(setup.device)
        gen = torch.Generator().manual_seed(config.seed + 1)
        self._held_out = held_out_batches(source, setup.held_out, 16, setup.info.block_size, gen)
        self._weights = config.position_decay ** torch.arange(setup.info.block_size - 1, device=setup.device)

    def make(self, batch: BlockBatch, gen: torch.Generator) -> BlockBatch:
        """Nothing here is random."""
        return batch.to(self.setup.device)

    def _fused(self, batch: BlockBatch) -> Tensor:
        """What step 0 reads of the target's states, [N, L, hidden]."""
        states = batch.context.unflatten(-1, (len(self.setup.info.target_layer_ids), -1))[:, :, self.taps]
        return self.model.fc(states.flatten(2).to(self.setup.dtype))

    def hidden(self, batch: BlockBatch) -> Tensor:
        """Unrolled states ready for the LM head: step k reads token k of a block, [N, A, γ, hidden].

        Step k of an anchor at n stands at position n - 1 + k and sees the target's rows before n - 1 and its own
        block's rows up to itself.
        """
        setup, layer = self.setup, self.model.midlayer
        fused, anchors = self._fused(batch), batch.anchors
        n, a, t = batch.tokens.shape
        rows = batch.sequence.shape[1] - 1
        rope = setup.rope(batch.context_positions[:, :rows])
        context: list[KeysValues] = [layer.keys_values(setup.parts.embed(batch.sequence[:, 1:]), fused[:, :rows], rope)]
        before = (anchors - 1).clamp(min=0)
        mask = torch.arange(rows, device=anchors.device) < before.unsqueeze(-1)
        own = torch.eye(a, dtype=torch.bool, device=anchors.device).expand(n, -1, -1)
        states = fused.gather(1, before.unsqueeze(-1).expand(-1, -1, fused.shape[-1]))
        steps = []
        for k in range(t - 1):
            mask = torch.cat([mask, own], dim=-1)
            embeddings = setup.parts.embed(batch.tokens[..., k])
            states, keys_values = layer(embeddings, states, setup.rope(before + k), context, mask)
            context.append(keys_values)
            steps.append(self.model.norm(states))
        return torch.stack(steps, dim=2)

    def logits(self, batch: BlockBatch) -> Tensor:
        """Of the tokens at block positions 1..γ, [N, A, γ, draft_vocab]."""
        return self.setup.parts.logits(self.hidden(batch))

    @staticmethod
    def _counted(batch: BlockBatch) -> Tensor:
        """[N, A, γ] bool: positions to learn; a sequence's first token has no row before it to start from."""
        return batch.inside[..., 1:] & (batch.anchors[..., None] > 0)

    def forward(self, batch: BlockBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted mean distance to the target's distributions."""
        target = self.setup.target_logits(batch.final[:, :, :-1])
        distance = DISTANCES[self.config.loss](target, self.logits(batch))
        return masked_mean(distance, self._counted(batch) * self._weights), {}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """As the other draft models' figures: as long as every argmax is right a greedy draft reads these tokens."""
        loss, runs, first = [], [], []
        for held_out in self._held_out:
            batch = held_out.to(self.setup.device)
            logits, target = self.logits(batch), self.setup.target_logits(batch.final[:, :, :-1])
            inside = self._counted(batch)
            loss.append(forward_kl(target, logits)[inside])
            right = (self.setup.parts.head_token_ids[logits.argmax(-1)] == batch.tokens[..., 1:]) & inside
            runs.append(run_lengths(right))
            first.append(right[..., 0].flatten())
        means = [torch.cat(values).float().mean().item() for values in (loss, runs, first)]
        return {"loss": means[0], "tau_J0": 1 + means[1], "top1_first": means[2]}
