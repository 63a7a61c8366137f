"""What happened, counted in the worker: acceptance, hits, times. Read through ``jetspecpp_stats`` and ``/metrics``."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any

from vllm_jetspecpp.types import NO_DRAFTING, Origin, RoundChoice

DRAFTED_ORIGINS = (Origin.FIRST, Origin.HIT, Origin.FALLBACK, Origin.COPIED)


def _per_origin() -> dict[str, int]:
    return {origin.name.lower(): 0 for origin in DRAFTED_ORIGINS}


@dataclass
class Statistics:
    """Sums since start, which never fall; one round is one verified block of one request.

    ``reset`` moves the point from which ``as_dict`` counts, and leaves the sums alone.
    """

    num_draft_tokens: int
    """γ."""
    rounds: int = 0
    plain_tokens: int = 0
    """Tokens that the target committed without a draft block under verification."""
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    verified_by_origin: dict[str, int] = field(default_factory=_per_origin)
    """Rounds by where the block came from."""
    accepted_by_origin: dict[str, int] = field(default_factory=_per_origin)
    accepted_lengths: list[int] = field(default_factory=list)
    """Entry k counts the rounds that accepted k draft tokens, 0..γ."""
    blocks_by_origin: dict[str, int] = field(default_factory=_per_origin)
    """Blocks received; hits and misses (fallback) among them."""
    invalid_blocks: int = 0
    """Blocks received that were not usable, in part or at all."""
    verify_seconds: float = 0.0
    """From handing over drafts to the verified outcome, over the steps that had any."""
    verify_steps: int = 0
    steps_by_choice: dict[str, int] = field(default_factory=dict)
    """Steps by the shape of round that the planner chose for them; none without it."""
    context_positions: int = 0
    """Positions before the anchors, summed over the blocks received."""
    missing_positions: int = 0
    """Those of them whose states the draft process never saw."""
    _handed_over_at: float | None = None
    _at_reset: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted_lengths = [0] * (self.num_draft_tokens + 1)

    def handed_over(self) -> None:
        """Drafts go to the scheduler now."""
        self._handed_over_at = perf_counter()

    def outcomes_known(self) -> None:
        """The target has verified what was handed over last."""
        if self._handed_over_at is not None:
            self.verify_seconds += perf_counter() - self._handed_over_at
            self.verify_steps += 1
            self._handed_over_at = None

    def verified(self, origin: Origin, num_verified: int, num_accepted: int) -> None:
        """Count one verified block."""
        self.rounds += 1
        self.drafted += num_verified
        self.accepted += num_accepted
        self.accepted_lengths[num_accepted] += 1
        self.verified_by_origin[origin.name.lower()] += 1
        self.accepted_by_origin[origin.name.lower()] += num_accepted

    def received(self, origin: Origin) -> None:
        """Count one usable block from the draft process."""
        self.blocks_by_origin[origin.name.lower()] += 1

    def chosen(self, choice: RoundChoice | None) -> None:
        """Count a choice of the planner; None: no drafting."""
        name = str(choice or NO_DRAFTING)
        self.steps_by_choice[name] = self.steps_by_choice.get(name, 0) + 1

    def context(self, num_positions: int, num_missing: int) -> None:
        """Count the context of one block: its length, and the positions in it without states."""
        self.context_positions += num_positions
        self.missing_positions += min(max(num_missing, 0), num_positions)

    def reset(self) -> None:
        """Have ``as_dict`` count from now on."""
        self._at_reset = self.totals()

    def totals(self) -> dict[str, Any]:
        """The sums since start as plain values; ``reset`` does not change them."""
        names = (f.name for f in fields(self) if not f.name.startswith("_"))
        return {name: copy.copy(getattr(self, name)) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """Plain values since start or the last reset, with the derived ones.

        ``committed`` splits all tokens by who found them: the target (one a round, and all without a block), else the
        origin of the block. ``acceptance_length`` is τ, tokens committed per round, and ``hit_rate`` the share of hits
        among the blocks for which an outcome could have been foreseen; ``missing_share`` is the share of context
        positions that were drafted from without their states.
        """
        values = difference(self.totals(), self._at_reset) | {"num_draft_tokens": self.num_draft_tokens}
        hits, misses = values["blocks_by_origin"]["hit"], values["blocks_by_origin"]["fallback"]
        rounds, accepted = values["rounds"], values["accepted"]
        return values | {
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / max(hits + misses, 1),
            "acceptance_length": (accepted + rounds) / max(rounds, 1),
            "missing_share": values["missing_positions"] / max(values["context_positions"], 1),
            "committed": {"target": rounds + values["plain_tokens"], **values["accepted_by_origin"]},
        }


def difference(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Entry by entry ``now`` less ``then``; entries are numbers, lists or dicts of numbers, missing ones are zero."""
    return {name: _less(value, then.get(name)) for name, value in now.items()}


def _less(now: Any, then: Any) -> Any:
    if then is None:
        return now
    if isinstance(now, dict):
        return difference(now, then)
    if isinstance(now, list):
        return [a - b for a, b in zip(now, then, strict=True)]
    return now - then
