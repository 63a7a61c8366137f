"""Fits on recorded rounds: w and β of Eq. 12 by maximum likelihood, and the split-conformal threshold λ."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_jetspecpp.calibration.rounds import Rounds
from vllm_jetspecpp.foresight.calibrated_score import bonus_log_probs, length_log_probs
from vllm_jetspecpp.foresight.outcome_selection import select_outcomes
from vllm_jetspecpp.models.calibration import NUM_FEATURES, Calibration

RIDGE = 1e-5
"""Weight of |w|² in the mean log-likelihood: keeps w finite where a feature separates the rounds perfectly."""


def _minimise(parameters: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """L-BFGS in float64; both losses here are convex."""
    x = parameters.double().requires_grad_(True)
    optimizer = torch.optim.LBFGS([x], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(x)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[arg-type]
    return x.detach()


def fit_weights(rounds: Rounds) -> Tensor:
    """w [6] that maximises the likelihood of the realised k: logistic regression of acceptance on φ."""
    phi, k = rounds.phi.double(), rounds.num_accepted.unsqueeze(-1)

    def loss(w: Tensor) -> Tensor:
        return -length_log_probs(phi, w).gather(-1, k).mean() + RIDGE * w.square().sum()

    return _minimise(torch.zeros(NUM_FEATURES), loss)


def realised_index(rounds: Rounds) -> Tensor:
    """Place of the realised bonus token among the candidates at the realised k, [N] int64; -1 where it is none."""
    row = torch.arange(len(rounds))
    same = rounds.candidate_tokens[row, rounds.num_accepted] == rounds.bonus.unsqueeze(-1)
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def fit_beta(rounds: Rounds) -> float:
    """β that maximises the likelihood of the realised bonus token, over rounds where it is a candidate."""
    index = realised_index(rounds)
    known = rounds.select((index >= 0).nonzero().flatten())
    row, index = torch.arange(len(known)), index[index >= 0]

    def loss(log_beta: Tensor) -> Tensor:
        scores = bonus_log_probs(known.candidates, known.drafts, log_beta.exp())
        return -scores[row, known.num_accepted, index].mean()

    # L-BFGS may try extreme values on few rounds; β of real decoders lies around 1.
    return math.exp(float(_minimise(torch.zeros(()), loss).clamp(-3.0, 3.0)))


def log_scores(rounds: Rounds, weights: Tensor, beta: float) -> Tensor:
    """log P̃(k) + log P_β(a | k) of every candidate, [N, γ + 1, 32]."""
    lengths = length_log_probs(rounds.phi, weights.to(rounds.phi.dtype))
    return lengths.unsqueeze(-1) + bonus_log_probs(rounds.candidates, rounds.drafts, beta)


def realised_scores(rounds: Rounds, scores: Tensor) -> Tensor:
    """Score of the realised outcome of each round, [N]; -inf where it is no candidate."""
    index = realised_index(rounds)
    found = scores[torch.arange(len(rounds)), rounds.num_accepted, index.clamp(min=0)]
    return found.masked_fill(index < 0, float("-inf"))


def conformal_threshold(realised: Tensor, coverage: float) -> float:
    """λ such that a fresh round's realised outcome scores at least λ with probability ≥ ``coverage``.

    Split-conformal prediction (Angelopoulos & Bates 2023): the ⌊(1 - coverage)(n + 1)⌋-th smallest score, -inf where
    that is the 0-th. Holds for exchangeable rounds, whatever the score; rounds of one answer are not quite that.
    """
    rank = math.floor((1 - coverage) * (len(realised) + 1) + 1e-9)  # .1 * 10 is a little less than 1
    return float(realised.sort().values[rank - 1]) if rank else -math.inf


LOWEST_THRESHOLD = -1e9
"""Stands for -inf in JSON."""


def fit(rounds: Rounds, coverage: float) -> Calibration:
    """All of Eq. 12's fitted parts for the γ of ``rounds``.

    Raises:
        ValueError: no round at all.
    """
    if not len(rounds):
        raise ValueError("calibration needs at least one recorded round")
    weights, beta = fit_weights(rounds), fit_beta(rounds)
    threshold = conformal_threshold(realised_scores(rounds, log_scores(rounds, weights, beta)), coverage)
    return Calibration(
        num_draft_tokens=rounds.drafts.shape[1],
        weights=tuple(weights.tolist()),
        beta=beta,
        threshold=max(threshold, LOWEST_THRESHOLD),
        coverage=coverage,
    )


def uncalibrated_scores(rounds: Rounds) -> Tensor:
    """log P(k, a) of Eq. 6 for every candidate, [N, γ + 1, 32]: what calibration is compared with."""
    reached = torch.nn.functional.pad(rounds.draft_log_probs.cumsum(-1), (1, 0))
    removed = rounds.candidate_tokens == torch.nn.functional.pad(rounds.drafts, (0, 1), value=-1).unsqueeze(-1)
    return (rounds.candidate_log_probs + reached.unsqueeze(-1)).masked_fill(removed, float("-inf"))


def hit_rates(rounds: Rounds, scores: Tensor, sizes: tuple[int, ...]) -> dict[int, float]:
    """Share of rounds whose realised outcome is among the B best of ``scores``, for each B ≤ 32 in ``sizes``."""
    chosen = select_outcomes(scores, max(sizes))
    tokens = rounds.candidate_tokens.flatten(1).gather(1, chosen.num_accepted * scores.shape[-1] + chosen.bonus)
    same = (chosen.num_accepted == rounds.num_accepted.unsqueeze(-1)) & (tokens == rounds.bonus.unsqueeze(-1))
    same &= chosen.log_prob.isfinite()
    return {size: same[:, :size].any(-1).float().mean().item() for size in sizes}
