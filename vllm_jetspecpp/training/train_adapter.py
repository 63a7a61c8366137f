"""Train the adapter (Eq. 5): Smooth L1 plus cosine to the true states, plus the KL of the frozen decoder's output.

The decoder KL is ours, not the paper's: it weighs errors of the states by what they do to the predicted outcome.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_jetspecpp.models.adapter import Adapter
from vllm_jetspecpp.models.attention import KeysValues
from vllm_jetspecpp.models.target_parts import TargetWeights, copy_layer
from vllm_jetspecpp.training.blocks import BlockBatch, batches, held_out_batches
from vllm_jetspecpp.training.loop import LoopConfig, train
from vllm_jetspecpp.training.losses import forward_kl, masked_mean, state_loss
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateCache

DECODER_KL_WEIGHT = 0.5


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
def state_scale(cache: StateCache, num_taps: int) -> Tensor:
    """Standard deviation of each tap's states, spread over its width, [num_taps * hidden]; first tokens are left out.

    States of the first token are an order larger than all others.
    """
    rows = torch.randperm(cache.states.shape[0], generator=torch.Generator().manual_seed(0))[:8192]
    rows = rows[~torch.isin(rows, cache.offsets)]
    taps = cache.states[rows].float().chunk(num_taps, dim=-1)
    return torch.cat([tap.std().expand(tap.shape[-1]) for tap in taps])


def decoder_context(setup: Setup, batch: BlockBatch) -> list[list[KeysValues]]:
    """Keys and values of the decoder's layers over the true context."""
    n, length = batch.sequence.shape
    rope = setup.rope(batch.context_positions)
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(n, -1, -1)
    x, context = batch.context.chunk(len(setup.info.target_layer_ids), dim=-1)[-1], []
    for layer in setup.parts.decoder.layers:
        x, own = layer(x, rope, [], causal)
        context.append([own])
    return context


def predict(adapter: Adapter, setup: Setup, batch: BlockBatch) -> tuple[Tensor, Tensor]:
    """Adapter and decoder over the true blocks: states [N, A, T, taps * hidden] and logits [N, A, T, draft_vocab]."""
    n, a, t = batch.tokens.shape
    context_rope = setup.rope(batch.context_positions)
    context = [[kv] for kv in adapter.context_keys_values(batch.context, context_rope)]
    rope, mask = setup.rope(batch.positions), batch.mask()
    states = adapter(setup.parts.embed(batch.tokens.flatten(1)), rope, context, mask)
    with torch.no_grad():
        above = decoder_context(setup, batch)
    deepest = states.chunk(len(setup.info.target_layer_ids), dim=-1)[-1]
    hidden, _ = setup.parts.decoder(deepest, rope, above, mask)
    return states.view(n, a, t, -1), setup.parts.logits(hidden.view(n, a, t, -1))


@torch.no_grad()
def validate(adapter: Adapter, setup: Setup, data: list[BlockBatch]) -> dict[str, float]:
    """Top-1 agreement of the decoder with the target and its KL, over blocks of true tokens."""
    agree, kl = [], []
    for batch in data:
        with torch.autocast("cpu", torch.bfloat16):
            _, logits = predict(adapter, setup, batch)
            target = setup.parts.logits(batch.final)
        agree.append((logits.argmax(-1) == target.argmax(-1))[batch.inside])
        kl.append(forward_kl(target, logits)[batch.inside])
    return {"top1": torch.cat(agree).float().mean().item(), "kl": torch.cat(kl).mean().item()}


def train_adapter(
    cache: StateCache, setup: Setup, config: LoopConfig, initial: dict[str, Tensor] | None = None, seed: int = 0
) -> tuple[Adapter, list[dict[str, float]]]:
    """Train an adapter of ``setup.info``'s sizes; returns it with its validation record.

    Args:
        initial: weights to go on from; by default copies of the target's layers.
    """
    torch.manual_seed(seed)
    adapter = Adapter(setup.layer_config, list(setup.info.layers_per_module))
    initialise(adapter, setup.weights, setup)
    if initial is not None:
        adapter.load_state_dict(initial)
    scale = state_scale(cache, len(setup.info.target_layer_ids))
    gen = torch.Generator().manual_seed(seed + 1)
    held_out = held_out_batches(cache, setup.held_out, 8, setup.info.block_size, gen)

    def loss_of(batch: BlockBatch) -> tuple[Tensor, dict[str, float]]:
        states, logits = predict(adapter, setup, batch)
        with torch.no_grad():
            target = setup.parts.logits(batch.final)
        state = masked_mean(state_loss(states, batch.states, scale), batch.inside)
        kl = masked_mean(forward_kl(target, logits), batch.inside)
        return state + DECODER_KL_WEIGHT * kl, {"state": state.item(), "kl": kl.item()}

    data = batches(cache, setup.train, 4, 16, setup.info.block_size, seed, config.prompt_share)
    return adapter, train(adapter, data, loss_of, lambda: validate(adapter, setup, held_out), config)
