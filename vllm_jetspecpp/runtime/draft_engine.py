"""The engine of the draft process: answers from the outcome cache, then commits true states and pre-drafts.

Life of a round, seen from here: ``answer`` looks the realised outcome up; a hit goes out at once, a miss is drafted
from the verified context first. ``work``, with the answer on its way, replaces predictions by true states, foresees
how the verification that has just begun will end, and fills the cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.foresight.foresight import Blocks, PreDrafts, Prefix, draft_verified, predraft
from vllm_jetspecpp.foresight.outcome_cache import OutcomeCache
from vllm_jetspecpp.foresight.outcome_selection import OutcomeSelector
from vllm_jetspecpp.models.calibration import Calibration, load_calibration
from vllm_jetspecpp.models.networks import Networks, load_networks
from vllm_jetspecpp.runtime.block_choice import BlockChoice, Offer
from vllm_jetspecpp.runtime.cached_prefixes import CachedPrefixes
from vllm_jetspecpp.runtime.request_states import Parts, RequestStates
from vllm_jetspecpp.runtime.slot_history import SlotHistory
from vllm_jetspecpp.transport.messages import NO_BLOCK, Draft, DraftBatch, Verified, VerifiedBatch
from vllm_jetspecpp.types import DraftBlock, Origin, Outcome, RoundChoice

logger = logging.getLogger(__name__)

NO_CONFIDENCE = -30.0
"""Log of a probability that counts as none."""
FALLBACK_MEMORY = 50.0
"""Fallback blocks after which an old one counts 1/e."""


@dataclass(frozen=True)
class UnderVerification:
    """A block the target is working on: what the next round foresees."""

    slot: int
    anchor_position: int
    offer: Offer
    """All its drafts, even where fewer were handed out."""
    num_verified: int
    """Tokens handed out."""

    @property
    def block(self) -> DraftBlock:
        """See ``offer``."""
        return self.offer.block


class DraftEngine:
    """The paper's draft process over a checkpoint."""

    def __init__(self, config: EngineConfig) -> None:
        nets, info = load_networks(config)
        if config.round.block_size > info.block_size:
            given, limit = config.round.num_draft_tokens, info.block_size - 1
            raise ValueError(f"num_speculative_tokens must be at most {limit} with this checkpoint, got {given}")
        self._setup(config, nets, load_calibration(info.folder, config.round.num_draft_tokens))

    @classmethod
    def from_networks(cls, config: EngineConfig, nets: Networks, calibration: Calibration | None = None) -> Self:
        """An engine over networks that are in memory already."""
        engine = cls.__new__(cls)
        engine._setup(config, nets, calibration)
        return engine

    def _setup(self, config: EngineConfig, nets: Networks, calibration: Calibration | None) -> None:
        self.config, self.nets = config, nets
        self.selector = OutcomeSelector(config.round, calibration, nets.target.embedding.device)
        self._round, self._drafting, self._ahead = config.round, True, True
        self._shapes: dict[RoundChoice, tuple[RoundConfig, OutcomeSelector]] = {}
        sizes = (config.num_slots, config.max_model_len)
        self.states = RequestStates(nets, *sizes, config.round.block_size, config.window)
        self.history = SlotHistory(*sizes)
        self.prefixes = CachedPrefixes(self.states, self.history, config.prefix_store_bytes)
        self.cache = OutcomeCache()
        self.blocks = BlockChoice()
        self._least = 0.0
        self._fallback_worth = 1.0
        """Tokens accepted of a block that is drafted after a miss, going by those of late."""
        self._uncommitted: tuple[Verified, ...] = ()
        self._committed = Parts.ALL
        """Parts that have the states of ``_uncommitted``."""
        self._unsaved: tuple[Verified, ...] = ()
        self._next: list[UnderVerification] = []
        self._under: dict[int, UnderVerification] = {}
        logger.info("draft engine: %d slots, caches of %.1f MiB", config.num_slots, self.states.num_bytes / 2**20)

    @torch.inference_mode()
    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        """A block for every request that wants one: from the cache where its outcome was foreseen, else J_0.

        With ``copy_drafts`` also copied ones: instead of either where they promise more.
        """
        self._choose(batch.choice)
        self._least = batch.min_accept_prob
        self._take(batch)
        wanting = [r for r in batch.requests if r.wants_draft and r.max_draft_tokens > 0]
        offers = {r.slot: offer for r in wanting if (offer := self._offer(r)) is not None}
        missed = [r for r in wanting if r.slot not in offers] if self._drafting else []
        if missed:
            # All that a first pass reads; the rest is written when the answer is on its way.
            self._commit(Parts.ALL if self.config.round.fallback_refreshes else Parts.DRAFT_MODEL)
            offers |= self._fallback_offers(missed)
        self._next = [self._under_verification(r, offers[r.slot]) for r in wanting if r.slot in offers]
        self._under |= {under.slot: under for under in self._next}
        answers = {under.slot: under for under in self._next}
        drafts = (self._draft(r, answers.get(r.slot)) for r in batch.requests if r.wants_draft)
        return DraftBatch(batch.step, tuple(drafts))

    def _offer(self, request: Verified) -> Offer | None:
        """The best block that is there without drafting; None if drafting one now promises more."""
        held = self._lookup(request) if self._drafting else None
        offer = None if held is None else self.blocks.drafted(held, Origin.HIT)
        copied = self._copied(request)
        if copied is None:
            return offer
        if offer is None:
            beats = self._fallback_worth if self._drafting else 0.0
        else:
            beats = offer.expected(self._num_worth(offer, request))
        return copied if copied.expected(self._num_worth(copied, request)) > beats else offer

    def _copied(self, request: Verified) -> Offer | None:
        if not self.config.round.copy_drafts:
            return None
        count = min(request.max_draft_tokens, self.config.round.num_draft_tokens)
        return self.blocks.copied(self.history.tokens(request.slot), count)

    def _fallback_offers(self, missed: list[Verified]) -> dict[int, Offer]:
        blocks, offers = self._fallback(missed), {}
        for request in missed:
            origin = Origin.FIRST if request.num_accepted == NO_BLOCK else Origin.FALLBACK
            offer = offers[request.slot] = self.blocks.drafted(blocks[request.slot], origin)
            expected = offer.expected(self._num_worth(offer, request))
            self._fallback_worth += (expected - self._fallback_worth) / FALLBACK_MEMORY
        return offers

    def _num_worth(self, offer: Offer, request: Verified) -> int:
        """Tokens of an offer that are handed out."""
        copied = offer.origin is Origin.COPIED
        limit = self.config.round.num_draft_tokens if copied else self._round.num_draft_tokens
        return offer.num_worth(self._least, min(limit, request.max_draft_tokens))

    def _draft(self, request: Verified, under: UnderVerification | None) -> Draft:
        if under is None:
            return Draft(request.slot, (), Origin.NONE)
        tokens = under.block.tokens[: under.num_verified]
        return Draft(request.slot, tokens, under.offer.origin, self._num_missing(request))

    def _choose(self, choice: RoundChoice | None) -> None:
        """The shape of this step's round: the worker's choice, or the one of the start."""
        if choice is None:
            choice = RoundChoice(*(getattr(self.config.round, name) for name in RoundChoice._fields))
        if choice not in self._shapes:
            limits = self.config.round
            if choice.num_draft_tokens > limits.num_draft_tokens or choice.num_outcomes > limits.num_outcomes:
                raise ValueError(f"a round of {choice} is larger than the one of the start, {limits}")
            # With B = 0 nothing is drafted ahead, with γ = 0 nothing at all: neither has a shape.
            least = {name: max(getattr(choice, name), 1) for name in ("num_draft_tokens", "num_outcomes")}
            shape = replace(limits, **choice._asdict() | least)
            selector = OutcomeSelector(shape, self.selector.calibration, self.states.device)
            self._shapes[choice] = shape, selector
        self._round, self.selector = self._shapes[choice]
        self._drafting = choice.num_draft_tokens > 0
        self._ahead = self._drafting and choice.num_outcomes > 0

    def _take(self, batch: VerifiedBatch) -> None:
        """What the message says, before anything is asked of it."""
        self.prefixes.overwritten(batch)
        for slot in batch.released:
            self._forget(slot)
        waiting: list[Verified] = []
        for request in batch.requests:
            if request.reset:
                self._forget(request.slot)
            self._settle(request)
            self.states.set_tokens(request.slot, request.token_start, request.tokens)
            self.history.set_tokens(request.slot, request.token_start, request.tokens)
            if not self.prefixes.restore(request):
                waiting.append(request)
            self.history.set_states(request.slot, request.state_start, len(request.states))
        self._uncommitted = self._unsaved = batch.requests
        self._committed = Parts(0)
        if waiting and len(batch.requests) > 1:
            self._commit_in_turn(waiting)

    def _settle(self, request: Verified) -> None:
        """Learn how the block that was handed out did."""
        under = self._under.get(request.slot)
        if under is None or request.num_accepted == NO_BLOCK:
            return
        if under.anchor_position == request.anchor_position - request.num_accepted - 1:
            self.blocks.settle(under.offer, request.num_accepted, request.num_verified)

    def _commit_in_turn(self, waiting: list[Verified]) -> None:
        """Commit a message some of whose requests have a prefix that others of it compute in this very step."""
        slots = {request.slot for request in waiting}
        ready = [request for request in self._uncommitted if request.slot not in slots]
        while ready or waiting:
            turn = self._uncommitted = tuple(ready or waiting[:1])  # nobody ready: the first one's prefix is not known
            self._committed = Parts(0)
            self._commit()
            self.prefixes.save(turn)
            slots = {request.slot for request in turn}
            waiting = [request for request in waiting if request.slot not in slots]
            ready = [request for request in waiting if self.prefixes.restore(request)]
        self._unsaved = ()

    @torch.inference_mode()
    def work(self) -> None:
        """Commit what came with the answered message, then foresee and pre-draft."""
        self._commit()
        self.prefixes.save(self._unsaved)
        self._unsaved = ()
        under, self._next = self._next, []
        if not under or not self._ahead:
            return
        slots = [u.slot for u in under]
        # Two shapes: where more was handed out than the round drafts, all of that may be accepted.
        size = self._round.num_draft_tokens
        if any(u.num_verified > size for u in under):
            size = self.config.round.num_draft_tokens
        blocks = [filled(u.block, size) for u in under]
        for u, block in zip(under, blocks, strict=True):
            self.states.set_tokens(u.slot, u.anchor_position + 1, torch.tensor(block.tokens))
        prefix = self.states.prefix(slots, [u.anchor_position for u in under])
        device = self.states.device
        drafts = torch.tensor([block.tokens for block in blocks], device=device)
        confidence = torch.tensor([block.confidence for block in blocks], device=device)
        anchors = prefix.tokens.gather(1, prefix.anchor.unsqueeze(-1))
        self._foresee_and_draft(under, prefix, torch.cat([anchors, drafts], dim=1), confidence)

    def _foresee_and_draft(
        self, under: list[UnderVerification], prefix: Prefix, block: Tensor, confidence: Tensor
    ) -> None:
        num_verified = torch.tensor([u.num_verified for u in under], device=block.device)
        made = predraft(self.nets, self._round, self.selector, prefix, block, confidence, num_verified)
        self._store(under, made)

    def _forget(self, slot: int) -> None:
        self.cache.forget(slot)
        self.states.forget(slot)
        self.history.forget(slot)
        self._under.pop(slot, None)

    def _lookup(self, request: Verified) -> DraftBlock | None:
        if request.num_accepted == NO_BLOCK:
            return None
        verified_anchor = request.anchor_position - request.num_accepted - 1
        outcome = Outcome(request.num_accepted, int(request.tokens[-1]))
        block = self.cache.lookup(request.slot, verified_anchor, outcome)
        return self._continuation(request, verified_anchor, outcome) if block is None else block

    def _continuation(self, request: Verified, verified_anchor: int, outcome: Outcome) -> DraftBlock | None:
        """The rest of a block that was cut (by the scheduler's budget, by a grammar), where the target went on with it.

        It is the one outcome of a cut block that no pre-draft stands for, since a whole block cannot end so: all of
        the tokens verified are accepted and the bonus token is the first one that was cut away.
        """
        under, (k, bonus_token) = self._under.get(request.slot), outcome
        if under is None or under.anchor_position != verified_anchor or k != request.num_verified:
            return None
        tokens, confidence = under.block
        if not k + 1 < len(tokens) or tokens[k] != bonus_token:
            return None
        return DraftBlock(tokens[k + 1 :], confidence[k + 1 :])

    def _under_verification(self, request: Verified, offer: Offer) -> UnderVerification:
        return UnderVerification(request.slot, request.anchor_position, offer, self._num_worth(offer, request))

    def _num_missing(self, request: Verified) -> int:
        return self.history.num_missing(request.slot, request.anchor_position)

    def _commit(self, parts: Parts = Parts.ALL) -> None:
        """Write true states that came with the message into the caches of ``parts`` where they are not yet."""
        parts &= ~self._committed
        self._committed |= parts
        requests = [r for r in self._uncommitted if len(r.states)]
        if self._committed == Parts.ALL:
            self._uncommitted = ()  # their states lie in the transport's memory
        if requests and parts:
            states = [r.states.to(self.states.device) for r in requests]
            self.states.commit([r.slot for r in requests], [r.state_start for r in requests], states, parts)

    def _fallback(self, missed: list[Verified]) -> dict[int, DraftBlock]:
        slots, options = [r.slot for r in missed], self._round
        prefix = self.states.prefix(slots, [r.anchor_position for r in missed])
        passes, refreshes = options.fallback_passes, options.fallback_refreshes
        drafts = draft_verified(
            self.nets, prefix, options.num_draft_tokens, passes, refreshes, options.anchor_replacement
        )
        return {slot: row[0] for slot, row in zip(slots, to_blocks(drafts), strict=True)}

    def _store(self, under: list[UnderVerification], made: PreDrafts) -> None:
        k, a = made.outcomes.num_accepted.tolist(), made.bonus_tokens.tolist()
        possible, blocks = made.outcomes.log_prob.isfinite().tolist(), to_blocks(made.drafts)
        for row, u in enumerate(under):
            entries = zip(k[row], a[row], blocks[row], possible[row], strict=True)
            content = {Outcome(n, token): block for n, token, block, real in entries if real}
            self.cache.store(u.slot, u.anchor_position, content)


def filled(block: DraftBlock, num_tokens: int) -> DraftBlock:
    """``block`` at the length of a round, which has one shape: where it is shorter, its last token at no confidence."""
    block = DraftBlock(block.tokens[:num_tokens], block.confidence[:num_tokens])
    missing = num_tokens - len(block.tokens)
    return DraftBlock(block.tokens + block.tokens[-1:] * missing, block.confidence + (NO_CONFIDENCE,) * missing)


def to_blocks(drafts: Blocks) -> list[list[DraftBlock]]:
    """Drafts [rows, blocks, γ] on the host, by row and block."""
    rows = zip(drafts.tokens.tolist(), drafts.confidence.tolist(), strict=True)
    return [[DraftBlock(tuple(t), tuple(c)) for t, c in zip(*row, strict=True)] for row in rows]
