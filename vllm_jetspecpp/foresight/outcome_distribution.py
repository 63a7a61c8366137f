"""The distribution of verification outcomes from one decoder pass (Eq. 6)."""

from __future__ import annotations

import torch
from torch import Tensor


def outcome_log_probs(log_probs: Tensor, drafts: Tensor) -> Tensor:
    """log P(k, a) of every outcome of a block.

    With p̂_j = p̂(d_j | j-1): P(k, a) = (∏_{j≤k} p̂_j) p̂(a | k), where a = d_{k+1} is impossible for k < γ. Exact for
    a perfect decoder at any temperature (Proposition 1); the probabilities of a row add up to 1.

    Args:
        log_probs: [rows, γ + 1, vocab], log p̂(· | j) for j = 0..γ.
        drafts: [rows, γ] int64, the block's draft tokens as indices into vocab; -1 for a token outside it, which the
            decoder holds to be impossible.

    Returns:
        [rows, γ + 1, vocab], entry (k, a); -inf where impossible.
    """
    known = (drafts >= 0).unsqueeze(-1)
    index = drafts.clamp(min=0).unsqueeze(-1)
    accepted = torch.where(known, log_probs[:, :-1].gather(-1, index), float("-inf")).squeeze(-1)
    reached = torch.cat([torch.zeros_like(accepted[:, :1]), accepted.cumsum(-1)], dim=-1)
    scores = log_probs + reached.unsqueeze(-1)
    kept = torch.where(known, float("-inf"), scores[:, :-1].gather(-1, index))
    return torch.cat([scores[:, :-1].scatter(-1, index, kept), scores[:, -1:]], dim=1)
