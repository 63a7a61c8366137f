"""Noise tokens: what the draft model reads where it has no token yet, drawn uniformly from the verified context.

The draw is a hash of positions, not a stream: a block gets the same noise whenever it is drafted and whatever other
requests stand beside it, and a CUDA graph needs no generator. It depends on nothing the target draws, as losslessness
asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407


def noise_positions(anchor_positions: Tensor, num_draft_tokens: int) -> Tensor:
    """Positions to copy noise from.

    Args:
        anchor_positions: [...] int64, n > 0 of each block; all positions below are context.
        num_draft_tokens: γ.

    Returns:
        [..., γ] int64 in [0, n).
    """
    index = torch.arange(1, num_draft_tokens + 1, device=anchor_positions.device)
    x = anchor_positions.unsqueeze(-1) * 1_000_003 + index
    for _ in range(3):  # int64 wraps around, as the hash wants
        x = x * _MULTIPLIER + _INCREMENT
        x = x ^ (x >> 29)
    return (x & 0x7FFF_FFFF) % anchor_positions.clamp(min=1).unsqueeze(-1)
