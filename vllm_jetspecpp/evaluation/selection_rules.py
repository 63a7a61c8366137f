"""Recorded rounds under other rules of selection: the paper's Table 11, and Proposition 2(b) as a replay."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_jetspecpp.evaluation.fan_out import FanOut, GeometricLaw, fit_acceptance_rate, fit_exponent, integer_fan_out
from vllm_jetspecpp.evaluation.rounds import Rounds, hit_rates, log_scores, uncalibrated_scores
from vllm_jetspecpp.foresight.calibrated_score import bonus_log_probs
from vllm_jetspecpp.models.calibration import Calibration

SERVED, UNCALIBRATED, DRAFT_MODEL = "served", "uncalibrated", "draft model"
GEOMETRIC_DRAFT, GEOMETRIC_DECODER = "geometric, draft anchors", "geometric, decoder anchors"
RULES = (SERVED, UNCALIBRATED, DRAFT_MODEL, GEOMETRIC_DRAFT, GEOMETRIC_DECODER)


def draft_model_scores(rounds: Rounds, beta: float) -> Tensor:
    """The served rule with P(k) of Eq. 6 from the draft model's own probabilities of its tokens, [N, γ + 1, 32]."""
    evidence = rounds.phi[..., 0]  # the logit of that probability
    reached = F.pad(F.logsigmoid(evidence).cumsum(-1), (1, 0))
    lengths = reached + F.pad(F.logsigmoid(-evidence), (0, 1))
    return lengths.unsqueeze(-1) + bonus_log_probs(rounds.candidates, rounds.drafts, beta)


def anchors(rounds: Rounds) -> Tensor:
    """Candidate bonus tokens, likeliest first; -2 in place of d_{k+1}, which is no outcome at k. [N, γ + 1, 32]"""
    impossible = F.pad(rounds.drafts, (0, 1), value=-3).unsqueeze(-1)
    return rounds.candidate_tokens.masked_fill(rounds.candidate_tokens == impossible, -2)


def realised_rank(rounds: Rounds) -> Tensor:
    """Place of the realised bonus token among the anchors at the realised k, from 1; large where it is none. [N]"""
    row = torch.arange(len(rounds))
    there = anchors(rounds)[row, rounds.num_accepted]
    same = there == rounds.bonus.unsqueeze(-1)
    place = (there != -2).long().cumsum(-1)
    return torch.where(same.any(-1), place.gather(1, same.int().argmax(-1, keepdim=True)).squeeze(-1), 1 << 30)


def with_draft_anchors(rounds: Rounds, candidates: Tensor) -> Rounds:
    """The same rounds with the draft model's anchors below γ, where it has a distribution.

    Args:
        candidates: [N, γ, 32], its likeliest tokens at every draft position.
    """
    width = rounds.candidate_tokens.shape[-1]
    tokens = torch.cat([candidates[..., :width], rounds.candidate_tokens[:, -1:]], dim=1)
    return replace(rounds, candidate_tokens=tokens)


def fit_law(rounds: Rounds) -> GeometricLaw:
    """α and ρ of SSD's assumptions on recorded rounds."""
    gamma = rounds.drafts.shape[1]
    return GeometricLaw(
        fit_acceptance_rate(rounds.num_accepted.tolist(), gamma), fit_exponent(realised_rank(rounds).tolist())
    )


def fan_out_hit_rate(rounds: Rounds, fan_out: FanOut) -> float:
    """Share of rounds whose realised bonus token is among the first F_k anchors at the realised k."""
    return float((realised_rank(rounds) <= torch.tensor(fan_out)[rounds.num_accepted]).float().mean())


def rule_hit_rates(
    rounds: Rounds,
    draft_candidates: Tensor,
    calibration: Calibration,
    laws: dict[str, GeometricLaw],
    sizes: tuple[int, ...],
) -> dict[str, dict[int, float]]:
    """Hit rate of every rule at every cache size.

    Args:
        draft_candidates: [N, γ, 32], see :func:`with_draft_anchors`.
        laws: of the two geometric rules, fitted on calibration rounds.
    """
    weights = torch.tensor(calibration.weights)
    scores = {
        SERVED: log_scores(rounds, weights, calibration.beta),
        UNCALIBRATED: uncalibrated_scores(rounds),
        DRAFT_MODEL: draft_model_scores(rounds, calibration.beta),
    }
    rates = {rule: hit_rates(rounds, values, sizes) for rule, values in scores.items()}
    gamma = rounds.drafts.shape[1]
    views = {GEOMETRIC_DRAFT: with_draft_anchors(rounds, draft_candidates), GEOMETRIC_DECODER: rounds}
    for rule, view in views.items():
        rates[rule] = {b: fan_out_hit_rate(view, integer_fan_out(laws[rule], gamma, b)) for b in sizes}
    return rates


def posterior_masses(rounds: Rounds, size: int) -> tuple[float, float]:
    """Proposition 2(b): mean posterior mass of the B best outcomes of each round, and of the best fixed allocation.

    The posterior is the decoder's Eq. 6. Within one k the s-th anchor's mass falls with s, so the best allocation in
    hindsight takes the B ranks (k, s) of largest mean mass. The first is never smaller.
    """
    masses = uncalibrated_scores(rounds).double().exp().sort(dim=-1, descending=True).values.flatten(1)
    selected = masses.topk(size, dim=-1).values.sum(-1).mean()
    fixed = masses.mean(0).topk(size).values.sum()
    return float(selected), float(fixed)


def decoder_loss_bound(reach: Tensor, distance: Tensor) -> Tensor:
    """Remark 3: the most that selecting by an imperfect decoder can lose of the best cache's hit probability.

    2 Σ_j P(the first j drafts are accepted) TV(p(· | j), p̂(· | j)), whatever B is; derived in docs/theory.md.

    Args:
        reach: [..., γ + 1], the target's probability that position j is reached (1 at j = 0).
        distance: [..., γ + 1], total variation between the target's and the decoder's next-token distributions there.
    """
    return 2 * (reach * distance).sum(-1)
