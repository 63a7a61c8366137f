"""The prefix schedule of Eq. 9: how many true tokens a training block starts with."""

from __future__ import annotations

import torch
from torch import Tensor


def clean_prefix_lengths(shape: torch.Size, block_size: int, zero_share: float, gen: torch.Generator) -> Tensor:
    """m of Eq. 9 for every block, [N, A] int64: 0 with probability ``zero_share``, else uniform over 1..γ-1.

    Our choice; the paper's schedule is not public. m = 0 must stay frequent: J_0 and every fallback start there.
    """
    m = torch.randint(1, max(block_size - 1, 2), shape, generator=gen)
    return m.masked_fill(torch.rand(shape, generator=gen) < zero_share, 0)
