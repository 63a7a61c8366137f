"""States that outlive their request: the prefix store, and an engine whose prompts vLLM has cached in part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tiny_round import Tiny, random_tokens
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.runtime.kv_cache import SlotCache
from vllm_jetspecpp.runtime.prefix_store import PrefixStore
from vllm_jetspecpp.transport.messages import NO_BLOCK, DraftBatch, Verified, VerifiedBatch

SIZE = 4
ROUND = RoundConfig(4, 3, 1, 1)


def make_caches() -> list[SlotCache]:
    generator = torch.Generator().manual_seed(0)
    caches = [SlotCache(layers, 3, 2, 32, 8, torch.float32, torch.device("cpu")) for layers in (1, 2)]
    for tensor in (t for cache in caches for layer in cache.layers for t in layer):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return caches


def contents(caches: list[SlotCache], slot: int, block: int) -> list[torch.Tensor]:
    span = slice(block * SIZE, (block + 1) * SIZE)
    return [t[slot, :, span].clone() for cache in caches for layer in cache.layers for t in layer]


def block_bytes(caches: list[SlotCache]) -> int:
    return sum(t.nbytes for t in contents(caches, 0, 0))


def test_blocks_come_back_bit_for_bit() -> None:
    caches, tokens = make_caches(), np.arange(32, dtype=np.int32)
    store = PrefixStore(caches, SIZE, 5 * block_bytes(caches) + 1)
    assert store.capacity == 5 and store.num_bytes == 5 * block_bytes(caches)
    saved = {block: contents(caches, 0, block) for block in (1, 2, 4)}
    store.save(0, [1, 2, 4], [70, 9, 1 << 40], tokens)
    assert store.restore(2, [0, 1, 2, 3, 4], [5, 70, 9, 6, 1 << 40], tokens) == [1, 2, 4]
    for block, expected in saved.items():
        assert all(map(torch.equal, contents(caches, 2, block), expected))
    assert not torch.equal(contents(caches, 2, 3)[0], contents(caches, 0, 3)[0])


def test_another_prefix_under_the_same_id_is_a_miss() -> None:
    caches, tokens = make_caches(), np.arange(32, dtype=np.int32)
    store = PrefixStore(caches, SIZE, 8 * block_bytes(caches))
    store.save(0, [0, 1], [10, 11], tokens)
    other = tokens.copy()
    other[0] = 99  # the second block's own tokens are the same, but not what stands before it
    assert store.restore(1, [0, 1], [10, 11], other) == []
    store.save(1, [0], [10], other)
    assert store.restore(2, [0, 1], [10, 11], tokens) == [1]
    store.drop([11, 12345])
    assert store.restore(2, [0, 1], [10, 11], tokens) == [] and len(store) == 1


def test_least_recently_used_blocks_go_first() -> None:
    caches, tokens = make_caches(), np.arange(32, dtype=np.int32)
    store = PrefixStore(caches, SIZE, 3 * block_bytes(caches))
    store.save(0, [0, 1, 2], [0, 1, 2], tokens)
    store.restore(1, [0], [0], tokens)
    store.save(0, [3], [3], tokens)
    assert store.restore(1, [0, 1, 2, 3], [0, 1, 2, 3], tokens) == [0, 2, 3]
    store.save(0, list(range(8)), list(range(8)), tokens)  # more than there is room for: the last ones stay
    assert store.restore(1, list(range(8)), list(range(8)), tokens) == [5, 6, 7]
    nothing = PrefixStore(caches, SIZE, block_bytes(caches) - 1)
    nothing.save(0, [0], [0], tokens)
    assert nothing.capacity == 0 and nothing.restore(1, [0], [0], tokens) == []


def engine_with_store(tiny: Tiny, num_bytes: int = 1 << 24) -> DraftEngine:
    return DraftEngine(replace(tiny.config(ROUND), prefix_store_bytes=num_bytes))


def begin(engine: DraftEngine, tiny: Tiny, slot: int, tokens: list[int], cached: int, ids: list[int]) -> DraftBatch:
    """A request whose first ``cached`` positions vLLM takes from its cache, in one message; then the round after it."""
    states = tiny.states(tokens[:-1])[cached:]
    message = Verified(
        slot,
        0,
        torch.tensor(tokens, dtype=torch.int32),
        cached,
        states,
        NO_BLOCK,
        wants_draft=True,
        reset=True,
        block_ids=tuple(ids),
    )
    reply = engine.answer(VerifiedBatch(0, (message,), cache_block_size=SIZE))
    engine.work()
    return reply


def assert_same_entry(left: DraftEngine, left_slot: int, right: DraftEngine, right_slot: int) -> None:
    """The same blocks for the same outcomes; confidences as close as products of other numbers of rows are."""
    a, b = left.cache._slots[left_slot], right.cache._slots[right_slot]
    assert a.anchor_position == b.anchor_position
    assert {k: block.tokens for k, block in a.blocks.items()} == {k: block.tokens for k, block in b.blocks.items()}
    for outcome, block in a.blocks.items():
        assert block.confidence == pytest.approx(b.blocks[outcome].confidence, rel=1e-4)


def test_a_repeated_prompt_is_drafted_as_the_first_time(tiny: Tiny) -> None:
    """Same first block, same pre-drafts; no states are missing, and without the store they are."""
    tokens = random_tokens(23, seed=3)
    engine, without = engine_with_store(tiny), engine_with_store(tiny, 0)
    first = begin(engine, tiny, 0, tokens, 0, [9, 4, 7, 3, 2, 1])
    assert first.drafts[0].num_missing == 0
    again = begin(engine, tiny, 2, tokens, 20, [9, 4, 7, 3, 2, 8])
    assert again.drafts[0] == replace(first.drafts[0], slot=2)
    assert_same_entry(engine, 2, engine, 0)
    begin(without, tiny, 0, tokens, 0, [9, 4, 7, 3, 2, 1])
    assert begin(without, tiny, 2, tokens, 20, [9, 4, 7, 3, 2, 8]).drafts[0].num_missing == 20


def test_a_shared_prefix_and_a_hole(tiny: Tiny) -> None:
    """Only vLLM's blocks that are known come back: whatever else is cached is counted as missing."""
    tokens, engine = random_tokens(23, seed=3), engine_with_store(tiny)
    begin(engine, tiny, 0, tokens, 0, [9, 4, 7, 3, 2, 1])
    other = tokens[:14] + random_tokens(9, seed=4)
    assert begin(engine, tiny, 1, other, 12, [9, 5, 7, 6, 0, 11]).drafts[0].num_missing == 4  # block 5 is unknown
    assert begin(engine, tiny, 1, other, 20, [9, 4, 7, 3, 0, 11]).drafts[0].num_missing == 4  # block 3: other tokens


