"""Training blocks: many anchors per sequence in one forward, each with its own view of the sequence.

Shapes: N sequences padded to L tokens, A anchors each, blocks of T = γ + 1 tokens; blocks stand side by side, so a
model sees A * T queries per sequence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vllm_jetspecpp.models.attention import causal_blocks, whole_blocks
from vllm_jetspecpp.training.target_states import Sequences, StateSource


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
        return self.anchors[..., None] + torch.arange(self.tokens.shape[-1], device=self.tokens.device)

    @property
    def context_positions(self) -> Tensor:
        """[N, L] int64."""
        return torch.arange(self.context.shape[1], device=self.context.device).expand(self.context.shape[0], -1)

    def context_mask(self) -> Tensor:
        """[N, A * T, L] bool: a block sees the states before its anchor."""
        seen = torch.arange(self.context.shape[1], device=self.context.device) < self.anchors[..., None]
        return seen.repeat_interleave(self.tokens.shape[-1], dim=1)

    def mask(self, causal: bool = True) -> Tensor:
        """[N, A * T, L + A * T] bool: context, then the blocks themselves, each for itself."""
        n, a, t = self.tokens.shape
        blocks = (causal_blocks if causal else whole_blocks)(a, t, self.context.device).expand(n, -1, -1)
        return torch.cat([self.context_mask(), blocks], dim=-1)

    def with_blocks(self, tokens: Tensor, states: Tensor, final: Tensor) -> BlockBatch:
        """The same anchors with other blocks and the target's states over those."""
        return replace(self, tokens=tokens, states=states, final=final)

    def to(self, device: torch.device) -> BlockBatch:
        """The same batch on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def sample_anchors(low: Tensor, high: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` positions per sequence, uniform over [low, high) (both [N] int64) → [N, count] int64."""
    u = torch.rand(len(low), count, generator=generator)
    return (low[:, None] + (u * (high - low)[:, None]).long()).clamp(max=high[:, None] - 1)


FIRST_ANCHOR = 24
"""Blocks in prompts start here: what stands before is the chat template, the same every time."""


def make_batch(
    source: StateSource,
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
    sequences = source.sequences
    starts = sequences.offsets[members]
    lengths = sequences.offsets[[m + 1 for m in members]] - starts
    prompts = sequences.prompt_lengths[members]
    in_prompt = int(num_anchors * prompt_share)
    anchors = torch.cat(
        [
            sample_anchors((prompts - 1).clamp(max=FIRST_ANCHOR), prompts, in_prompt, gen),
            sample_anchors(prompts, lengths - 1, num_anchors - in_prompt, gen),
        ],
        dim=1,
    )
    within = torch.minimum(anchors[..., None] + torch.arange(block_size), (lengths - 1)[:, None, None])
    sequence = sequences.tokens[sequences.padded_rows(members)].long()
    states, final = source.read(members)
    row = torch.arange(len(members))[:, None, None]
    return BlockBatch(
        context=states,
        anchors=anchors,
        lengths=lengths,
        tokens=sequence[row, within],
        states=states[row, within],
        final=final[row, within],
        sequence=sequence,
    )


def held_out_batches(
    source: StateSource, members: list[int], num_anchors: int, block_size: int, gen: torch.Generator
) -> list[BlockBatch]:
    """Fixed batches of four sequences for validation, blocks in the answers."""
    groups = [members[i : i + 4] for i in range(0, len(members), 4)]
    return [make_batch(source, group, num_anchors, block_size, gen) for group in groups]


@dataclass
class Shuffle:
    """Which sequences make up which batch: a function of the batch's number alone, so that a resumed run goes on alike.

    Each epoch shuffles anew and groups sequences of like length.
    """

    sequences: Sequences
    members: list[int]
    batch: int
    seed: int
    _latest: tuple[int, list[list[int]]] = (-1, [])
    """The epoch asked for last, and its batches."""

    def __call__(self, number: int) -> list[int]:
        """Members of batch ``number`` (0, 1, ...; epochs follow each other without end)."""
        per_epoch = -(-len(self.members) // self.batch)
        epoch, index = divmod(number, per_epoch)
        if self._latest[0] != epoch:
            self._latest = epoch, self._epoch(epoch)
        return self._latest[1][index]

    def _epoch(self, epoch: int) -> list[list[int]]:
        gen = torch.Generator().manual_seed(derive_seed(self.seed, epoch, -1))
        order = torch.tensor(self.members)[torch.randperm(len(self.members), generator=gen)]
        lengths = self.sequences.offsets.diff()
        pools = [pool[lengths[pool].argsort(stable=True)] for pool in order.split(16 * self.batch)]
        groups = [group.tolist() for pool in pools for group in pool.split(self.batch)]
        return [groups[i] for i in torch.randperm(len(groups), generator=gen).tolist()]


def derive_seed(*parts: int) -> int:
    """A seed for ``parts``: equal parts, equal seed; unlike ones as good as never."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def noise_tokens(batch: BlockBatch, gen: torch.Generator) -> Tensor:
    """[N, A, T] int64: for every block position a token drawn uniformly from the sequence before the anchor."""
    n, a, t = batch.tokens.shape
    positions = (torch.rand(n, a, t, generator=gen) * batch.anchors[..., None]).long()
    return batch.sequence.gather(1, positions.flatten(1)).view(n, a, t)
