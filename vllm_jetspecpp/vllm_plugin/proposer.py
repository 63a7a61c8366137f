"""Between the model runner and the draft process: slots, what was sent, and checked drafts."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from vllm_jetspecpp.config import AUTO
from vllm_jetspecpp.draft_process.client import DraftClient
from vllm_jetspecpp.planning.planner import FixedChoice
from vllm_jetspecpp.planning.running import Verification
from vllm_jetspecpp.transport.messages import NO_BLOCK, Draft, Verified, VerifiedBatch
from vllm_jetspecpp.types import Origin, RoundChoice
from vllm_jetspecpp.vllm_plugin.statistics import DRAFTED_ORIGINS, Statistics, difference
from vllm_jetspecpp.vllm_plugin.step_planning import StepPlanning

logger = logging.getLogger("vllm.jetspecpp")


@dataclass(frozen=True)
class VerifiedRows:
    """One request's part of one target step, as the model runner saw it."""

    request_id: str
    first_row: int
    """Where its rows begin in the step's hidden states."""
    num_rows: int
    position: int
    """Position of the first row's token."""
    num_draft_tokens: int
    """Draft tokens among the rows; they are the last ones. vLLM pads a first step of one token with some of its own."""
    num_sampled: int
    """k + 1: accepted draft tokens and the target's own; 0 in a prefill chunk that is not the last."""
    token_ids: np.ndarray  # [num_tokens] int32
    """The whole prompt and everything committed, this step's tokens included."""
    max_num_tokens: int
    """Length at which the request ends."""
    block_ids: Sequence[int] = ()
    """Blocks of vLLM's KV cache that hold the request, from position 0 on; empty where they are not of one size."""

    @property
    def num_accepted(self) -> int:
        """k."""
        return max(self.num_sampled - 1, 0)

    @property
    def num_final_rows(self) -> int:
        """Rows of committed tokens: those of rejected drafts are not."""
        return self.num_rows - self.num_draft_tokens + (self.num_accepted if self.num_draft_tokens else 0)

    @property
    def room(self) -> int:
        """Draft tokens of use: the target's own token needs a place after them."""
        return self.max_num_tokens - len(self.token_ids) - 1

    @property
    def is_last(self) -> bool:
        """Whether the request ends before a draft could be verified."""
        return self.num_sampled > 0 and self.room < 1


@dataclass
class SlotState:
    """What the draft process knows of a request that owns a slot."""

    slot: int
    generation: int | None = None
    """Of the draft process that was told; None before the first message."""
    num_sent: int = 0
    """Tokens it has been sent."""
    origin: Origin = Origin.NONE
    """Where the block that the scheduler holds came from; NONE when it holds none of ours."""


@dataclass(frozen=True)
class Expected:
    """A draft that was asked for."""

    request_id: str
    state: SlotState
    max_tokens: int
    context_length: int
    """Positions before the anchor."""


