"""The fixed-shape round against the plain one, on tiny random models in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.naive_round import NaiveRound, simulate
from tests.tiny_round import Tiny, random_tokens
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.transport.messages import NO_BLOCK, Draft, Verified, VerifiedBatch
from vllm_jetspecpp.types import DraftBlock, Origin, Outcome

ROUNDS = [(5, 4, 0, 0), (7, 1, 1, 0), (7, 16, 1, 1), (3, 5, 3, 3), (7, 4, 3, 2), (1, 3, 2, 2)]
ANCHORS_FIRST = [(5, 4, 0, 1), (1, 3, 0, 1), (2, 2, 0, 1), (6, 3, 1, 2), (4, 5, 2, 3)]


def first_message(slot: int, tokens: list[int], states: torch.Tensor) -> Verified:
    """All of a request at once: states of every token but the anchor."""
    ids = torch.tensor(tokens, dtype=torch.int32)
    return Verified(slot, 0, ids, 0, states, NO_BLOCK, wants_draft=True, reset=True)


def cached(engine: DraftEngine, slot: int) -> dict[Outcome, tuple[int, ...]]:
    return {outcome: block.tokens for outcome, block in engine.cache._slots[slot].blocks.items()}


@pytest.mark.parametrize(
    ("shape", "replacement"),
    [*((shape, True) for shape in [*ROUNDS, *ANCHORS_FIRST]), ((7, 4, 1, 1), False), ((5, 3, 3, 2), False)],
    ids=str,
)
def test_round_equals_plain_reference(tiny: Tiny, shape: tuple[int, int, int, int], replacement: bool) -> None:
    """First block and every pre-drafted block, for any γ, B, J, R, with anchor replacement and without."""
    config = RoundConfig(*shape, fallback_passes=shape[2], fallback_refreshes=shape[3], anchor_replacement=replacement)
    engine = tiny.engine(config)
    tokens = random_tokens(20, seed=sum(shape))
    states = tiny.states(tokens[:-1])
    reply = engine.answer(VerifiedBatch(0, (first_message(1, tokens, states),)))
    engine.work()
    plain = NaiveRound(engine.nets, config, tokens, states)
    with torch.inference_mode():
        assert list(reply.drafts[0].tokens) == plain.fallback()
        expected = plain.predraft(list(reply.drafts[0].tokens))
    assert {tuple(o): list(b) for o, b in cached(engine, 1).items()} == expected


def test_missing_states_are_masked(tiny: Tiny) -> None:
    """A prefix whose states never arrive (vLLM's prefix cache) leaves a draft made of what is there."""
    config = RoundConfig(4, 3, 1, 1)
    engine, tokens = tiny.engine(config), random_tokens(24, seed=9)
    states = tiny.states(tokens[:-1])
    ids = torch.tensor(tokens, dtype=torch.int32)
    message = Verified(0, 0, ids, 16, states[16:], NO_BLOCK, wants_draft=True, reset=True)
    reply = engine.answer(VerifiedBatch(0, (message,)))
    engine.work()
    plain = NaiveRound(engine.nets, config, tokens, states, missing=tuple(range(16)))
    with torch.inference_mode():
        assert list(reply.drafts[0].tokens) == plain.fallback()
        assert {tuple(o): list(b) for o, b in cached(engine, 0).items()} == plain.predraft(list(reply.drafts[0].tokens))


def test_no_states_at_all(tiny: Tiny) -> None:
    """With not one state a block is still drafted, and nothing is NaN."""
    engine, tokens = tiny.engine(RoundConfig(4, 3, 1, 1)), random_tokens(10, seed=2)
    empty = tiny.states(tokens)[:0]
    reply = engine.answer(VerifiedBatch(0, (first_message(0, tokens, empty),)))
    engine.work()
    assert len(reply.drafts[0].tokens) == 4 and len(cached(engine, 0)) == 3


def test_states_sent_in_pieces_and_again(tiny: Tiny) -> None:
    """Prefill chunks, and positions sent twice (preemption), end in the same round as one message."""
    config, tokens = RoundConfig(6, 4, 1, 1), random_tokens(40, seed=5)
    states, ids = tiny.states(tokens[:-1]), torch.tensor(tokens, dtype=torch.int32)
    whole, pieces = tiny.engine(config), tiny.engine(config)
    whole.answer(VerifiedBatch(0, (first_message(0, tokens, states),)))
    whole.work()
    for start, end in ((0, 13), (13, 30), (5, 17), (17, 30)):
        chunk = Verified(0, start, ids[start:end], start, states[start:end], reset=start == 0)
        assert pieces.answer(VerifiedBatch(0, (chunk,))).drafts == ()
        pieces.work()
    last = Verified(0, 30, ids[30:], 30, states[30:], wants_draft=True)
    pieces.answer(VerifiedBatch(1, (last,)))
    pieces.work()
    assert cached(whole, 0) == cached(pieces, 0)


def test_batched_round_equals_single_rounds(tiny: Tiny) -> None:
    """Requests of different lengths in one batch draft what each drafts alone; a slot's number changes nothing."""
    config = RoundConfig(6, 4, 2, 1)
    requests = {slot: random_tokens(length, seed=length) for slot, length in ((2, 9), (0, 33), (3, 140))}
    batch = tuple(first_message(s, t, tiny.states(t[:-1])) for s, t in requests.items())
    together = tiny.engine(config)
    reply = together.answer(VerifiedBatch(0, batch))
    together.work()
    for message, draft in zip(batch, reply.drafts, strict=True):
        alone = tiny.engine(config)
        assert alone.answer(VerifiedBatch(0, (message,))).drafts == (draft,)
        alone.work()
        assert cached(alone, message.slot) == cached(together, message.slot)


def next_message(
    tokens: list[int], states: torch.Tensor, anchor: int, outcome: Outcome, drafts: tuple[int, ...]
) -> Verified:
    """What the worker sends after a verification; ``tokens`` is the sequence with the committed tokens."""
    ids = torch.tensor([*drafts[: outcome.num_accepted], outcome.bonus_token], dtype=torch.int32)
    rows = states[anchor : anchor + outcome.num_accepted + 1]
    return Verified(0, anchor + 1, ids, anchor, rows, outcome.num_accepted, len(drafts), wants_draft=True)


def test_hit_answers_the_cached_block_and_miss_the_fallback(tiny: Tiny) -> None:
    """Every cached outcome is answered from the cache as a hit; any other by J_0 from the true states."""
    config = RoundConfig(5, 3, 1, 1)
    tokens = random_tokens(15, seed=3)
    first = first_message(0, tokens, tiny.states(tokens[:-1]))

    def started() -> tuple[DraftEngine, Draft]:
        engine = tiny.engine(config)
        draft = engine.answer(VerifiedBatch(0, (first,))).drafts[0]
        engine.work()
        return engine, draft

    engine, draft = started()
    blocks = dict(cached(engine, 0))
    impossible = Outcome(0, draft.tokens[0])  # a = d_1 with k = 0 cannot happen, so it is never cached
    for outcome in (*blocks, impossible):
        engine, _ = started()
        committed = [*draft.tokens[: outcome.num_accepted], outcome.bonus_token]
        sequence = [*tokens, *committed]
        message = next_message(sequence, tiny.states(sequence[:-1]), len(tokens) - 1, outcome, draft.tokens)
        answer = engine.answer(VerifiedBatch(1, (message,))).drafts[0]
        if outcome in blocks:
            assert (answer.origin, answer.tokens) == (Origin.HIT, blocks[outcome])
        else:
            plain = NaiveRound(engine.nets, config, sequence, tiny.states(sequence[:-1]))
            with torch.inference_mode():
                assert (answer.origin, list(answer.tokens)) == (Origin.FALLBACK, plain.fallback())


@pytest.mark.parametrize("cut", range(6))
def test_a_cut_block_goes_on(tiny: Tiny, cut: int) -> None:
    """The scheduler verified ``cut`` of γ drafts and the target then said the next one itself: the rest is the draft.

    Where nothing is left of it the block is drafted anew; and the shorter block's own round is of the usual shape.
    """
    config, tokens = RoundConfig(5, 3, 1, 1), random_tokens(15, seed=3)
    engine = tiny.engine(config)
    draft = engine.answer(VerifiedBatch(0, (first_message(0, tokens, tiny.states(tokens[:-1])),))).drafts[0]
    engine.work()
    outcome = Outcome(cut, draft.tokens[cut] if cut < 5 else 7)
    sequence = [*tokens, *draft.tokens[:cut], outcome.bonus_token]
    states = tiny.states(sequence[:-1])
    message = next_message(sequence, states, len(tokens) - 1, outcome, draft.tokens[:cut])
    answer = engine.answer(VerifiedBatch(1, (message,))).drafts[0]
    engine.work()
    assert len(cached(engine, 0)) == config.num_outcomes
    if cut < 4:
        assert (answer.origin, answer.tokens) == (Origin.HIT, draft.tokens[cut + 1 :])
    else:
        assert answer.origin in (Origin.FALLBACK, Origin.HIT) and len(answer.tokens) == 5
    # What only fills the shorter block up is never handed out, even where it comes true.
    whole = Outcome(len(answer.tokens), answer.tokens[-1])
    sequence += [*answer.tokens, whole.bonus_token]
    end = next_message(sequence, tiny.states(sequence[:-1]), len(tokens) + cut, whole, answer.tokens)
    last = engine.answer(VerifiedBatch(2, (end,))).drafts[0]
    assert len(last.tokens) == 5 and last.origin in (Origin.FALLBACK, Origin.HIT)


def test_requests_of_a_batch_hit_and_miss_independently(tiny: Tiny) -> None:
    config = RoundConfig(5, 3, 1, 1)
    engine = tiny.engine(config)
    tokens = {0: random_tokens(12, seed=1), 1: random_tokens(20, seed=2)}
    drafts = engine.answer(
        VerifiedBatch(0, tuple(first_message(s, t, tiny.states(t[:-1])) for s, t in tokens.items()))
    ).drafts
    engine.work()
    hit = next(iter(cached(engine, 0)))
    outcomes = {0: hit, 1: Outcome(0, drafts[1].tokens[0])}
    messages = []
    for slot, outcome in outcomes.items():
        sequence = [*tokens[slot], *drafts[slot].tokens[: outcome.num_accepted], outcome.bonus_token]
        message = next_message(
            sequence, tiny.states(sequence[:-1]), len(tokens[slot]) - 1, outcome, drafts[slot].tokens
        )
        messages.append(Verified(**{**message.__dict__, "slot": slot}))
    expected = cached(engine, 0)[hit]
    answers = engine.answer(VerifiedBatch(1, tuple(messages))).drafts
    assert [a.origin for a in answers] == [Origin.HIT, Origin.FALLBACK]
    assert answers[0].tokens == expected
    engine.work()
    assert len(cached(engine, 0)) == len(cached(engine, 1)) == config.num_outcomes


def test_a_new_request_sees_nothing_of_the_old_one(tiny: Tiny) -> None:
    """A slot that is reset drafts as a fresh engine does."""
    config = RoundConfig(5, 3, 1, 1)
    old, new = random_tokens(60, seed=1), random_tokens(10, seed=2)
    used, fresh = tiny.engine(config), tiny.engine(config)
    used.answer(VerifiedBatch(0, (first_message(0, old, tiny.states(old[:-1])),)))
    used.work()
    message = first_message(0, new, tiny.states(new[:-1]))
    assert used.answer(VerifiedBatch(1, (message,), released=(0,))) == fresh.answer(VerifiedBatch(1, (message,)))
    for engine in (used, fresh):
        engine.work()
    assert cached(used, 0) == cached(fresh, 0)


def test_a_cut_block_ends_where_it_was_cut(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last draft token handed out, any token may follow, that of the whole block too."""
    room, config, tokens = 1, RoundConfig(5, 64, 0, 0), random_tokens(20, seed=4)
    engine, states = tiny.engine(config), tiny.states(tokens[:-1])
    plain, whole = NaiveRound(engine.nets, config, tokens, states), list[int]()
    with torch.inference_mode():  # what the decoder thinks likeliest, so that its outcomes reach the cut
        for position in range(len(tokens) - 1, len(tokens) + 4):
            block = [tokens[-1], *whole]
            log_probs, _ = simulate(engine.nets, block, list(range(len(tokens) - 1, position + 1)), plain.context())
            whole.append(int(engine.nets.target.head_token_ids[log_probs[-1].argmax()]))
    monkeypatch.setattr(engine, "_fallback", lambda missed: {0: DraftBlock(tuple(whole), (0.0,) * 5)})
    message = dataclasses.replace(first_message(0, tokens, states), max_draft_tokens=room)
    engine.answer(VerifiedBatch(0, (message,)))
    engine.work()
    with torch.inference_mode():
        expected = plain.predraft(whole, num_verified=room)
    assert {tuple(o): list(b) for o, b in cached(engine, 0).items()} == expected
    assert Outcome(room, whole[room]) in cached(engine, 0)


def test_drafts_end_at_the_room_given(tiny: Tiny) -> None:
    engine, tokens = tiny.engine(RoundConfig(5, 3, 1, 1)), random_tokens(10, seed=2)
    message = first_message(0, tokens, tiny.states(tokens[:-1]))
    for room, origin in ((2, Origin.FIRST), (0, Origin.NONE)):
        draft = engine.answer(VerifiedBatch(0, (Verified(**{**message.__dict__, "max_draft_tokens": room}),))).drafts[0]
        assert (len(draft.tokens), draft.origin) == (room, origin)
        engine.work()
