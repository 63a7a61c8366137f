"""Which outcomes to pre-draft: the B most probable ones (Eq. 7)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SelectedOutcomes(NamedTuple):
    """B outcomes a row, most probable first."""

    num_accepted: Tensor  # [rows, B] int64, k
    bonus: Tensor  # [rows, B] int64, a as an index into the decoder's vocabulary
    log_prob: Tensor  # [rows, B]; -inf marks a filler where fewer than B outcomes are possible


def select_outcomes(scores: Tensor, num_outcomes: int) -> SelectedOutcomes:
    """The ``num_outcomes`` best entries of ``scores`` [rows, γ + 1, vocab] in every row.

    The best B of a row lie among the best B of each k, so two small searches replace one over all outcomes. With
    fewer than B entries in all, the worst is repeated and marked as filler.
    """
    _, lengths, vocab = scores.shape
    width = min(num_outcomes, vocab)
    best, tokens = scores.topk(width, dim=-1)
    count = min(num_outcomes, lengths * width)
    log_prob, flat = best.flatten(1).topk(count, dim=-1)
    k, a = flat // width, tokens.flatten(1).gather(1, flat)
    missing = num_outcomes - count
    if missing:
        k = torch.cat([k, k[:, -1:].expand(-1, missing)], dim=1)
        a = torch.cat([a, a[:, -1:].expand(-1, missing)], dim=1)
        log_prob = F.pad(log_prob, (0, missing), value=float("-inf"))
    return SelectedOutcomes(k, a, log_prob)
