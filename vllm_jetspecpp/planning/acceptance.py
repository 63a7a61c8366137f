"""How drafts fare at the target: what Eq. 4 needs of the models, recorded once for all γ and B.

The draft model is causal, so a shorter block is the beginning of a longer one: with γ' < γ draft tokens a round accepts
min(k, γ') of them. And the cache of B outcomes is the first B of a ranking, so the rank of the outcome that came true
says for every B whether it would have been a hit. A round is told by where its own block came from, since both how
many of its drafts are accepted and how well its end is foreseen depend on that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

from vllm_jetspecpp.config import MAX_DRAFT_TOKENS, MAX_OUTCOMES, MAX_PASSES, check_keys, check_range

Passes = tuple[int, int]
"""J and R."""


@dataclass(frozen=True)
class Rounds:
    """Recorded rounds whose blocks came from the same place."""

    accepted: tuple[float, ...]
    """Entry k: in how many of them k draft tokens were accepted, 0..γ."""
    ranks: tuple[float, ...]
    """Entry r: in how many of them the outcome that came true had been the (r + 1)-th choice of the selection rule; the
    rest was not among the ranked ones."""

    @property
    def count(self) -> float:
        """Number of rounds."""
        return sum(self.accepted)

    def rejection(self, position: int) -> float:
        """Probability that draft token ``position`` (1..γ) is rejected once all before it are accepted."""
        reached = sum(self.accepted[position - 1 :])
        return self.accepted[position - 1] / reached if reached else 1.0

    def miss_rate(self, num_outcomes: int) -> float:
        """Probability that the outcome is not among the best B."""
        return 1.0 - sum(self.ranks[:num_outcomes]) / self.count


def mixed(kinds: Sequence[Rounds], weights: Sequence[float]) -> Rounds:
    """Rounds of which ``weights`` (in any unit) are of each kind, as shares."""

    def mix(columns: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(sum(f * value for f, value in zip(factors, column, strict=True)) for column in columns)

    factors = [weight / (kind.count * sum(weights)) for weight, kind in zip(weights, kinds, strict=True)]
    accepted = mix(zip(*(kind.accepted for kind in kinds), strict=True))
    return Rounds(accepted, mix(zip_longest(*(kind.ranks for kind in kinds), fillvalue=0.0)))


@dataclass(frozen=True)
class Acceptance:
    """Statistics of one checkpoint on its target."""

    num_draft_tokens: int
    """γ of the recorded blocks: the checkpoint's longest."""
    after_hit: Mapping[Passes, Rounds]
    """By J and R: rounds whose block had been drafted ahead."""
    after_miss: Mapping[Passes, Rounds]
    """By J and R of the round: blocks drafted after a miss (J_0), among them each answer's first."""
    in_line: Rounds
    """Every block drafted in one pass from the verified context, nothing ahead; its ranks are empty."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """Command, commit, versions, machine and date."""

    @property
    def max_outcomes(self) -> int:
        """Largest B that the recorded ranks speak of."""
        return min((len(rounds.ranks) for rounds in self.after_hit.values()), default=0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; :meth:`from_dict` reads it."""
        settings = [
            {
                "jacobi_passes": passes[0],
                "context_refreshes": passes[1],
                "after_hit": _plain(self.after_hit[passes]),
                "after_miss": _plain(self.after_miss[passes]),
            }
            for passes in sorted(self.after_hit)
        ]
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "settings": settings,
            "in_line": _plain(self.in_line),
            "made_by": dict(self.made_by),
        }

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Self:
        """Check and build.

        Raises:
            ValueError: not what :meth:`as_dict` writes; the message names ``where``.
        """
        keys = ("num_draft_tokens", "settings", "in_line", "made_by")
        _check_object(values, keys, where)
        check_range(f"{where}: num_draft_tokens", values["num_draft_tokens"], 1, MAX_DRAFT_TOKENS)
        gamma = values["num_draft_tokens"]
        hit: dict[Passes, Rounds] = {}
        miss: dict[Passes, Rounds] = {}
        if not isinstance(values["settings"], list) or not 0 < len(values["settings"]) <= MAX_PASSES**2:
            raise ValueError(f"{where}: settings must be a list of 1 to {MAX_PASSES**2} objects")
        for entry in values["settings"]:
            _check_object(
                entry, ("jacobi_passes", "context_refreshes", "after_hit", "after_miss"), f"{where}: settings"
            )
            for name in ("jacobi_passes", "context_refreshes"):
                check_range(f"{where}: {name}", entry[name], 0, MAX_PASSES)
            passes = (entry["jacobi_passes"], entry["context_refreshes"])
            hit[passes] = _rounds(entry["after_hit"], gamma, f"{where}: J{passes[0]}-R{passes[1]} after_hit")
            miss[passes] = _rounds(entry["after_miss"], gamma, f"{where}: J{passes[0]}-R{passes[1]} after_miss")
        in_line = _rounds(values["in_line"], gamma, f"{where}: in_line")
        made_by = values["made_by"] if isinstance(values["made_by"], dict) else {}
        return cls(gamma, hit, miss, in_line, made_by)


