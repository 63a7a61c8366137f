"""What the baselines share: the sequence so far, and drafting on the critical path."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from vllm_jetspecpp.transport.messages import NO_BLOCK, Draft, DraftBatch, Verified, VerifiedBatch
from vllm_jetspecpp.types import Origin


class SequenceEngine:
    """One request at a time; a subclass says what to draft.

    Args:
        num_draft_tokens: γ.
    """

    target_layer_ids: tuple[int, ...] = ()
    """Target layers whose states the drafter reads."""
    has_cache = False
    """Whether drafts are made ahead, so that there are hits and misses."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.tokens: list[int] = []

    @torch.inference_mode()
    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        """Take in what was verified and draft.

        Raises:
            ValueError: more than one request.
        """
        if len(batch.requests) != 1:
            raise ValueError(f"a baseline takes one request at a time, got {len(batch.requests)}")
        (request,) = batch.requests
        if request.reset:
            self.tokens = []
            self.reset()
        self.tokens[request.token_start :] = request.tokens.tolist()
        if request.states.numel():
            self.commit(request.state_start, request.states)
        origin = Origin.FIRST if request.num_accepted == NO_BLOCK else self.origin(request)
        drafts = self.draft()[: request.max_draft_tokens] if request.wants_draft else ()
        return DraftBatch(batch.step, (Draft(request.slot, drafts, origin),))

    def work(self) -> None:
        """Nothing is made ahead."""

    def reset(self) -> None:
        """Forget the last request."""

    def commit(self, start: int, states: Tensor) -> None:
        """True states [count, num_taps * hidden] of the tokens from position ``start`` on."""

    def origin(self, request: Verified) -> Origin:
        """Where the block that answers ``request`` comes from."""
        return Origin.FALLBACK

    @abstractmethod
    def draft(self) -> tuple[int, ...]:
        """γ draft tokens, or fewer, behind the last token."""


class PlainEngine(SequenceEngine):
    """No drafts: plain decoding."""

    def draft(self) -> tuple[int, ...]:
        """None."""
        return ()
