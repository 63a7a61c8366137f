"""Anchor replacement: after a context refresh, keep what the decoder agrees with, write its token, fix both."""

from __future__ import annotations

import torch
from torch import Tensor


def replace_anchor(blocks: Tensor, likeliest: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """One anchor replacement in every block.

    The first position after the last fixed one at which the decoder's most likely token differs from the draft gets
    that token, and is the new last fixed position. Where the decoder agrees with the whole draft, all of it is fixed.

    Args:
        blocks: [..., γ + 1] int64, anchor first, then the current draft.
        likeliest: [..., γ + 1] int64, the decoder's most likely token *after* each block position.
        fixed: [...] int64, last fixed position, 0 (the anchor) at first.

    Returns:
        The blocks and last fixed positions after the replacement.
    """
    last = blocks.shape[-1] - 1
    position = torch.arange(1, last + 1, device=blocks.device)
    differs = (likeliest[..., :-1] != blocks[..., 1:]) & (position > fixed.unsqueeze(-1))
    first = torch.where(differs, position, last).amin(-1)
    at = torch.arange(last + 1, device=blocks.device) == first.unsqueeze(-1)
    written = torch.cat([blocks[..., :1], likeliest[..., :-1]], dim=-1)
    # Where nothing differs, position γ is written with the token it holds already.
    return torch.where(at & (first > fixed).unsqueeze(-1), written, blocks), torch.maximum(first, fixed)