def unmeasured(num_draft_tokens: int) -> Acceptance:
    """What is assumed of a checkpoint that says nothing, until running averages know better.

    Our choice, not the paper's: every draft token has an even chance (.6 after J_0, .63 with refreshed anchors, .65
    with a refresh, .7 with two and .72 with three), and a cache of B outcomes misses one in 1 + B / 2 of them.
    """
    chances = {(0, 0): 0.6, (0, 1): 0.63, (1, 1): 0.65, (2, 2): 0.7, (3, 3): 0.72}
    ranks = [1 / (1 + b / 2) - 1 / (1 + (b + 1) / 2) for b in range(16)]

    def rounds(chance: float) -> Rounds:
        lengths = [chance**k * (1 - chance) for k in range(num_draft_tokens)] + [chance**num_draft_tokens]
        return Rounds(tuple(lengths), tuple(ranks))

    return Acceptance(
        num_draft_tokens,
        {passes: rounds(chance) for passes, chance in chances.items()},
        {passes: rounds(0.5) for passes in chances},
        rounds(0.6),
        {"note": "assumed, not measured"},
    )


def _plain(rounds: Rounds) -> dict[str, Any]:
    return {"accepted": list(rounds.accepted), "ranks": list(rounds.ranks)}


def _check_object(value: Any, keys: Sequence[str], where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(keys)}, got {str(value)[:60]!r}")
    check_keys(value, keys, where)
    for key in keys:
        if key not in value:
            raise ValueError(f"{where}: key {key!r} is missing; found: {', '.join(sorted(value))}")


def _rounds(value: Any, num_draft_tokens: int, where: str) -> Rounds:
    _check_object(value, ("accepted", "ranks"), where)
    accepted, ranks = (_counts(value[name], f"{where}: {name}") for name in ("accepted", "ranks"))
    if len(accepted) != num_draft_tokens + 1 or len(ranks) > MAX_OUTCOMES:
        raise ValueError(
            f"{where}: expected {num_draft_tokens + 1} accepted and at most {MAX_OUTCOMES} ranks, "
            f"got {len(accepted)} and {len(ranks)}"
        )
    if not sum(accepted) > 0 or sum(ranks) > sum(accepted) * (1 + 1e-6):
        raise ValueError(f"{where}: accepted must count rounds, and ranks no more of them; got {sum(accepted)} rounds")
    return Rounds(accepted, ranks)


def _counts(value: Any, where: str) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else [None]
    for n in numbers:
        if isinstance(n, bool) or not isinstance(n, int | float) or not 0 <= n < math.inf:
            raise ValueError(f"{where} must be a list of numbers from 0 on, got {str(value)[:60]!r}")
    return tuple(numbers)
