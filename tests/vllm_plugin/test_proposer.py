"""The proposer against a scripted draft process: slots, what is sent, restarts, and every kind of answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_jetspecpp.draft_process.client import ClientStats
from vllm_jetspecpp.transport.messages import NO_BLOCK, Draft, DraftBatch, VerifiedBatch
from vllm_jetspecpp.types import Origin
from vllm_jetspecpp.vllm_plugin.proposer import Proposer, VerifiedRows

GAMMA, VOCAB, MAX_LEN = 4, 50, 100


@dataclass
class FakeClient:
    generation: int = 1
    alive: bool = True
    """Whether there is a draft process."""
    sends: bool = True
    answer: tuple[Draft, ...] | None = ()
    stale: bool = False
    sent: list[VerifiedBatch] = field(default_factory=list)
    stats: ClientStats = field(default_factory=ClientStats)

    def ready(self) -> bool:
        return self.alive

    def send(self, batch: VerifiedBatch) -> bool:
        self.sent.append(batch)
        return self.sends

    def receive(self) -> DraftBatch | None:
        self.stats.replies += 1
        return None if self.answer is None else DraftBatch(self.sent[-1].step - self.stale, self.answer)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def proposer(client: FakeClient) -> Proposer:
    spec = SimpleNamespace(
        num_speculative_tokens=GAMMA,
        copy_drafts=False,
        min_accept_prob="auto",
        engine_config=lambda _: SimpleNamespace(num_slots=2),
    )
    model = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    proposer = Proposer(SimpleNamespace(speculative_config=spec, model_config=model))
    proposer.client = client  # type: ignore[assignment]
    return proposer


def rows(request_id: str, position: int, num_rows: int, num_tokens: int, **fields: Any) -> VerifiedRows:
    """One request's rows; token ids are 0, 1, 2, …."""
    given = {"first_row": 0, "num_draft_tokens": 0, "num_sampled": 1, "max_num_tokens": MAX_LEN} | fields
    return VerifiedRows(
        request_id, num_rows=num_rows, position=position, token_ids=np.arange(num_tokens, dtype=np.int32), **given
    )


def step(proposer: Proposer, *requests: VerifiedRows) -> list[list[int]]:
    num_rows = sum(request.num_rows for request in requests)
    proposer.propose(requests, [torch.arange(num_rows)[:, None].float(), torch.ones(num_rows, 1)])
    return proposer.collect([request.request_id for request in requests])


def test_prefill_in_chunks_then_decoding(proposer: Proposer, client: FakeClient) -> None:
    assert step(proposer, rows("a", 0, 6, 10, num_sampled=0)) == [[]]
    client.answer = (Draft(0, (7, 8, 9, 10), Origin.FIRST),)
    assert step(proposer, rows("a", 6, 4, 11)) == [[7, 8, 9, 10]]
    # Two of four drafts are accepted: 11 tokens, then d_1, d_2 and the target's own.
    step(proposer, rows("a", 10, 5, 14, num_draft_tokens=4, num_sampled=3))
    chunk, last, verified = (batch.requests[0] for batch in client.sent)
    assert (chunk.reset, chunk.token_start, chunk.tokens.tolist(), chunk.wants_draft) == (True, 0, [*range(6)], False)
    assert (last.reset, last.token_start, last.tokens.tolist(), last.wants_draft) == (False, 6, [*range(6, 11)], True)
    assert (last.state_start, last.states.shape, last.num_accepted) == (6, (4, 2), NO_BLOCK)
    assert (verified.token_start, verified.tokens.tolist(), verified.anchor_position) == (11, [11, 12, 13], 13)
    assert (verified.state_start, verified.states[:, 0].tolist()) == (10, [0, 1, 2])
    assert (verified.num_accepted, verified.num_verified) == (2, 4)
    assert [batch.step for batch in client.sent] == [1, 2, 3]
    stats = proposer.stats()
    assert stats["committed"] == {"target": 2, "first": 2, "hit": 0, "fallback": 0, "copied": 0}
    assert stats["acceptance_length"] == 3 and stats["accepted_lengths"] == [0, 0, 1, 0, 0]


def test_cached_prefix_comes_without_states(proposer: Proposer, client: FakeClient) -> None:
    step(proposer, rows("a", 8, 2, 11))
    message = client.sent[0].requests[0]
    assert (message.token_start, message.tokens.shape[0], message.state_start) == (0, 11, 8)


