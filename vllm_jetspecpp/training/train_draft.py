"""Train the parallel draft model (Eq. 9): clean prefix, noise suffix, a distance to the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.logit_correction import GruCorrection, Head, LogitCorrection, MarkovCorrection
from vllm_jetspecpp.models.target_parts import TargetWeights, copy_layer
from vllm_jetspecpp.training.blocks import BlockBatch, held_out_batches, noise_tokens
from vllm_jetspecpp.training.config import DraftConfig
from vllm_jetspecpp.training.losses import DISTANCES, forward_kl, masked_mean
from vllm_jetspecpp.training.prefix_schedule import clean_prefix_lengths
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateSource


def initialise(model: DraftModel, weights: TargetWeights, num_target_layers: int) -> None:
    """Layers from the target's last ones, ``fc`` the identity on the deepest tap, norms copied.

    The draft layers normalise queries and keys. Where the target's do not, those norms stay at one: copying the typical
    size of the projections instead makes attention so sharp that training starts slower (docs/LOG.md).
    """
    hidden = model.fc.out_features
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.weight[:, -hidden:] = torch.eye(hidden)
        model.norm.weight.copy_(weights.tensor("model.norm.weight"))
        for offset, layer in enumerate(model.layers):
            copy_layer(weights, num_target_layers - len(model.layers) + offset, layer)
        model.hidden_norm.weight.copy_(next(iter(model.layers)).input_layernorm.weight)


class DraftBatch(NamedTuple):
    """Blocks with what the draft model reads in them."""

    blocks: BlockBatch
    inputs: Tensor  # [N, A, T] int64
    clean: Tensor  # [N, A, 1] int64, m of Eq. 9
    every_prefix: bool = False
    """Position i is drafted behind m = i - 1 true tokens, for every i; ``inputs`` holds the noise."""


@dataclass
class _Sums:
    """Sums over validated blocks."""

    loss: list[Tensor]
    runs: list[Tensor]
    first: list[Tensor]
    converged: list[Tensor]


class DraftObjective(nn.Module):
    """A draft model with Eq. 9's loss.

    Args:
        setup: the frozen surroundings.
        source: the training sequences and their states.
        config: mode, distance, schedule and weights.
    """

    def __init__(self, setup: Setup, source: StateSource, config: DraftConfig) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.setup, self.config = setup, config
        self.block_size = setup.info.block_size
        self.model = DraftModel(
            setup.layer_config,
            setup.info.num_draft_layers,
            len(setup.info.target_layer_ids),
            make_correction(config, setup.hf_config, len(setup.parts.head_token_ids)),
        )
        if config.initialise == "target":
            initialise(self.model, setup.weights, setup.hf_config.num_hidden_layers)
        elif config.initialise != "random":
            load_backbone(self.model, config.initialise)
        self.model.to(setup.device)
        self.head = Head(setup.parts.embed, setup.parts.head_token_ids)
        self.progress = 0.0
        gen = torch.Generator().manual_seed(config.seed + 1)
        self._held_out = held_out_batches(source, setup.held_out, 16, self.block_size, gen)
        self._weights = config.position_decay ** torch.arange(self.block_size - 1, device=setup.device)

    def _unknown(self, batch: BlockBatch, gen: torch.Generator) -> Tensor:
        """What stands at positions the draft model does not know: noise or the mask token. [N, A, T]."""
        if self.config.masked:
            return torch.full_like(batch.tokens, mask_token_id(self.setup.hf_config))
        return noise_tokens(batch, gen)

    def make(self, batch: BlockBatch, gen: torch.Generator) -> DraftBatch:
        """Choose m and noise."""
        m = torch.zeros_like(batch.anchors)
        every = self.config.all_prefixes and torch.rand((), generator=gen).item() >= self.config.zero_share
        if self.config.has_clean_prefix and not self.config.all_prefixes:
            m = clean_prefix_lengths(batch.anchors.shape, self.block_size, self.config.zero_share, gen)
        clean = m.unsqueeze(-1)
        inputs = torch.where(torch.arange(self.block_size) <= clean, batch.tokens, self._unknown(batch, gen))
        device = self.setup.device
        return DraftBatch(batch.to(device), inputs.to(device), clean.to(device), every)

    def hidden(self, batch: BlockBatch, inputs: Tensor, every_prefix: bool = False) -> Tensor:
        """States of positions 1..γ for block inputs ``inputs`` [N, A, T] → [N, A, γ, hidden], ready for the LM head.

        With ``every_prefix`` each block runs twice in one forward, true tokens and ``inputs``: row i of the second sees
        the first's rows before i and itself, as a pass over i - 1 true tokens and then noise has it. One block so
        teaches all m, where a drawn m teaches one.
        """
        setup = self.setup
        context = self.model.context_keys_values(batch.context.to(setup.dtype), setup.rope(batch.context_positions))
        mask, positions, tokens = batch.mask(self.config.causal), batch.positions, inputs
        if every_prefix:
            tokens = torch.cat([batch.tokens, inputs], dim=-1)
            positions = torch.cat([positions, positions], dim=-1)
            mask = every_prefix_mask(batch)
        rope = setup.rope(positions)
        hidden = self.model(setup.parts.embed(tokens.flatten(1)), rope, [[kv] for kv in context], mask)
        return hidden.view(*tokens.shape, -1)[:, :, 1 - inputs.shape[-1] :]

    def logits(self, batch: BlockBatch, inputs: Tensor) -> Tensor:
        """The parallel model's logits of positions 1..γ, [N, A, γ, draft_vocab]."""
        return self.setup.parts.logits(self.hidden(batch, inputs))

    def corrected(self, batch: BlockBatch, hidden: Tensor, logits: Tensor) -> Tensor:
        """``logits`` with what a rival's head adds when the tokens before are the true ones."""
        if self.model.correction is None:
            return logits
        previous = batch.tokens[..., :-1].flatten(0, 1)
        added = self.model.correction(hidden.flatten(0, 1), previous, self.setup.parts.embed)
        return logits + added.view(logits.shape)

    def drafts(self, hidden: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """Greedy draft tokens [N, A, γ] of blocks with anchor tokens ``anchors`` [N, A]."""
        if self.model.correction is None:
            return self.head.token_ids[logits.argmax(-1)]
        drafts = self.model.correction.draft(logits.flatten(0, 1), hidden.flatten(0, 1), anchors.flatten(), self.head)
        return drafts.view(logits.shape[:-1])

    def forward(self, made: DraftBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. 9's loss; Domino's is a mixture with that of the uncorrected logits."""
        batch = made.blocks
        target = self.setup.target_logits(batch.final[:, :, :-1])
        hidden = self.hidden(batch, made.inputs, made.every_prefix)
        logits = self.setup.parts.logits(hidden)
        distance = DISTANCES[self.config.loss](target, self.corrected(batch, hidden, logits))
        if self.config.mode == "domino" and self.progress < 1:
            # Its curriculum: the parallel model first, the correction more and more (linear over the run).
            base = DISTANCES[self.config.loss](target, logits)
            distance = torch.lerp(base, distance, self.progress)
        # Positions up to m read their own answer at the input. Training on them teaches to copy the input, which is
        # no refinement: they get no weight (our choice; Eq. 9 sums over all positions).
        position = torch.arange(1, self.block_size, device=distance.device)
        counted = batch.inside[..., 1:] & (position > made.clean)
        return masked_mean(distance, counted * self._weights), {}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Over greedy answers from true states: τ of J_0, bonus token included; top-1 of the first position; KL.

        Where a draft can refine, also the τ that Jacobi passes without end would reach.
        """
        gen, sums = torch.Generator().manual_seed(1), _Sums([], [], [], [])
        for held_out in self._held_out:
            inputs = self._unknown(held_out, gen)
            inputs[..., 0] = held_out.tokens[..., 0]
            batch = held_out.to(self.setup.device)
            hidden = self.hidden(batch, inputs.to(self.setup.device))
            logits = self.setup.parts.logits(hidden)
            target = self.setup.target_logits(batch.final[:, :, :-1])
            inside = batch.inside[..., 1:]
            sums.loss.append(forward_kl(target, self.corrected(batch, hidden, logits))[inside])
            right = (self.drafts(hidden, logits, batch.tokens[..., 0]) == batch.tokens[..., 1:]) & inside
            sums.runs.append(run_lengths(right))
            sums.first.append(right[..., 0].flatten())
            if self.config.causal and self.config.has_clean_prefix:
                rows = self.setup.parts.logits(self.hidden(batch, inputs.to(self.setup.device), every_prefix=True))
                right = (self.head.token_ids[rows.argmax(-1)] == batch.tokens[..., 1:]) & inside
                sums.converged.append(run_lengths(right))
        loss, runs, first = (torch.cat(values).float().mean().item() for values in (sums.loss, sums.runs, sums.first))
        more = {"tau_converged": 1 + torch.cat(sums.converged).float().mean().item()} if sums.converged else {}
        return {"loss": loss, "tau_J0": 1 + runs, "top1_first": first, **more}


def run_lengths(right: Tensor) -> Tensor:
    """How many positions from the first on are right, [N * A], of ``right`` [N, A, γ] bool."""
    return right.long().cumprod(-1).sum(-1).flatten()


def every_prefix_mask(batch: BlockBatch) -> Tensor:
    """[N, A * 2T, L + A * 2T] bool for blocks of true tokens, each followed by its noise."""
    n, a, t = batch.tokens.shape
    device = batch.tokens.device
    causal = torch.ones(t, t, dtype=torch.bool, device=device).tril()
    none = torch.zeros_like(causal)
    block = torch.cat(
        [torch.cat([causal, none], 1), torch.cat([causal.tril(-1), torch.eye(t, device=device).bool()], 1)]
    )
    own = torch.block_diag(*[block] * a).bool().expand(n, -1, -1)
    before = batch.context_mask().view(n, a, t, -1).repeat(1, 1, 2, 1).flatten(1, 2)
    return torch.cat([before, own], dim=-1)


def make_correction(config: DraftConfig, hf_config: Any, draft_vocab_size: int) -> LogitCorrection | None:
    """The head of DSpark or Domino; None for the other modes."""
    if config.mode == "dspark":
        return MarkovCorrection(hf_config.vocab_size, draft_vocab_size, config.correction_rank)
    if config.mode == "domino":
        return GruCorrection(hf_config.hidden_size, draft_vocab_size, config.gru_size, config.correction_rank)
    return None


def load_backbone(model: DraftModel, path: str) -> None:
    """Start from earlier weights, of the same method or of the parallel model alone."""
    missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    missing = [name for name in missing if not name.startswith("correction.")]
    if missing or unexpected:
        raise ValueError(f"{path} does not fit: missing {missing}, unexpected {unexpected}")


def mask_token_id(hf_config: object) -> int:
    """Token that stands for an unknown one in mask-input drafts: the padding token, else the vocabulary's last."""
    padding = getattr(hf_config, "pad_token_id", None)
    return padding if padding is not None else getattr(hf_config, "vocab_size") - 1  # noqa: B009
