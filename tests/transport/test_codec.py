"""Codec and splitting: whatever goes in comes out, and damage is a ValueError."""

import dataclasses
import math

import pytest
import torch

from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.messages import NO_BLOCK, Draft, DraftBatch, Verified, VerifiedBatch
from vllm_jetspecpp.transport.split import split_batch
from vllm_jetspecpp.types import Origin, RoundChoice


def request(slot=0, start=0, num_tokens=3, num_states=2, width=5, dtype=torch.float32, **fields):
    tokens = torch.arange(start, start + num_tokens, dtype=torch.int32) + 1000 * slot
    states = torch.randn(num_states, width).to(dtype)
    return Verified(slot, start, tokens, fields.pop("state_start", start), states, **fields)


def assert_same_request(left, right):
    for field in dataclasses.fields(Verified):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), field.name
        else:
            assert a == b, field.name


def assert_same(left, right):
    assert dataclasses.replace(left, requests=()) == dataclasses.replace(right, requests=())
    assert len(left.requests) == len(right.requests)
    for a, b in zip(left.requests, right.requests, strict=True):
        assert_same_request(a, b)


def encoded(batch):
    buffer = memoryview(bytearray(codec.verified_bytes(batch)))
    codec.encode_verified(batch, buffer)
    return buffer


