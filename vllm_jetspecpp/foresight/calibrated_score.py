"""The calibrated score of an outcome (Eq. 12): how far the decoder's word is to be trusted, fitted on held-out rounds.

Only which outcomes are drafted for depends on it, never the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_CANDIDATES = 32
"""Bonus tokens considered at every length (the paper's top 32)."""
POSITION_SCALE = 14.0
SMALLEST = 1e-6
"""Probabilities are kept this far from 0 and 1 before their logit is taken (our choice)."""


class Candidates(NamedTuple):
    """The decoder's likeliest bonus tokens at every length."""

    log_probs: Tensor  # [rows, γ + 1, 32], descending
    tokens: Tensor  # [rows, γ + 1, 32] int64, indices into the decoder's vocabulary


def top_candidates(log_probs: Tensor) -> Candidates:
    """Of ``log_probs`` [rows, γ + 1, vocab]."""
    return Candidates(*log_probs.topk(min(NUM_CANDIDATES, log_probs.shape[-1]), dim=-1))


def logit(log_p: Tensor) -> Tensor:
    """log p → log(p / (1 - p)), with p kept within [1e-6, 1 - 1e-6]."""
    p = log_p.exp().clamp(SMALLEST, 1 - SMALLEST)
    return p.log() - (-p).log1p()


def features(log_probs: Tensor, drafts: Tensor, confidence: Tensor, candidates: Candidates) -> Tensor:
    """φ_i of every draft position, in the paper's order (Appendix B.1).

    Args:
        log_probs: [rows, γ + 1, vocab], log p̂(· | j).
        drafts: [rows, γ] int64, d_1..d_γ as indices into vocab, -1 for a token outside it.
        confidence: [rows, γ], log of the draft model's largest probability in the last pass that drafted the position.
        candidates: :func:`top_candidates` of ``log_probs``.

    Returns:
        [rows, γ, 6] float32.
    """
    before = log_probs[:, :-1].float()
    of_draft = before.gather(-1, drafts.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    of_draft = of_draft.masked_fill(drafts < 0, float("-inf"))
    best, second = candidates.log_probs[:, :-1, 0].float(), candidates.log_probs[:, :-1, 1].float()
    is_best = candidates.tokens[:, :-1, 0] == drafts
    other = torch.where(is_best, second, best)
    rest = torch.log1p(-of_draft.exp().clamp(max=1 - SMALLEST))
    position = torch.arange(1, drafts.shape[1] + 1, device=drafts.device, dtype=torch.float32) / POSITION_SCALE
    columns = [
        logit(confidence.float()),
        logit(of_draft),
        is_best.float(),
        logit((other - rest).clamp(max=0)),
        position.expand(drafts.shape),
        torch.ones_like(of_draft),
    ]
    return torch.stack(columns, dim=-1)


def length_log_probs(phi: Tensor, weights: Tensor) -> Tensor:
    """log P̃(k) for k = 0..γ from φ [rows, γ, 6] and w [6] → [rows, γ + 1]."""
    evidence = phi @ weights
    reached = F.pad(F.logsigmoid(evidence).cumsum(-1), (1, 0))
    return reached + F.pad(F.logsigmoid(-evidence), (0, 1))


def bonus_log_probs(candidates: Candidates, drafts: Tensor, beta: float | Tensor) -> Tensor:
    """log P_β(a | k) of the candidates, d_{k+1} removed where k < γ. → [rows, γ + 1, 32]."""
    removed = candidates.tokens == F.pad(drafts, (0, 1), value=-1).unsqueeze(-1)
    return (candidates.log_probs.float() / beta).masked_fill(removed, float("-inf")).log_softmax(-1)


def candidate_log_scores(
    phi: Tensor, candidates: Candidates, drafts: Tensor, weights: Tensor, beta: float | Tensor
) -> Tensor:
    """log P̃(k) + log P_β(a | k) of every candidate, [rows, γ + 1, 32], from φ [rows, γ, 6]."""
    return length_log_probs(phi, weights).unsqueeze(-1) + bonus_log_probs(candidates, drafts, beta)


def calibrated_log_scores(
    log_probs: Tensor, drafts: Tensor, confidence: Tensor, weights: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Scores of the candidates of a round; the first three arguments as in :func:`features`, ``weights`` is w [6].

    Returns:
        Scores [rows, γ + 1, 32] and the candidates' tokens, of the same shape.
    """
    candidates = top_candidates(log_probs)
    phi = features(log_probs, drafts, confidence, candidates)
    return candidate_log_scores(phi, candidates, drafts, weights, beta), candidates.tokens
