"""Losses of draft model and adapter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def forward_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """D(p ‖ q) per row: Σ_v p(v) (log p(v) - log q(v)), in float32.

    Args:
        target_logits: [..., vocab], p.
        draft_logits: [..., vocab], q.

    Returns:
        [...] float32, at least 0.
    """
    log_p = F.log_softmax(target_logits.float(), dim=-1)
    log_q = F.log_softmax(draft_logits.float(), dim=-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)


def reverse_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """D(q ‖ p) per row; arguments as in :func:`forward_kl`."""
    return forward_kl(draft_logits, target_logits)


def cross_entropy(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """-log q of the target's likeliest token per row; arguments as in :func:`forward_kl`."""
    rows, vocab = draft_logits.shape[:-1], draft_logits.shape[-1]
    best = target_logits.argmax(-1).flatten()
    return F.cross_entropy(draft_logits.float().view(-1, vocab), best, reduction="none").view(rows)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "cross_entropy": cross_entropy,
}
"""D of Eq. 9 by name."""


def state_loss(predicted: Tensor, true: Tensor, scale: Tensor) -> Tensor:
    """Smooth L1 plus cosine distance per position, over the concatenated tapped states (Eq. 5's loss).

    Args:
        predicted: [..., num_taps * hidden].
        true: same shape.
        scale: [num_taps * hidden], typical size of each tap's states: Smooth L1 is taken of states divided by it, or
            the deep layers, whose states are largest, would drown the others.

    Returns:
        [...] float32.
    """
    predicted, true = predicted.float() / scale, true.float() / scale
    return (
        F.smooth_l1_loss(predicted, true, reduction="none").mean(-1) + 1 - F.cosine_similarity(predicted, true, dim=-1)
    )


def masked_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of ``values`` [...] with weights of the same shape; 0 where all weights are 0."""
    weights = weights.to(values.dtype)
    return torch.where(weights > 0, values, 0).mul(weights).sum() / weights.sum().clamp(min=1e-9)
