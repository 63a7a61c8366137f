"""Recorded rounds: what the draft process knew of each verification, and how it ended; replays under other rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_jetspecpp.foresight.calibrated_score import (
    Candidates,
    candidate_log_scores,
    features,
    top_candidates,
)
from vllm_jetspecpp.foresight.outcome_selection import select_outcomes


@dataclass(frozen=True)
class Rounds:
    """N recorded rounds; tokens are rows of the decoder's shortened head."""

    phi: Tensor  # [N, γ, 6] float32, features of every draft position
    drafts: Tensor  # [N, γ] int64
    draft_log_probs: Tensor  # [N, γ] float32, log p̂(d_i | i - 1)
    candidate_log_probs: Tensor  # [N, γ + 1, 32] float32
    candidate_tokens: Tensor  # [N, γ + 1, 32] int64
    num_accepted: Tensor  # [N] int64, realised k
    bonus: Tensor  # [N] int64, realised a; -1 outside the head

    def __len__(self) -> int:
        return len(self.num_accepted)

    @property
    def candidates(self) -> Candidates:
        """The decoder's likeliest bonus tokens."""
        return Candidates(self.candidate_log_probs, self.candidate_tokens)

    def select(self, index: Tensor) -> Rounds:
        """The rounds at ``index``."""
        return Rounds(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Rounds]) -> Rounds:
        """All rounds of ``parts``."""
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))


def make_rounds(log_probs: Tensor, drafts: Tensor, confidence: Tensor, num_accepted: Tensor, bonus: Tensor) -> Rounds:
    """Rounds from what their foresight saw; the first three arguments as in ``calibrated_score.features``."""
    candidates = top_candidates(log_probs)
    known = drafts >= 0
    of_draft = log_probs[:, :-1].gather(-1, drafts.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Rounds(
        phi=features(log_probs, drafts, confidence, candidates),
        drafts=drafts,
        draft_log_probs=of_draft.float().masked_fill(~known, float("-inf")),
        candidate_log_probs=candidates.log_probs.float(),
        candidate_tokens=candidates.tokens,
        num_accepted=num_accepted,
        bonus=bonus,
    )


def realised_index(rounds: Rounds) -> Tensor:
    """Place of the realised bonus token among the candidates at the realised k, [N] int64; -1 where it is none."""
    row = torch.arange(len(rounds))
    same = rounds.candidate_tokens[row, rounds.num_accepted] == rounds.bonus.unsqueeze(-1)
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def log_scores(rounds: Rounds, weights: Tensor, beta: float) -> Tensor:
    """log P̃(k) + log P_β(a | k) of every candidate, [N, γ + 1, 32]."""
    return candidate_log_scores(rounds.phi, rounds.candidates, rounds.drafts, weights.to(rounds.phi.dtype), beta)


def uncalibrated_scores(rounds: Rounds) -> Tensor:
    """log P(k, a) of Eq. 6 for every candidate, [N, γ + 1, 32]: what calibration is compared with."""
    reached = F.pad(rounds.draft_log_probs.cumsum(-1), (1, 0))
    removed = rounds.candidate_tokens == F.pad(rounds.drafts, (0, 1), value=-1).unsqueeze(-1)
    return (rounds.candidate_log_probs + reached.unsqueeze(-1)).masked_fill(removed, float("-inf"))


def realised_scores(rounds: Rounds, scores: Tensor) -> Tensor:
    """Score of the realised outcome of each round, [N]; -inf where it is no candidate."""
    index = realised_index(rounds)
    found = scores[torch.arange(len(rounds)), rounds.num_accepted, index.clamp(min=0)]
    return found.masked_fill(index < 0, float("-inf"))


def realised_ranks(rounds: Rounds, scores: Tensor, size: int) -> Tensor:
    """Place of the realised outcome among the ``size`` best of ``scores``, [N] int64 from 0; -1 where it is not."""
    chosen = select_outcomes(scores, size)
    tokens = rounds.candidate_tokens.flatten(1).gather(1, chosen.num_accepted * scores.shape[-1] + chosen.bonus)
    same = (chosen.num_accepted == rounds.num_accepted.unsqueeze(-1)) & (tokens == rounds.bonus.unsqueeze(-1))
    same &= chosen.log_prob.isfinite()
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def hit_rates(rounds: Rounds, scores: Tensor, sizes: tuple[int, ...]) -> dict[int, float]:
    """Share of rounds whose realised outcome is among the B best of ``scores``, for each B ≤ 32 in ``sizes``."""
    ranks = realised_ranks(rounds, scores, max(sizes))
    return {size: ((ranks >= 0) & (ranks < size)).float().mean().item() for size in sizes}
