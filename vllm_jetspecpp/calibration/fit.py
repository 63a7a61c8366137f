"""Fits on recorded rounds: w and β of Eq. 12 by maximum likelihood, and the split-conformal threshold λ."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_jetspecpp.evaluation.rounds import Rounds, log_scores, realised_index, realised_scores
from vllm_jetspecpp.foresight.calibrated_score import bonus_log_probs, length_log_probs
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