BATCHES = {
    "empty": VerifiedBatch(0, ()),
    "only released": VerifiedBatch(7, (), released=(3, 0, 4095)),
    "only overwritten": VerifiedBatch(7, (), overwritten=(1 << 40, 0)),
    "no states": VerifiedBatch(1, (request(num_states=0, wants_draft=True),)),
    "no tokens": VerifiedBatch(1, (request(num_tokens=0),)),
    "nothing at all": VerifiedBatch(1, (request(num_tokens=0, num_states=0, width=0, reset=True),)),
    "bf16, odd width": VerifiedBatch(2, (request(dtype=torch.bfloat16, num_states=3, width=7),)),
    "all fields": VerifiedBatch(
        1 << 40,
        (
            request(9, 130, num_accepted=4, num_verified=7, wants_draft=True, max_draft_tokens=11, reset=True),
            request(3, 64, first_block=4, block_ids=(17, 3, 1 << 33)),
        ),
        released=(1,),
        overwritten=(5, 6),
        cache_block_size=16,
        choice=RoundChoice(63, 64, 16, 16),
        min_accept_prob=0.0625,
    ),
    "nothing drafted": VerifiedBatch(1, (request(wants_draft=True),), choice=RoundChoice(0, 0, 0, 0)),
    "drafted in line": VerifiedBatch(1, (request(wants_draft=True),), choice=RoundChoice(1, 0, 0, 0)),
    "many, mixed": VerifiedBatch(
        3, tuple(request(i, i, i % 4, i % 3, 1 + i % 6, codec.DTYPES[i % 3], wants_draft=i % 2 == 0) for i in range(70))
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_verified_round_trip(name):
    assert_same(codec.decode_verified(encoded(BATCHES[name])), BATCHES[name])


def test_states_need_not_be_contiguous():
    states = torch.randn(5, 4).T
    batch = VerifiedBatch(0, (dataclasses.replace(request(), states=states),))
    assert torch.equal(codec.decode_verified(encoded(batch)).requests[0].states, states)


def test_decoded_tensors_are_copies():
    buffer = encoded(BATCHES["all fields"])
    decoded = codec.decode_verified(buffer)
    buffer[:] = bytes(len(buffer))
    assert_same(decoded, BATCHES["all fields"])


@pytest.mark.parametrize(
    "drafts",
    [(), (Draft(0, (), Origin.NONE),), (Draft(1, (5, 6, 7), Origin.HIT, 12), Draft(2, (49151,), Origin.FALLBACK))],
)
def test_draft_round_trip(drafts):
    batch = DraftBatch(12, drafts)
    buffer = memoryview(bytearray(codec.draft_bytes(batch)))
    codec.encode_draft(batch, buffer)
    assert codec.decode_draft(buffer) == batch


@pytest.mark.parametrize(
    "wrong", [{"tokens": torch.zeros(2, dtype=torch.int64)}, {"states": torch.zeros(2, 2).double()}]
)
def test_wrong_dtypes_are_refused(wrong):
    batch = VerifiedBatch(0, (dataclasses.replace(request(), **wrong),))
    with pytest.raises(ValueError, match="must be"):
        encoded(batch)


# Fields of the header and of the first request: magic, total, step, requests, released, overwritten, block size; γ, B,
# J, R and refined outcomes of the round; least probability | slot, token start, tokens, state start, states, width,
# dtype, accepted, verified, room, flags, first block, blocks.
DAMAGED = [0, 1, 3, 4, 5, 7, 8, 9, 10, 11, 13 + 2, 13 + 4, 13 + 5, 13 + 6, 13 + 12]


@pytest.mark.parametrize("field", DAMAGED)
@pytest.mark.parametrize("value", [-1, 1 << 20, 1 << 62])
def test_damaged_fields_are_refused(field, value):
    buffer = encoded(VerifiedBatch(5, (request(),), choice=RoundChoice(7, 4, 3, 2)))
    buffer.cast("q")[field] = value
    with pytest.raises(ValueError):
        codec.decode_verified(buffer)


@pytest.mark.parametrize("least", [-0.1, 1.0, math.inf, math.nan])
def test_impossible_probabilities_are_refused(least):
    buffer = encoded(VerifiedBatch(5, (request(),), min_accept_prob=least))
    with pytest.raises(ValueError, match="probability"):
        codec.decode_verified(buffer)


@pytest.mark.parametrize("choice", [(-2, 4, 1, 1), (64, 4, 1, 1), (7, 65, 1, 1), (7, 4, 17, 1), (7, 4, 1, 3)])
def test_impossible_rounds_are_refused(choice):
    buffer = encoded(VerifiedBatch(5, (request(),), choice=RoundChoice(*choice)))
    with pytest.raises(ValueError, match="impossible round"):
        codec.decode_verified(buffer)


@pytest.mark.parametrize("size", [0, 8, 39, 40, 100])
def test_cut_messages_are_refused(size):
    with pytest.raises(ValueError):
        codec.decode_verified(encoded(BATCHES["all fields"])[:size])


@pytest.mark.parametrize("field", [0, 1, 3, 4 + 1, 4 + 2])
def test_damaged_drafts_are_refused(field):
    batch = DraftBatch(1, (Draft(0, (1, 2), Origin.HIT),))
    buffer = memoryview(bytearray(codec.draft_bytes(batch)))
    codec.encode_draft(batch, buffer)
    buffer.cast("q")[field] = 99
    with pytest.raises(ValueError):
        codec.decode_draft(buffer)


def joined(pieces, slot):
    """Tokens and states by position, as an engine that is idempotent by position would hold them."""
    tokens, states = {}, {}
    for piece in pieces:
        for r in piece.requests:
            if r.slot == slot:
                tokens.update(zip(range(r.token_start, r.token_start + len(r.tokens)), r.tokens.tolist(), strict=True))
                states.update(zip(range(r.state_start, r.state_start + len(r.states)), r.states.tolist(), strict=True))
    return tokens, states


MIXED = VerifiedBatch(
    4,
    (
        request(0, 0, 41, 40, 16, wants_draft=True, reset=True, num_accepted=2, num_verified=3),
        request(1, 100, 1, 3, 16, state_start=97, wants_draft=True, num_accepted=2, num_verified=3),
        request(2, 0, 64, 64, 16, reset=True, block_ids=(7, 5), first_block=0),
        request(3, 0, 301, 1, 16, state_start=299, wants_draft=True),
        request(4, 5, 1, 0, 16, wants_draft=True, reset=True),
    ),
    released=(2, 9),
    overwritten=(4,),
    cache_block_size=16,
    choice=RoundChoice(7, 4, 1, 1),
)


@pytest.mark.parametrize("max_bytes", [700, 1000, 4000, 5000])
def test_split_pieces_mean_the_same(max_bytes):
    pieces = split_batch(MIXED, max_bytes)
    assert len(pieces) > 1 and all(codec.verified_bytes(p) <= max_bytes for p in pieces)
    assert [p.wants_reply for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [(p.released, p.overwritten) for p in pieces] == [((2, 9), (4,))] + [((), ())] * (len(pieces) - 1)
    assert [r.slot for r in pieces[-1].requests] == [0, 1, 3, 4]
    same = ("step", "cache_block_size", "choice")
    assert all(getattr(p, name) == getattr(MIXED, name) for p in pieces for name in same)
    for original in MIXED.requests:
        parts = [r for p in pieces for r in p.requests if r.slot == original.slot]
        assert joined(pieces, original.slot) == joined([MIXED], original.slot)
        assert all(r.block_ids == original.block_ids for r in parts)
        assert [r.reset for r in parts] == [original.reset] + [False] * (len(parts) - 1)
        last = parts[-1]
        assert (last.num_accepted, last.num_verified) == (original.num_accepted, original.num_verified)
        assert all(r.num_accepted == NO_BLOCK for r in parts[:-1])
        if original.wants_draft:
            assert last.anchor_position == original.anchor_position


def test_states_never_run_ahead_of_tokens():
    pieces = split_batch(MIXED, 700)
    known = 0
    for r in (r for p in pieces for r in p.requests if r.slot == 2):
        known = max(known, r.token_start + len(r.tokens))
        assert r.state_start + len(r.states) <= known


def test_small_batches_are_not_split():
    assert split_batch(MIXED, codec.verified_bytes(MIXED)) == [MIXED]


@pytest.mark.parametrize("max_bytes, what", [(150, "position"), (320, "anchors")])
def test_too_small_a_ring_is_refused(max_bytes, what):
    with pytest.raises(ValueError, match=what):
        split_batch(MIXED, max_bytes)
