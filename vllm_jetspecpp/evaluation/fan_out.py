"""SSD's fixed geometric fan-out, which Eq. 7 is compared with, and the surrogate problem behind it (Proposition 2a)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def accepted_length_law(acceptance_rate: float, num_draft_tokens: int) -> list[float]:
    """P_α(k) for k = 0..γ: (1 - α) α^k below γ, α^γ at γ.

    Args:
        acceptance_rate: α, in (0, 1).
        num_draft_tokens: γ.
    """
    law = [(1 - acceptance_rate) * acceptance_rate**k for k in range(num_draft_tokens)]
    return [*law, acceptance_rate**num_draft_tokens]


def geometric_fan_out(law: Sequence[float], exponent: float, budget: float, lengths: Sequence[int]) -> list[float]:
    """F_k ∝ P(k)^{1/(1+ρ)} over ``lengths``, 0 elsewhere, adding up to ``budget``.

    Args:
        law: P(k) for k = 0..γ.
        exponent: ρ > 0.
        budget: B, anchors in all; real, as in the surrogate problem.
        lengths: which k get any.
    """
    weights = [p ** (1 / (1 + exponent)) if k in lengths else 0.0 for k, p in enumerate(law)]
    total = sum(weights)
    return [budget * weight / total for weight in weights]


def surrogate_hit_mass(law: Sequence[float], exponent: float, fan_out: Sequence[float]) -> float:
    """Σ_k P(k) (1 - F_k^{-ρ}); a length without anchors adds nothing."""
    return sum(p * (1 - f**-exponent) for p, f in zip(law, fan_out, strict=True) if f > 0)


def surrogate_optimum(law: Sequence[float], exponent: float, budget: float) -> list[float]:
    """The fan-out of largest surrogate hit mass: the series over the M likeliest lengths for the best M.

    Only candidates that keep every F_k ≥ 1 count (Proposition 2a).
    """
    order = sorted(range(len(law)), key=lambda k: -law[k])
    candidates = (geometric_fan_out(law, exponent, budget, order[:count]) for count in range(1, len(law) + 1))
    allowed = [fan_out for fan_out in candidates if all(f == 0 or f >= 1 for f in fan_out)]
    return max(allowed, key=lambda fan_out: surrogate_hit_mass(law, exponent, fan_out))


FanOut = tuple[int, ...]
"""F_k for k = 0..γ: anchors cached at every accepted length."""


class GeometricLaw(NamedTuple):
    """What SSD's allocation is computed from."""

    acceptance_rate: float
    """α."""
    exponent: float
    """ρ: the bonus token is among the F likeliest with probability 1 - F^{-ρ} (Assumption 2)."""


def integer_fan_out(law: GeometricLaw, num_draft_tokens: int, budget: int) -> FanOut:
    """The series over all lengths, rounded to integers that add up to ``budget`` by largest remainders."""
    lengths = accepted_length_law(law.acceptance_rate, num_draft_tokens)
    shares = geometric_fan_out(lengths, law.exponent, budget, range(num_draft_tokens + 1))
    whole = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda k: whole[k] - shares[k])
    for k in order[: budget - sum(whole)]:
        whole[k] += 1
    return tuple(whole)


def fit_acceptance_rate(num_accepted: Sequence[int], num_draft_tokens: int) -> float:
    """α by maximum likelihood of accepted lengths under :func:`accepted_length_law`, kept within [.01, .99]."""
    rejections = sum(k < num_draft_tokens for k in num_accepted)
    alpha = sum(num_accepted) / max(sum(num_accepted) + rejections, 1)
    return min(max(alpha, 0.01), 0.99)


def fit_exponent(ranks: Sequence[int], largest: int = 32) -> float:
    """ρ from the bonus tokens' ranks (1 is the likeliest): least squares of 1 - F^{-ρ} over F = 2..largest."""
    found = [sum(rank <= size for rank in ranks) / max(len(ranks), 1) for size in range(2, largest + 1)]

    def error(rho: float) -> float:
        return sum((1 - size**-rho - hit) ** 2 for size, hit in enumerate(found, 2))

    return min((step / 100 for step in range(5, 501)), key=error)
