"""Train the adapter (Eq. 5): Smooth L1 plus cosine to the true states, plus the KL of the frozen decoder's output.

The decoder KL is ours, not the paper's: it weighs errors of the states by what they do to the predicted outcome.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_jetspecpp.models.adapter import Adapter
from vllm_jetspecpp.models.attention import KeysValues
from vllm_jetspecpp.models.decoder import Decoder
from vllm_jetspecpp.models.target_parts import TargetWeights, copy_layer
from vllm_jetspecpp.training.blocks import BlockBatch, held_out_batches, noise_tokens
from vllm_jetspecpp.training.config import AdapterConfig
from vllm_jetspecpp.training.losses import forward_kl, masked_mean, state_loss
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateSource, TargetStates
from vllm_jetspecpp.training.train_draft import DraftObjective


def source_layers(taps: tuple[int, ...], layers_per_module: tuple[int, ...]) -> list[list[int]]:
    """Target layers each module is copied from: spread over the layers it stands for, the tapped one last."""
    sources, below = [], -1
    for tap, count in zip(taps, layers_per_module, strict=True):
        sources.append([below + max(1, round((i + 1) * (tap - below) / count)) for i in range(count)])
        below = tap
    return sources


def initialise(adapter: Adapter, weights: TargetWeights, setup: Setup) -> None:
    """Copy every layer from the target."""
    sources = source_layers(setup.info.target_layer_ids, setup.info.layers_per_module)
    for stack, copied in zip(adapter, sources, strict=True):
        for layer, source in zip(stack, copied, strict=True):
            copy_layer(weights, source, layer)


@torch.no_grad()
def state_scale(source: StateSource, num_taps: int) -> Tensor:
    """Standard deviation of each tap's states, spread over its width, [num_taps * hidden]; first tokens are left out.

    States of the first token are an order larger than all others. Taken over the first few sequences.
    """
    states = [source.read([s])[0][0, 1:] for s in range(min(32, len(source.sequences)))]
    taps = torch.cat(states).float().chunk(num_taps, dim=-1)
    return torch.cat([tap.std().expand(tap.shape[-1]) for tap in taps])


class Drafter(NamedTuple):
    """What replaces a batch's blocks by drafts, as serving feeds the adapter."""

    draft: DraftObjective
    target: TargetStates


class AdapterBatch(NamedTuple):
    """Blocks, and whether the draft model is to replace their tokens."""

    blocks: BlockBatch
    noise: Tensor | None  # [N, A, T] int64, the draft model's input; None keeps the sequence's own tokens


class AdapterObjective(nn.Module):
    """An adapter with its losses.

    Args:
        setup: the frozen surroundings.
        source: the training sequences and their states.
        config: weights of the losses.
        drafter: for ``config.draft_share`` above 0.
    """

    def __init__(
        self, setup: Setup, source: StateSource, config: AdapterConfig, drafter: Drafter | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.setup, self.config = setup, config
        self.progress = 0.0
        self._drafter = (drafter,)  # in a tuple, so that its networks are none of ours
        self.num_taps = len(setup.info.target_layer_ids)
        self.model = Adapter(setup.layer_config, list(setup.info.layers_per_module))
        if config.initialise == "target":
            initialise(self.model, setup.weights, setup)
        elif config.initialise != "random":
            self.model.load_state_dict(load_file(config.initialise))
        self.model.to(setup.device)
        self._scale = state_scale(source, self.num_taps).to(setup.device)
        gen = torch.Generator().manual_seed(config.seed + 1)
        self._held_out = held_out_batches(source, setup.held_out, 8, setup.info.block_size, gen)

    def make(self, batch: BlockBatch, gen: torch.Generator) -> AdapterBatch:
        """Choose whether the blocks are drafts."""
        drafted = torch.rand((), generator=gen).item() < self.config.draft_share
        noise = noise_tokens(batch, gen).to(self.setup.device) if drafted else None
        return AdapterBatch(batch.to(self.setup.device), noise)

    def decoder_context(self, batch: BlockBatch, decoder: Decoder) -> list[list[KeysValues]]:
        """Keys and values of the decoder's layers over the true context."""
        n, length = batch.sequence.shape
        rope = self.setup.rope(batch.context_positions)
        causal = torch.ones(length, length, dtype=torch.bool, device=self.setup.device).tril().expand(n, -1, -1)
        x, context = batch.context.to(self.setup.dtype).chunk(self.num_taps, dim=-1)[-1], []
        for layer in decoder.layers:
            x, own = layer(x, rope, [], causal)
            context.append([own])
        return context

    def predict(self, batch: BlockBatch, decoder: Decoder | None = None) -> tuple[Tensor, Tensor]:
        """Adapter and decoder over the blocks: states [N, A, T, taps * hidden] and logits [N, A, T, draft_vocab].

        Args:
            decoder: one that learns; None is the target's own, frozen.
        """
        n, a, t = batch.tokens.shape
        setup, used = self.setup, decoder or self.setup.parts.decoder
        known = self.model.context_keys_values(batch.context.to(setup.dtype), setup.rope(batch.context_positions))
        rope, mask = setup.rope(batch.positions), batch.mask()
        states = self.model(setup.parts.embed(batch.tokens.flatten(1)), rope, [[kv] for kv in known], mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and decoder is not None):
            above = self.decoder_context(batch, used)
        deepest = states.chunk(self.num_taps, dim=-1)[-1]
        hidden, _ = used(deepest, rope, above, mask)
        return states.view(n, a, t, -1), setup.parts.logits(hidden.view(n, a, t, -1))

    def forward(self, made: AdapterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """State loss plus weighted decoder KL."""
        batch = made.blocks
        if made.noise is not None:
            batch = self._with_drafts(batch, made.noise)
        states, logits = self.predict(batch)
        target = self.setup.target_logits(batch.final)
        state = masked_mean(state_loss(states, batch.states, self._scale), batch.inside)
        kl = masked_mean(forward_kl(target, logits), batch.inside)
        return state + self.config.decoder_kl * kl, {"state": state.detach(), "kl": kl.detach()}

    @torch.no_grad()
    def _with_drafts(self, batch: BlockBatch, noise: Tensor) -> BlockBatch:
        """The same anchors with blocks of J_0, and the target's states over those."""
        (drafter,) = self._drafter
        if drafter is None:
            raise ValueError("draft_share needs a draft model")
        inputs = torch.cat([batch.tokens[..., :1], noise[..., 1:]], dim=-1)
        drafts = self.setup.parts.head_token_ids[drafter.draft.logits(batch, inputs).argmax(-1)]
        tokens = torch.cat([batch.tokens[..., :1], drafts], dim=-1)
        positions = batch.positions.flatten(1)
        states, final = drafter.target.over_blocks(batch.sequence, tokens.flatten(1), positions, batch.mask())
        shape = batch.tokens.shape
        return batch.with_blocks(tokens, states.view(*shape, -1), final.view(*shape, -1))

    @torch.no_grad()
    def validate(self, decoder: Decoder | None = None) -> dict[str, float]:
        """Top-1 agreement of the decoder with the target and its KL, over blocks of true tokens."""
        agree, kl = [], []
        for held_out in self._held_out:
            batch = held_out.to(self.setup.device)
            _, logits = self.predict(batch, decoder)
            target = self.setup.target_logits(batch.final)
            agree.append((logits.argmax(-1) == target.argmax(-1))[batch.inside])
            kl.append(forward_kl(target, logits)[batch.inside])
        return {"top1": torch.cat(agree).float().mean().item(), "kl": torch.cat(kl).mean().item()}
