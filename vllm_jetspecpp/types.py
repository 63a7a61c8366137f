"""The nouns of the method that more than one layer of the system speaks of."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Outcome(NamedTuple):
    """How one verification ends: the pair (k, a) of the paper."""

    num_accepted: int
    """k: how many draft tokens the target accepted, 0..γ."""
    bonus_token: int
    """a: the token the target commits after them; the anchor of the next block."""


class DraftBlock(NamedTuple):
    """A block as the draft process keeps it between rounds."""

    tokens: tuple[int, ...]
    """γ draft tokens; fewer where a block goes on with the rest of one that was cut."""
    confidence: tuple[float, ...]
    """Log of the draft model's largest probability at each of them; scores of outcomes read it."""


ALL_OUTCOMES = 64
"""As many as a round can have."""
NO_DRAFTING = "no drafting"
"""What people read where there is no :class:`RoundChoice`."""
COPIES_ALONE = "copied drafts alone"
"""What they read of one with γ = 0."""


class RoundChoice(NamedTuple):
    """The shape of a round where it is chosen step by step: each choice is one fixed shape."""

    num_draft_tokens: int
    """γ; 0 drafts nothing, which leaves copied drafts."""
    num_outcomes: int
    """B; 0 drafts nothing ahead: every block is drafted in line, as after a miss."""
    jacobi_passes: int
    """J."""
    context_refreshes: int
    """R ≤ J + 1."""
    num_refined: int = ALL_OUTCOMES
    """Outcomes, the likeliest ones, whose drafts are refined; B or more: all."""

    def __str__(self) -> str:
        """``γ7 B4 J1-R1``, or ``γ7 B4 J1-R1 of 2`` where two of the four are refined."""
        if not self.num_draft_tokens:
            return COPIES_ALONE
        refined = f" of {self.num_refined}" if self.jacobi_passes and self.num_refined < self.num_outcomes else ""
        passes = f"J{self.jacobi_passes}-R{self.context_refreshes}"
        return f"γ{self.num_draft_tokens} B{self.num_outcomes} {passes}{refined}"


class Origin(IntEnum):
    """Where a draft block came from."""

    NONE = 0
    """No draft: no slot, no room before ``max_model_len``, or no draft process."""
    FIRST = 1
    """First block of a request: nothing was under verification that could have been foreseen."""
    HIT = 2
    """Pre-drafted for the outcome that came true."""
    FALLBACK = 3
    """Drafted after a miss, in one pass from the verified context (J_0)."""
    COPIED = 4
    """Copied from the request's own tokens, which promised more than what was drafted."""
