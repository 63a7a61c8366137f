"""SSD's fixed geometric fan-out, which Eq. 7 is compared with, and the surrogate problem behind it (Proposition 2a)."""

from __future__ import annotations

from collections.abc import Sequence


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
