"""The boundary between the vLLM worker and the draft process: every message, with shapes and dtypes.

The worker sends one :class:`VerifiedBatch` per target step and gets one :class:`DraftBatch` back when any of its
requests wants a draft. Positions, lengths and token ids come from the worker alone (invariant 4): whatever it sends
again replaces what was known before. Every request owns a slot, a small integer that the worker hands out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_jetspecpp.types import Origin, RoundChoice

NO_BLOCK = -1
"""``Verified.num_accepted`` when no draft block was under verification."""


@dataclass(frozen=True)
class Verified:
    """What one target step made known about one request."""

    slot: int
    token_start: int
    """Position of ``tokens[0]``."""
    tokens: torch.Tensor  # [num_tokens] int32, CPU
    """Committed tokens from ``token_start`` on that were not sent before (a resend is allowed). With ``wants_draft``
    the last one is the anchor: the bonus token of this step, which has no states yet."""
    state_start: int
    """Position of ``states[0]``."""
    states: torch.Tensor  # [num_states, num_taps * hidden_size], the target's dtype, target device or CPU
    """Tapped states of committed tokens, tapped layers ascending and concatenated; num_states may be 0."""
    num_accepted: int = NO_BLOCK
    """k, draft tokens accepted of the block under verification; NO_BLOCK when there was none."""
    num_verified: int = 0
    """Draft tokens that were verified: γ, or fewer when the scheduler cut the block."""
    wants_draft: bool = False
    """False for a prefill chunk that is not the last: states are stored, nothing is answered."""
    max_draft_tokens: int = 1 << 30
    """Room before ``max_model_len``: no more draft tokens than this are of use."""
    reset: bool = False
    """The slot starts a new request: forget all it held."""
    first_block: int = 0
    """Which of the request's blocks of vLLM's KV cache ``block_ids[0]`` is, counted from position 0."""
    block_ids: tuple[int, ...] = ()
    """Ids of those blocks, all that ``states`` lie in; with ``reset`` also those before, whose positions were cached:
    vLLM does not compute their states again, so the prefix store has to know them."""

    @property
    def anchor_position(self) -> int:
        """n: position of the last token sent."""
        return self.token_start + self.tokens.shape[0] - 1


@dataclass(frozen=True)
class VerifiedBatch:
    """Worker → draft process: one target step."""

    step: int
    """Counts up; the answer repeats it, so that a late answer is never taken for the present one."""
    requests: tuple[Verified, ...]
    released: tuple[int, ...] = ()
    """Slots whose requests ended."""
    overwritten: tuple[int, ...] = ()
    """Blocks of vLLM's KV cache that took positions whose states are not sent: what the prefix store has of them is
    another request's."""
    cache_block_size: int = 0
    """Positions in a block of vLLM's KV cache; 0: no block ids are sent, and no prefix is kept."""
    choice: RoundChoice | None = None
    """Shape of this step's round, γ and B at most those the draft process was started with; None: just those."""
    min_accept_prob: float = 0.0
    """Draft tokens that will be accepted less probably than this, going by running averages, are not handed out, but
    for the first of a block."""

    @property
    def wants_reply(self) -> bool:
        """Whether a :class:`DraftBatch` answers this message."""
        return any(r.wants_draft for r in self.requests)


@dataclass(frozen=True)
class Draft:
    """A block for one request: the point-mass proposal of its next verification."""

    slot: int
    tokens: tuple[int, ...]
    """At most γ draft tokens, the anchor not included; copied ones can be more, as ``max_draft_tokens`` allows."""
    origin: Origin
    num_missing: int = 0
    """Positions before the anchor whose states the draft process never got: it drafted without them."""


@dataclass(frozen=True)
class DraftBatch:
    """Draft process → worker: one draft for every request that wanted one, in the order of the request."""

    step: int
    drafts: tuple[Draft, ...] = field(default_factory=tuple)
