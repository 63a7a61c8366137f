"""Which outcomes to pre-draft: the B of highest score (Eq. 7), scored by Eq. 6 or by Eq. 12."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_jetspecpp.config import AUTO, CALIBRATED, CONFORMAL, UNCALIBRATED, RoundConfig
from vllm_jetspecpp.foresight.calibrated_score import calibrated_log_scores
from vllm_jetspecpp.foresight.outcome_distribution import outcome_log_probs
from vllm_jetspecpp.models.calibration import Calibration, check_selection


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


class OutcomeSelector:
    """The rule a draft process selects by, fixed at its start.

    Args:
        config: ``selection`` and B. ``auto`` is ``calibrated`` where there is a calibration, else ``uncalibrated``.
        calibration: the checkpoint's, if it has one.
        device: where rounds run; w is put there once, not in every round.

    Raises:
        ValueError: the rule needs a calibration and there is none.
    """

    def __init__(
        self, config: RoundConfig, calibration: Calibration | None, device: torch.device | str = "cpu"
    ) -> None:
        self.num_outcomes, self.calibration = config.num_outcomes, calibration
        self.rule = config.selection
        if self.rule == AUTO:
            self.rule = CALIBRATED if calibration else UNCALIBRATED
        check_selection(self.rule, calibration)
        self._weights = torch.tensor(calibration.weights, device=device) if calibration else None

    def __call__(self, log_probs: Tensor, drafts: Tensor, confidence: Tensor) -> SelectedOutcomes:
        """Choose B outcomes a row.

        Args:
            log_probs: [rows, γ + 1, vocab], log p̂(· | j).
            drafts: [rows, γ] int64 as indices into vocab, -1 outside it.
            confidence: [rows, γ], log of the draft model's largest probability at each position.
        """
        if self.rule == UNCALIBRATED or self.calibration is None or self._weights is None:
            return select_outcomes(outcome_log_probs(log_probs, drafts), self.num_outcomes)
        scores, tokens = calibrated_log_scores(log_probs, drafts, confidence, self._weights, self.calibration.beta)
        if self.rule == CONFORMAL:
            scores = scores.masked_fill(scores < self.calibration.threshold, float("-inf"))
        chosen = select_outcomes(scores, self.num_outcomes)
        index = chosen.num_accepted * tokens.shape[-1] + chosen.bonus
        return chosen._replace(bonus=tokens.flatten(1).gather(1, index))
