"""Train the causal parallel draft model (Eq. 9): clean prefix, noise suffix, forward KL to the target."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.target_parts import TargetWeights, copy_layer
from vllm_jetspecpp.training.blocks import BlockBatch, batches, clean_prefix_lengths, held_out_batches, noise_tokens
from vllm_jetspecpp.training.loop import LoopConfig, train
from vllm_jetspecpp.training.losses import forward_kl, masked_mean
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateCache


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


def draft_logits(model: DraftModel, setup: Setup, batch: BlockBatch, inputs: Tensor) -> Tensor:
    """Logits of positions 1..γ for block inputs ``inputs`` [N, A, T] → [N, A, γ, draft_vocab]."""
    n, a, t = inputs.shape
    context_rope = setup.rope(batch.context_positions)
    context = model.context_keys_values(batch.context, context_rope)
    embeddings = setup.parts.embed(inputs.flatten(1))
    hidden = model(embeddings, setup.rope(batch.positions), [[kv] for kv in context], batch.mask())
    return setup.parts.logits(hidden.view(n, a, t, -1)[:, :, 1:])


@torch.no_grad()
def validate(model: DraftModel, setup: Setup, data: list[BlockBatch]) -> dict[str, float]:
    """Acceptance length τ (bonus token included) of J_0 from true states, over greedy answers; two positions' top-1."""
    gen = torch.Generator().manual_seed(1)
    runs, hits, losses = [], [], []
    for batch in data:
        inputs = noise_tokens(batch, gen)
        inputs[..., 0] = batch.tokens[..., 0]
        with torch.autocast("cpu", torch.bfloat16):
            logits = draft_logits(model, setup, batch, inputs)
            target = setup.parts.logits(batch.final[:, :, :-1])
        losses.append(forward_kl(target, logits)[batch.inside[..., 1:]])
        best = setup.parts.head_token_ids[logits.argmax(-1)]
        right = (best == batch.tokens[..., 1:]) & batch.inside[..., 1:]
        runs.append(right.long().cumprod(-1).sum(-1).flatten())
        hits.append(right.flatten(0, 1))
    top1 = torch.cat(hits).float().mean(0)
    tau, loss = 1 + torch.cat(runs).float().mean(), torch.cat(losses).mean()
    return {"loss": loss.item(), "tau_J0": tau.item(), "top1_first": top1[0].item(), "top1_second": top1[1].item()}


def train_draft(
    cache: StateCache, setup: Setup, config: LoopConfig, initial: dict[str, Tensor] | None = None, seed: int = 0
) -> tuple[DraftModel, list[dict[str, float]]]:
    """Train a draft model of ``setup.info``'s sizes; returns it with its validation record.

    Args:
        initial: weights to go on from; by default copies of the target's layers.
    """
    torch.manual_seed(seed)
    block_size = setup.info.block_size
    model = DraftModel(setup.layer_config, setup.info.num_draft_layers, len(setup.info.target_layer_ids))
    gen = torch.Generator().manual_seed(seed + 1)
    held_out = held_out_batches(cache, setup.held_out, 16, block_size, gen)
    initialise(model, setup.weights, setup.hf_config.num_hidden_layers)
    if initial is not None:
        model.load_state_dict(initial)
    weights = config.position_decay ** torch.arange(block_size - 1)

    def loss_of(batch: BlockBatch) -> tuple[Tensor, dict[str, float]]:
        m = clean_prefix_lengths(batch.anchors.shape, block_size, config.zero_share, gen)[..., None]
        position = torch.arange(block_size)
        inputs = torch.where(position <= m, batch.tokens, noise_tokens(batch, gen))
        with torch.no_grad():
            target = setup.parts.logits(batch.final[:, :, :-1])
        kl = forward_kl(target, draft_logits(model, setup, batch, inputs))
        # Positions up to m read their own answer at the input. Training on them teaches to copy the input, which is
        # no refinement: they get no weight (our choice; Eq. 9 sums over all positions).
        counted = batch.inside[..., 1:] & (position[1:] > m)
        loss = masked_mean(kl, counted * weights)
        return loss, {"kl": loss.item()}

    data = batches(cache, setup.train, 4, 24, block_size, seed, config.prompt_share)
    return model, train(model, data, loss_of, lambda: validate(model, setup, held_out), config)