def test_requests_of_one_step_share_a_prefix(tiny: Tiny) -> None:
    """vLLM caches a block when it plans its computation: the second request of a step may already read the first's."""
    tokens, ids = random_tokens(23, seed=3), (9, 4, 7, 3, 2, 1)
    longer = tokens[:16] + random_tokens(12, seed=6)
    states = {len(t): tiny.states(t[:-1]) for t in (tokens, longer)}

    def first(slot: int, sequence: list[int], cached: int, block_ids: tuple[int, ...]) -> Verified:
        rest, ids = states[len(sequence)][cached:], torch.tensor(sequence, dtype=torch.int32)
        return Verified(slot, 0, ids, cached, rest, wants_draft=True, reset=True, block_ids=block_ids)

    messages = (
        first(2, longer, 20, (9, 4, 7, 3, 20, 21, 22)),  # reads from slot 1, which is behind it in the batch
        first(0, tokens, 0, ids),
        first(1, longer, 16, (9, 4, 7, 3, 20, 21, 22)),
    )
    engine, alone = engine_with_store(tiny), engine_with_store(tiny)
    drafts = engine.answer(VerifiedBatch(0, messages, cache_block_size=SIZE)).drafts
    engine.work()
    assert [draft.num_missing for draft in drafts] == [0, 0, 0]
    whole = begin(alone, tiny, 1, longer, 0, []).drafts[0]
    for draft in (drafts[0], drafts[2]):
        assert replace(draft, slot=1) == whole
        assert_same_entry(engine, draft.slot, alone, 1)


def test_blocks_that_others_wrote_are_dropped(tiny: Tiny) -> None:
    tokens, engine = random_tokens(23, seed=3), engine_with_store(tiny)
    begin(engine, tiny, 0, tokens, 0, [9, 4, 7, 3, 2, 1])
    engine.answer(VerifiedBatch(1, (), released=(0,), overwritten=(4,), cache_block_size=SIZE))
    # A request that has begun to fill block 9 and went away: what was kept under it is not what stands there.
    part = Verified(1, 0, torch.tensor(tokens[:2], dtype=torch.int32), 0, tiny.states(tokens[:2]), block_ids=(9,))
    engine.answer(VerifiedBatch(2, (replace(part, reset=True),), cache_block_size=SIZE))
    engine.work()
    assert begin(engine, tiny, 2, tokens, 20, [9, 4, 7, 3, 2, 8]).drafts[0].num_missing == 8


@pytest.mark.parametrize("window", [8, 20, 128, 256])
def test_a_window_as_long_as_the_context_changes_nothing(tiny: Tiny, window: int) -> None:
    """And a shorter one bounds what is read, in prefill and in rounds, however long the context is."""
    tokens = random_tokens(231, seed=5)
    states = tiny.states(tokens[:-1])
    whole, windowed = tiny.engine(ROUND), DraftEngine(replace(tiny.config(ROUND), window=window))
    message = Verified(1, 0, torch.tensor(tokens, dtype=torch.int32), 0, states, NO_BLOCK, wants_draft=True, reset=True)
    answers = []
    for engine in (whole, windowed):
        answers.append(engine.answer(VerifiedBatch(0, (message,))).drafts[0].tokens)
        engine.work()
    if window >= 231:
        assert answers[0] == answers[1] and whole.cache._slots == windowed.cache._slots
        return
    prefix = windowed.states.prefix([1], [230])
    assert prefix.mask.sum() == window and prefix.mask.shape[1] == -(-window // 32) * 32
    # What is read stands at its own position: the same keys as in the whole context.
    plain, near = (engine.states.prefix([1], [230]).context.draft_model[0] for engine in (whole, windowed))
    torch.testing.assert_close(near[0].keys, plain[0].keys[:, :, 230 - near[0].keys.shape[2] : 230])


def test_memory_is_what_was_announced(tiny: Tiny) -> None:
    from vllm_jetspecpp.models.checkpoint import check_checkpoint
    from vllm_jetspecpp.models.target_parts import load_target_config

    engine, target = tiny.engine(ROUND, num_slots=3), load_target_config(tiny.target)
    per_position = check_checkpoint(tiny.checkpoint, target).cache_bytes_per_position(target, 4)
    assert engine.states.num_bytes == 3 * (256 + 1) * per_position
