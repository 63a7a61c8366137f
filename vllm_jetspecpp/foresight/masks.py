"""Who sees what among the branches of a round. All masks are boolean, True where a query sees a key.

Queries are B branches of T = γ + 1 positions side by side. A *fixed* position f of a branch is the last one that anchor
replacement has settled (0, the anchor, before any).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def branch_masks(num_branches: int, block_size: int, device: torch.device) -> BranchMasks:
    """The one :class:`BranchMasks` of a shape: its constants are made once, not in every round."""
    return BranchMasks(num_branches, block_size, device)


class BranchMasks:
    """Mask pieces for ``num_branches`` blocks of ``block_size`` positions; join them along the key dimension."""

    def __init__(self, num_branches: int, block_size: int, device: torch.device) -> None:
        index = torch.arange(num_branches * block_size, device=device)
        self.block_size = block_size
        self.position = index % block_size  # [B * T]
        branch = index // block_size
        self._same = branch[:, None] == branch  # [B * T, B * T]
        self._causal = self._same & (self.position <= self.position[:, None])

    def _per_key(self, fixed: Tensor) -> Tensor:
        """[rows, B] → [rows, 1, B * T]: every key's branch value."""
        return fixed.repeat_interleave(self.block_size, dim=1).unsqueeze(1)

    def prefix(self, prefix_mask: Tensor) -> Tensor:
        """Verified context, the same for all: [rows, length] → [rows, B * T, length]."""
        return prefix_mask.unsqueeze(1).expand(-1, len(self.position), -1)

    def predicted(self, num_accepted: Tensor, num_states: int) -> Tensor:
        """Predicted states of the block under verification: branch (k, a) sees positions 0..k.

        → [rows, B * T, num_states]; that block can be longer than the branches.
        """
        seen = torch.arange(num_states, device=num_accepted.device) <= num_accepted.unsqueeze(-1)
        return seen.repeat_interleave(self.block_size, dim=1)

    def refreshed(self, fixed: Tensor) -> Tensor:
        """Refreshed states of a branch's own tokens before its last fixed position. → [rows, B * T, B * T]."""
        return self._same & (self.position < self._per_key(fixed))

    def refreshed_before(self, rows: int) -> Tensor:
        """Refreshed states without anchor replacement: those of a branch's tokens before each position."""
        return (self._causal & (self.position < self.position[:, None])).expand(rows, -1, -1)

    def own(self, fixed: Tensor) -> Tensor:
        """The branch's own block from its last fixed position on, causal. → [rows, B * T, B * T]."""
        return self._causal & (self.position >= self._per_key(fixed))
