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