class Proposer:
    """Stands where vLLM expects a drafter: sends what was verified, later collects drafts for the next step.

    Whatever the draft process answers, ``collect`` returns valid token ids; without an answer there are no drafts.
    """

    def __init__(self, vllm_config: Any) -> None:
        spec = vllm_config.speculative_config
        self.num_draft_tokens: int = spec.num_speculative_tokens
        self.copy_drafts: bool = spec.copy_drafts
        self.min_accept_prob: float | None = None if spec.min_accept_prob == AUTO else spec.min_accept_prob
        """None: the planner's."""
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.client: DraftClient | None = None
        """None on ranks that do not draft, and before the worker has set it."""
        self.cache_block_size = 0
        """Positions in a block of vLLM's KV cache; 0 where no prefix is kept."""
        self.planning: StepPlanning | None = None
        """Chooses the shape of each round; None: the one of the start."""
        self.statistics = Statistics(self.num_draft_tokens)
        self._client_counts: dict[str, float] = {}
        self._client_start: dict[str, float] = {}
        self._free_slots = list(range(spec.engine_config(vllm_config).num_slots))
        self._states: dict[str, SlotState] = {}
        self._without_slot: set[str] = set()
        self._released: set[int] = set()
        self._expected: dict[int, Expected] = {}
        self._verifications: list[Verification] = []
        self._generation: int | None = None
        self._step = 0

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing to load: vLLM's CPU runner calls this of every drafter."""

    def propose(
        self, requests: Sequence[VerifiedRows], aux_states: Sequence[torch.Tensor], max_draft_tokens: int | None = None
    ) -> None:
        """Tell the draft process what one target step verified; ``collect`` fetches its answer.

        Args:
            requests: the step's requests, in the order of the batch.
            aux_states: one tensor for each tapped layer, ascending, each [num_rows, hidden_size].
            max_draft_tokens: what vLLM's batch-size schedule allows the next step, γ by default. With 0 nothing is
                drafted, but states go out all the same: drafting can resume at any step.
        """
        if self.client is None:
            return
        allowed = self.num_draft_tokens if max_draft_tokens is None else min(max_draft_tokens, self.num_draft_tokens)
        self.statistics.outcomes_known()
        self._expected, self._verifications = {}, []
        verified = [(rows, state := self._find_slot(rows.request_id), self._count(rows, state)) for rows in requests]
        choice = None
        if self.planning is not None:
            choice = self._choose(self.planning, verified)
            allowed = self._allowed(allowed, choice)
        if not self.client.ready():
            return
        generation = self.client.generation
        if generation != self._generation:
            self._released.clear()  # a new draft process never heard of them
            self._generation = generation
        messages: list[Verified] = []
        told: list[SlotState] = []
        overwritten: list[int] = []
        states: torch.Tensor | None = None
        for rows, state, had_block in verified:
            if state is None or (rows.is_last and not self.cache_block_size):
                # Decodes plainly, or ends before a draft could be verified and nobody will read its states again.
                overwritten += self._blocks(rows, rows.position, rows.position + rows.num_rows)[1]
                continue
            if states is None:
                states = torch.cat(list(aux_states), dim=-1)
            limit = max(min(allowed, rows.room), 0)
            message = self._message(rows, state, states, had_block, limit, fresh=state.generation != generation)
            messages.append(message)
            told.append(state)
            if message.wants_draft:
                self._expected[state.slot] = Expected(rows.request_id, state, limit, message.anchor_position)
        self._send(messages, told, overwritten, generation, choice)

    def _choose(
        self, planning: StepPlanning, verified: Sequence[tuple[VerifiedRows, SlotState | None, bool]]
    ) -> RoundChoice | None:
        """Tell the planner how the step went, and ask it for the next one; None: no drafting."""
        assert self.client is not None
        going_on = [state for rows, state, _ in verified if rows.num_sampled and not rows.is_last]
        try:
            exposed = self.client.stats.exposed_seconds
            planning.outcomes([rows for rows, _, _ in verified], self._verifications, exposed)
            choice = planning.choose(len(going_on), sum(state is not None for state in going_on))
        except Exception:  # serving goes on whatever happens to the plan
            logger.exception("the planner failed: requests go on without drafts")
            self.planning, choice = StepPlanning(FixedChoice(None)), None
        if going_on:
            self.statistics.chosen(choice)
        return choice

    def _allowed(self, allowed: int, choice: RoundChoice | None) -> int:
        """Draft tokens of a request under ``choice``: copied ones can be more than the round drafts."""
        if choice is None:
            return 0
        return allowed if self.copy_drafts else min(allowed, choice.num_draft_tokens)

    def _message(
        self, rows: VerifiedRows, state: SlotState, states: torch.Tensor, had_block: bool, limit: int, fresh: bool
    ) -> Verified:
        """Tokens not sent before and states of this step; all tokens to a draft process that knows nothing."""
        end = rows.position + rows.num_final_rows
        if fresh:
            token_start = 0
        elif rows.position < state.num_sent - 1:
            token_start = rows.position  # computed again: preempted and resumed, or tokens were taken back
        else:
            token_start = state.num_sent
        token_end = len(rows.token_ids) if rows.num_sampled else end
        first_block, block_ids = self._blocks(rows, 0 if fresh else rows.position, end)
        return Verified(
            slot=state.slot,
            token_start=token_start,
            # A copy: vLLM goes on writing into its own buffer.
            tokens=torch.from_numpy(rows.token_ids[token_start:token_end].astype(np.int32)),
            state_start=rows.position,
            states=states[rows.first_row : rows.first_row + rows.num_final_rows],
            num_accepted=rows.num_accepted if had_block else NO_BLOCK,
            num_verified=rows.num_draft_tokens if had_block else 0,
            wants_draft=rows.num_sampled > 0 and limit > 0,
            max_draft_tokens=limit,
            reset=fresh,
            first_block=first_block,
            block_ids=block_ids,
        )

    def _blocks(self, rows: VerifiedRows, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Of vLLM's blocks that positions [start, end) lie in: the first one's index, and the ids of all."""
        if not self.cache_block_size:
            return 0, ()
        first = start // self.cache_block_size
        return first, tuple(rows.block_ids[first : -(-end // self.cache_block_size)])

    def _send(
        self,
        messages: list[Verified],
        told: list[SlotState],
        overwritten: list[int],
        generation: int,
        choice: RoundChoice | None,
    ) -> None:
        # A slot that was given away again is cleared by its new request's reset.
        released = self._released - {message.slot for message in messages}
        if not messages and not released and not overwritten:
            return
        assert self.client is not None
        self._step += 1
        slots = tuple(sorted(released)), tuple(overwritten)
        least = self._least_probability()
        batch = VerifiedBatch(self._step, tuple(messages), *slots, self.cache_block_size, choice, least)
        if not self.client.send(batch):
            self._expected = {}
            return  # the next draft process is of another generation: it is sent everything
        self._released.clear()
        for state, message in zip(told, messages, strict=True):
            state.generation, state.num_sent = generation, message.anchor_position + 1

    def _least_probability(self) -> float:
        if self.min_accept_prob is not None:
            return self.min_accept_prob
        return 0.0 if self.planning is None else self.planning.min_accept_prob

    def collect(self, request_ids: Sequence[str]) -> list[list[int]]:
        """Drafts for the next step, one list for each request in the given order; empty where there is none.

        Waits for the draft process, at most for the client's timeout.
        """
        drafts: dict[str, list[int]] = {}
        if self._expected and self.client is not None:
            reply = self.client.receive()
            if reply is not None and reply.step == self._step:
                drafts = dict(self._checked(reply.drafts))
            self._expected = {}
        if drafts:
            self.statistics.handed_over()
        return [drafts.get(request_id, []) for request_id in request_ids]

    def _checked(self, answers: Iterable[Draft]) -> Iterable[tuple[str, list[int]]]:
        """Request and usable draft tokens of every answer that fits what was asked for."""
        for draft in answers:
            expected = self._expected.pop(draft.slot, None)
            tokens = self._usable_tokens(draft.tokens, expected.max_tokens if expected else 0)
            if len(tokens) < len(draft.tokens):
                self._complain(draft)
            if expected and tokens and draft.origin in DRAFTED_ORIGINS:
                expected.state.origin = draft.origin
                self.statistics.received(draft.origin)
                if self.planning is not None:
                    self.planning.answered(draft.origin)
                self.statistics.context(expected.context_length, draft.num_missing)
                yield expected.request_id, tokens

    def _usable_tokens(self, tokens: Sequence[int], limit: int) -> list[int]:
        """The tokens before the first that is not in the vocabulary, at most ``limit``."""
        usable: list[int] = []
        for token in tokens[:limit]:
            if not 0 <= token < self.vocab_size:
                break
            usable.append(int(token))
        return usable

    def _complain(self, draft: Draft) -> None:
        if not self.statistics.invalid_blocks:
            logger.warning(
                "the draft process answered with an invalid block for slot %d (%d tokens, %s); it is cut or dropped",
                draft.slot,
                len(draft.tokens),
                draft.origin,
            )
        self.statistics.invalid_blocks += 1

    def _count(self, rows: VerifiedRows, state: SlotState | None) -> bool:
        """Count what the step committed; returns whether a block of ours was under verification."""
        had_block = state is not None and state.origin != Origin.NONE and rows.num_draft_tokens > 0
        if had_block:
            assert state is not None
            self.statistics.verified(state.origin, rows.num_draft_tokens, rows.num_accepted)
            self._verifications.append(Verification(state.origin, rows.num_draft_tokens, rows.num_accepted))
        else:
            self.statistics.plain_tokens += rows.num_sampled
        if state is not None:
            state.origin = Origin.NONE
        return had_block

    def _find_slot(self, request_id: str) -> SlotState | None:
        """The request's slot; a request that finds none free at its first step decodes plainly to its end."""
        state = self._states.get(request_id)
        if state is None and request_id not in self._without_slot:
            if self._free_slots:
                state = self._states[request_id] = SlotState(heapq.heappop(self._free_slots))
            else:
                self._without_slot.add(request_id)
        return state

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """The scheduler dropped the blocks of these requests: they were preempted."""
        for request_id in request_ids:
            if request_id in self._states:
                self._states[request_id].origin = Origin.NONE

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests ended, or their tokens change: their slots are free again."""
        for request_id in request_ids:
            self._without_slot.discard(request_id)
            state = self._states.pop(request_id, None)
            if state is not None:
                heapq.heappush(self._free_slots, state.slot)
                self._released.add(state.slot)

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """Plain dict of :class:`Statistics` and of the client's own counts (under ``client``)."""
        if self.client is None:
            return {}
        counts = self._counts_of_client()
        values = self.statistics.as_dict() | {"client": difference(counts, self._client_counts)}
        if self.planning is not None:
            values["plan"] = self.planning.planner.state()
        if reset:
            self.statistics.reset()
            self._client_counts = counts
        return values

    def begin_counting(self) -> None:
        """What the client saw until now was no serving: it was measured."""
        assert self.client is not None
        self._client_start = asdict(self.client.stats)

    def _counts_of_client(self) -> dict[str, float]:
        assert self.client is not None
        return difference(asdict(self.client.stats), self._client_start)

    def totals(self) -> dict[str, Any]:
        """What ``/metrics`` shows: sums since start, which no reset changes, and whether drafts can come now."""
        assert self.client is not None
        return self.statistics.totals() | {"client": self._counts_of_client(), "alive": self.client.alive}