def test_blocks_of_the_prefix_cache(proposer: Proposer, client: FakeClient) -> None:
    """Ids of the blocks that states lie in; on a first message those of the cached prefix too; none without a cache."""
    proposer.cache_block_size = 4
    client.answer = (Draft(0, (1, 2, 3, 4), Origin.FIRST, num_missing=3),)
    step(proposer, rows("a", 8, 2, 11, block_ids=[7, 5, 9]), rows("b", 0, 6, 6, num_sampled=0, block_ids=[1, 2]))
    step(proposer, rows("a", 10, 3, 13, num_draft_tokens=2, num_sampled=2, block_ids=[7, 5, 9, 4]))
    step(proposer, rows("c", 5, 5, 11, block_ids=[3, 6, 8]), rows("b", 6, 1, 7, num_sampled=0, block_ids=[1, 2]))
    first, other, verified = client.sent[0].requests[0], client.sent[0].requests[1], client.sent[1].requests[0]
    assert (first.first_block, first.block_ids) == (0, (7, 5, 9)) and client.sent[0].cache_block_size == 4
    assert (other.first_block, other.block_ids) == (0, (1, 2))
    assert (verified.first_block, verified.block_ids) == (2, (9,))  # the rejected row reached into block 4
    # c has no slot: what the draft process keeps of the blocks it writes is of no use any more.
    assert client.sent[2].overwritten == (6, 8) and client.sent[2].requests[0].block_ids == (2,)
    stats = proposer.stats()
    assert (stats["context_positions"], stats["missing_positions"]) == (10 + 12, 3 + 3)
    proposer.cache_block_size = 0
    step(proposer, rows("b", 7, 1, 8, num_sampled=0, block_ids=[1, 2]), rows("c", 10, 1, 12, block_ids=[3, 6, 8]))
    assert client.sent[3].overwritten == client.sent[3].requests[0].block_ids == ()


def test_a_step_without_drafts_still_tells_what_was_overwritten(proposer: Proposer, client: FakeClient) -> None:
    proposer.cache_block_size = 4
    step(proposer, rows("a", 0, 2, 3), rows("b", 0, 2, 3))
    proposer.forget(["a", "b"])
    proposer._free_slots.clear()
    step(proposer, rows("c", 0, 5, 6, block_ids=[3, 6]))
    assert client.sent[-1].requests == () and client.sent[-1].overwritten == (3, 6)


def test_cut_and_padded_blocks(proposer: Proposer, client: FakeClient) -> None:
    # vLLM pads a first step of one token with drafts of its own: not a block of ours.
    step(proposer, rows("a", 8, 5, 10, num_draft_tokens=4))
    client.answer = (Draft(0, (1, 2, 3, 4), Origin.HIT),)
    step(proposer, rows("a", 9, 1, 11))
    step(proposer, rows("a", 10, 3, 12, num_draft_tokens=2))  # the scheduler cut our block to two
    step(proposer, rows("a", 11, 1, 13))  # and then dropped it
    padded, _, cut, dropped = (batch.requests[0] for batch in client.sent)
    assert (padded.num_accepted, padded.num_verified, padded.states.shape[0]) == (NO_BLOCK, 0, 1)
    assert (cut.num_accepted, cut.num_verified, cut.states.shape[0]) == (0, 2, 1)
    assert (dropped.num_accepted, dropped.num_verified) == (NO_BLOCK, 0)
    assert proposer.stats()["verified_by_origin"] == {"first": 0, "hit": 1, "fallback": 0, "copied": 0}


def test_preempted_request_is_sent_again(proposer: Proposer, client: FakeClient) -> None:
    client.answer = (Draft(0, (1,), Origin.FIRST),)
    step(proposer, rows("a", 0, 10, 11))
    proposer.withdraw(["a", "unknown"])
    step(proposer, rows("a", 4, 4, 11, num_sampled=0))
    step(proposer, rows("a", 8, 3, 12))
    again, last = (batch.requests[0] for batch in client.sent[1:])
    assert (again.reset, again.token_start, again.tokens.tolist()) == (False, 4, [4, 5, 6, 7])
    assert (last.token_start, last.tokens.tolist(), last.num_accepted) == (8, [8, 9, 10, 11], NO_BLOCK)


def test_slots(proposer: Proposer, client: FakeClient) -> None:
    step(proposer, rows("a", 0, 2, 3), rows("b", 0, 2, 3), rows("c", 0, 2, 3))
    assert [r.slot for r in client.sent[-1].requests] == [0, 1]
    proposer.forget(["a"])
    step(proposer, rows("b", 2, 1, 4), rows("c", 2, 1, 4))  # c began without a slot and goes on without
    assert [r.slot for r in client.sent[-1].requests] == [1] and client.sent[-1].released == (0,)
    proposer.forget(["b"])
    step(proposer, rows("c", 3, 1, 5), rows("d", 0, 2, 3))  # d takes slot 0
    assert [(r.slot, r.reset) for r in client.sent[-1].requests] == [(0, True)] and client.sent[-1].released == (1,)
    proposer.forget(["d"])
    step(proposer, rows("e", 0, 2, 3))  # the slot is given away before its release was sent
    assert [(r.slot, r.reset) for r in client.sent[-1].requests] == [(0, True)] and client.sent[-1].released == ()
    proposer.forget(["c", "e"])
    step(proposer, rows("c", 0, 2, 3))  # a new request of a known name
    assert [(r.slot, r.reset) for r in client.sent[-1].requests] == [(0, True)]


