"""How verification ends, as distributions to draw from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_jetspecpp.evaluation.fan_out import accepted_length_law


@dataclass(frozen=True)
class CommittedTokens:
    """Distribution of the tokens that one verification commits, bonus token included: 1 to γ + 1."""

    law: tuple[float, ...]
    """P(n tokens) for n = 1 to γ + 1; adds up to 1."""

    def __post_init__(self) -> None:
        if not self.law or min(self.law) < 0 or not math.isclose(sum(self.law), 1.0, abs_tol=1e-6):
            raise ValueError(f"a distribution over 1 to γ + 1 tokens must add up to 1, got {list(self.law)}")

    @classmethod
    def of(cls, given: float | Sequence[float], num_draft_tokens: int, name: str = "tau") -> CommittedTokens:
        """From a mean (geometric, cut off at γ: every draft token is accepted with one probability) or a whole law.

        Raises:
            ValueError: the mean is not in [1, γ + 1], or the law is none.
        """
        if isinstance(given, (int, float)):
            return cls.geometric(float(given), num_draft_tokens, name)
        law = tuple(float(p) for p in given)
        if len(law) != num_draft_tokens + 1:
            raise ValueError(f"{name} must have γ + 1 = {num_draft_tokens + 1} probabilities, got {len(law)}")
        return cls(law)

    @classmethod
    def geometric(cls, mean: float, num_draft_tokens: int, name: str = "tau") -> CommittedTokens:
        """The law whose mean is ``mean`` and in which every draft token is accepted with the same probability α."""
        return cls(tuple(accepted_length_law(acceptance_rate(mean, num_draft_tokens, name), num_draft_tokens)))

    @property
    def mean(self) -> float:
        """τ."""
        return sum(n * p for n, p in enumerate(self.law, 1))

    @property
    def cumulative(self) -> np.ndarray:
        """P(at most n tokens), ending at exactly 1; [γ + 1] float64."""
        upto = np.cumsum(self.law)
        return upto / upto[-1]


def acceptance_rate(mean: float, num_draft_tokens: int, name: str = "tau") -> float:
    """α with 1 + α + … + α^γ = ``mean``: what each draft token's acceptance must be for τ = ``mean``."""
    if not 1 <= mean <= num_draft_tokens + 1:
        raise ValueError(f"{name} must be from 1 to γ + 1 = {num_draft_tokens + 1} tokens, got {mean:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(num_draft_tokens + 1)) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Acceptance:
    """How verification ends, round by round: tokens after a hit and after a miss, and whether the end was foreseen."""

    after_hit: CommittedTokens
    """τ_hit: the verified block had been pre-drafted."""
    after_miss: CommittedTokens
    """τ_miss: it was a fallback block."""
    foreseen: tuple[float, ...]
    """P(the outcome is cached | n tokens committed), n = 1 to γ + 1. All equal: p_hit does not depend on the length."""

    def __post_init__(self) -> None:
        if len(self.after_hit.law) != len(self.after_miss.law) or len(self.foreseen) != len(self.after_hit.law):
            raise ValueError("after_hit, after_miss and foreseen must have γ + 1 entries each")
        if not all(0 <= p <= 1 for p in self.foreseen):
            raise ValueError(f"hit rates must be from 0 to 1, got {list(self.foreseen)}")

    @classmethod
    def of(
        cls,
        hit_rate: float | Sequence[float],
        tau_hit: float | Sequence[float],
        tau_miss: float | Sequence[float],
        num_draft_tokens: int,
    ) -> Acceptance:
        """From one p_hit whatever the length, as Eq. 4 assumes, or one for each of 1 to γ + 1 committed tokens."""
        hit = CommittedTokens.of(tau_hit, num_draft_tokens, "tau_hit")
        miss = CommittedTokens.of(tau_miss, num_draft_tokens, "tau_miss")
        if isinstance(hit_rate, (int, float)):
            return cls(hit, miss, (float(hit_rate),) * len(hit.law))
        return cls(hit, miss, tuple(float(p) for p in hit_rate))

    @classmethod
    def compounding(
        cls,
        error: float,
        tau_hit: float | Sequence[float],
        tau_miss: float | Sequence[float],
        num_draft_tokens: int,
    ) -> Acceptance:
        """A decoder that errs with one probability a committed token: P(foreseen | n tokens) = (1 - error)^n.

        Our model of what the paper says in words: errors "compound through Eq. 6" with the length.
        """
        hit = CommittedTokens.of(tau_hit, num_draft_tokens, "tau_hit")
        miss = CommittedTokens.of(tau_miss, num_draft_tokens, "tau_miss")
        return cls(hit, miss, tuple((1 - error) ** n for n in range(1, num_draft_tokens + 2)))

    @property
    def hit_rate(self) -> float:
        """Long-run p_hit: a block's origin is decided by how the verification before it ended."""
        by_hit = sum(p * h for p, h in zip(self.after_hit.law, self.foreseen, strict=True))
        by_miss = sum(p * h for p, h in zip(self.after_miss.law, self.foreseen, strict=True))
        return by_miss / (1 - by_hit + by_miss) if by_hit - by_miss < 1 else 1.0

    @property
    def tau(self) -> float:
        """Long-run tokens a round: the numerator of Eq. 4."""
        return self.hit_rate * self.after_hit.mean + (1 - self.hit_rate) * self.after_miss.mean


def inline_acceptance(tau: float, num_draft_tokens: int) -> Acceptance:
    """Acceptance of a method that drafts in line with acceptance length τ."""
    law = CommittedTokens.of(tau, num_draft_tokens, "tau_inline")
    return Acceptance(law, law, (0.0,) * (num_draft_tokens + 1))
