"""Training blocks: many anchors per sequence in one forward, each with its own view of the sequence.

Shapes: N sequences padded to L tokens, A anchors each, blocks of T = γ + 1 tokens; blocks stand side by side, so a
model sees A * T queries per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_jetspecpp.models.attention import causal_blocks
from vllm_jetspecpp.training.target_states import StateCache


@dataclass(frozen=True)
class BlockBatch:
    """One step's data."""

    context: Tensor  # [N, L, num_taps * hidden], true states
    anchors: Tensor  # [N, A] int64, position of each block's anchor
    lengths: Tensor  # [N] int64
    tokens: Tensor  # [N, A, T] int64, the sequence's own tokens from the anchor on (the last one repeated past its end)
    states: Tensor  # [N, A, T, num_taps * hidden], their true states
    final: Tensor  # [N, A, T, hidden], row j gives the target's distribution of the token after block position j
    sequence: Tensor  # [N, L] int64, whole sequences, for noise

    @property
    def inside(self) -> Tensor:
        """[N, A, T] bool: block positions that lie within the sequence."""
        return self.positions < self.lengths[:, None, None]

    @property
    def positions(self) -> Tensor:
        """[N, A, T] int64, absolute."""
        return self.anchors[..., None] + torch.arange(self.tokens.shape[-1])

    @property
    def context_positions(self) -> Tensor:
        """[N, L] int64."""
        return torch.arange(self.context.shape[1]).expand(self.context.shape[0], -1)

    def context_mask(self) -> Tensor:
        """[N, A * T, L] bool: a block sees the states before its anchor."""
        seen = torch.arange(self.context.shape[1]) < self.anchors[..., None]
        return seen.repeat_interleave(self.tokens.shape[-1], dim=1)

    def mask(self) -> Tensor:
        """[N, A * T, L + A * T] bool: context, then the blocks themselves, causal and each for itself."""
        n, a, t = self.tokens.shape
        blocks = causal_blocks(a, t, self.context.device).expand(n, -1, -1)
        return torch.cat([self.context_mask(), blocks], dim=-1)


def sample_anchors(low: Tensor, high: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` positions per sequence, uniform over [low, high) (both [N] int64) → [N, count] int64."""
    u = torch.rand(len(low), count, generator=generator)
    return (low[:, None] + (u * (high - low)[:, None]).long()).clamp(max=high[:, None] - 1)


FIRST_ANCHOR = 24
"""Blocks in prompts start here: what stands before is the chat template, the same every time."""


def make_batch(
    cache: StateCache,
    members: list[int],
    num_anchors: int,
    block_size: int,
    gen: torch.Generator,
    prompt_share: float = 0.0,
) -> BlockBatch:
    """Blocks of sequences ``members`` at random anchors: in their answers, and a share of them in the prompts.

    The target's states and distributions over prompts come for free with those over answers, and overfitting comes
    later with them.
    """
    starts = cache.offsets[members]
    lengths = cache.offsets[[m + 1 for m in members]] - starts
    prompts = cache.prompt_lengths[members]
    in_prompt = int(num_anchors * prompt_share)
    anchors = torch.cat(
        [
            sample_anchors((prompts - 1).clamp(max=FIRST_ANCHOR), prompts, in_prompt, gen),
            sample_anchors(prompts, lengths - 1, num_anchors - in_prompt, gen),
        ],
        dim=1,
    )
    within = torch.minimum(anchors[..., None] + torch.arange(block_size), (lengths - 1)[:, None, None])
    rows = starts[:, None, None] + within
    columns = torch.minimum(torch.arange(int(lengths.max())), (lengths - 1)[:, None])
    context_rows = starts[:, None] + columns
    return BlockBatch(
        context=cache.states[context_rows],
        anchors=anchors,
        lengths=lengths,
        tokens=cache.tokens[rows].long(),
        states=cache.states[rows],
        final=cache.final[rows],
        sequence=cache.tokens[context_rows].long(),
    )


def held_out_batches(
    cache: StateCache, members: list[int], num_anchors: int, block_size: int, gen: torch.Generator
) -> list[BlockBatch]:
    """Fixed batches of four sequences for validation, blocks in the answers."""
    groups = [members[i : i + 4] for i in range(0, len(members), 4)]
    return [make_batch(cache, group, num_anchors, block_size, gen) for group in groups]


def batches(
    cache: StateCache,
    members: list[int],
    num_sequences: int,
    num_anchors: int,
    block_size: int,
    seed: int,
    prompt_share: float,
) -> Iterator[BlockBatch]:
    """Endless batches; each epoch shuffles anew and groups sequences of like length."""
    gen = torch.Generator().manual_seed(seed)
    lengths = cache.offsets.diff()
    while True:
        order = torch.tensor(members)[torch.randperm(len(members), generator=gen)]
        pools = [pool[lengths[pool].argsort()] for pool in order.split(16 * num_sequences)]
        groups = [g for pool in pools for g in pool.split(num_sequences)]
        for index in torch.randperm(len(groups), generator=gen).tolist():
            yield make_batch(cache, groups[index].tolist(), num_anchors, block_size, gen, prompt_share)


def noise_tokens(batch: BlockBatch, gen: torch.Generator) -> Tensor:
    """[N, A, T] int64: for every block position a token drawn uniformly from the sequence before the anchor."""
    n, a, t = batch.tokens.shape
    positions = (torch.rand(n, a, t, generator=gen) * batch.anchors[..., None]).long()
    return batch.sequence.gather(1, positions.flatten(1)).view(n, a, t)


def clean_prefix_lengths(shape: torch.Size, block_size: int, zero_share: float, gen: torch.Generator) -> Tensor:
    """m of Eq. 9 for every block, [N, A] int64: 0 with probability ``zero_share``, else uniform over 1..γ-1.

    Our choice; the paper's schedule is not public. m = 0 must stay frequent: J_0 and every fallback start there.
    """
    m = torch.randint(1, max(block_size - 1, 2), shape, generator=gen)
    return m.masked_fill(torch.rand(shape, generator=gen) < zero_share, 0)