def test_nothing_is_asked_for_without_room(proposer: Proposer, client: FakeClient) -> None:
    client.answer = (Draft(0, (1, 2, 3, 4), Origin.FIRST),)
    assert step(proposer, rows("a", 0, 9, 10, max_num_tokens=13)) == [[1, 2]]
    assert client.sent[0].requests[0].max_draft_tokens == 2
    assert step(proposer, rows("a", 9, 3, 12, num_draft_tokens=2, num_sampled=2, max_num_tokens=13)) == [[]]
    assert len(client.sent) == 1 and client.stats.replies == 1
    proposer.cache_block_size = 4  # a later request may read the states of the last step
    assert step(proposer, rows("a", 9, 3, 12, num_draft_tokens=2, num_sampled=2, max_num_tokens=13)) == [[]]
    last = client.sent[1].requests[0]
    assert (last.wants_draft, last.states.shape[0]) == (False, 2) and client.stats.replies == 1


@pytest.mark.parametrize("failure", ["not ready", "not sent"])
def test_restart(proposer: Proposer, client: FakeClient, failure: str) -> None:
    client.answer = (Draft(1, (1,), Origin.FIRST),)
    step(proposer, rows("b", 0, 2, 3, num_sampled=0), rows("a", 0, 10, 11))
    proposer.forget(["b"])
    client.alive, client.sends = failure != "not ready", failure != "not sent"
    assert step(proposer, rows("a", 10, 2, 13, num_draft_tokens=1, num_sampled=2)) == [[]]
    client.alive = client.sends = True
    client.generation += 1
    assert step(proposer, rows("a", 12, 1, 14)) == [[1]]
    message = client.sent[-1].requests[0]
    assert (message.reset, message.token_start, message.tokens.shape[0], message.state_start) == (True, 0, 14, 12)
    assert client.sent[-1].released == ()  # of a process that is gone


@pytest.mark.parametrize(
    ("answer", "drafts"),
    [
        (None, []),
        ((), []),
        ((Draft(1, (1, 2), Origin.HIT),), []),
        ((Draft(99, (1, 2), Origin.HIT),), []),
        ((Draft(-1, (1, 2), Origin.HIT),), []),
        ((Draft(0, (), Origin.NONE),), []),
        ((Draft(0, (1, 2), Origin.NONE),), []),
        ((Draft(0, tuple(range(40)), Origin.HIT),), [0, 1, 2, 3]),
        ((Draft(0, (1, VOCAB, 2), Origin.HIT),), [1]),
        ((Draft(0, (-1, 1), Origin.HIT),), []),
        ((Draft(0, (1,), Origin.HIT), Draft(0, (2, 3), Origin.HIT)), [1]),
        ((Draft(7, (1,), Origin.HIT), Draft(0, (2, 3), Origin.HIT)), [2, 3]),
    ],
)
def test_answers(proposer: Proposer, client: FakeClient, answer: Any, drafts: list[int]) -> None:
    client.answer = answer
    assert step(proposer, rows("a", 0, 10, 11)) == [drafts]


def test_late_answer_is_not_used(proposer: Proposer, client: FakeClient) -> None:
    client.answer, client.stale = (Draft(0, (1, 2), Origin.HIT),), True
    assert step(proposer, rows("a", 0, 10, 11)) == [[]]


def test_rank_without_client(proposer: Proposer) -> None:
    proposer.client = None
    assert step(proposer, rows("a", 0, 10, 11)) == [[]]
    assert proposer.stats() == {}


def test_tokens_are_copied(proposer: Proposer, client: FakeClient) -> None:
    request = rows("a", 0, 10, 11)
    proposer.propose([request], [torch.ones(10, 1)])
    request.token_ids[:] = 0
    assert client.sent[0].requests[0].tokens.tolist() == list(range(11))


def test_stats_since_reset(proposer: Proposer, client: FakeClient) -> None:
    client.answer = (Draft(0, (1,), Origin.FIRST),)
    step(proposer, rows("a", 0, 10, 11))
    assert proposer.stats(reset=True)["client"]["replies"] == 1
    stats = proposer.stats()
    assert stats["client"]["replies"] == 0 and stats["blocks_by_origin"]["first"] == 0
