"""What happened, counted in the worker: acceptance, hits, times. Read through ``jetspecpp_stats``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from vllm_jetspecpp.types import Origin

DRAFTED_ORIGINS = (Origin.FIRST, Origin.HIT, Origin.FALLBACK)


def _per_origin() -> dict[str, int]:
    return {origin.name.lower(): 0 for origin in DRAFTED_ORIGINS}


@dataclass
class Statistics:
    """Sums since start or the last reset; one round is one verified block of one request."""

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
    context_positions: int = 0
    """Positions before the anchors of those blocks."""
    missing_positions: int = 0
    """Those of them whose states the draft process did not have: of cached prefixes it no longer knew."""
    invalid_blocks: int = 0
    """Blocks received that were not usable, in part or at all."""
    verify_seconds: float = 0.0
    """From handing over drafts to the verified outcome, over the steps that had any."""
    verify_steps: int = 0
    _handed_over_at: float | None = None

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

    def context(self, num_positions: int, num_missing: int) -> None:
        """Count the context that one block was drafted from."""
        self.context_positions += num_positions
        self.missing_positions += min(max(num_missing, 0), num_positions)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the derived ones.

        ``committed`` splits all tokens by who found them: the target (one a round, and all without a block), else the
        origin of the block. ``acceptance_length`` is τ, tokens committed per round, and ``hit_rate`` the share of hits
        among the blocks for which an outcome could have been foreseen; ``missing_share`` is the share of context
        positions that were drafted from without their states.
        """
        hits, misses = self.blocks_by_origin["hit"], self.blocks_by_origin["fallback"]
        values = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return values | {
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / max(hits + misses, 1),
            "missing_share": self.missing_positions / max(self.context_positions, 1),
            "acceptance_length": (self.accepted + self.rounds) / max(self.rounds, 1),
            "committed": {"target": self.rounds + self.plain_tokens, **self.accepted_by_origin},
        }
