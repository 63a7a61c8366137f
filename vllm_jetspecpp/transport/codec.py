"""Messages to bytes and back: pure functions on buffers, no pickle.

A message is a fixed header of int64 fields, one int64 record per request (or draft), then for each int32 tokens, the
raw bytes of the states and int64 block ids, each array on an 8-byte boundary. Every count is checked against the buffer
before it is used, so that a damaged message is a ValueError and never a wild read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import torch

from vllm_jetspecpp.config import MAX_DRAFT_TOKENS, MAX_OUTCOMES, MAX_PASSES
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, Verified, VerifiedBatch
from vllm_jetspecpp.types import Origin, RoundChoice

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of states on the wire; a message names one by its index."""

MAX_WIDTH = 1 << 24
"""Of a row of states."""

_VERIFIED_MAGIC = 0x4A53_5050_0001
_DRAFT_MAGIC = 0x4A53_5050_0002
_VERIFIED_HEADER = struct.Struct("=12qd")
"""Magic, total bytes, step, requests, released, overwritten, cache block size; γ, B, J, R and refined
outcomes of the round; the least probability of acceptance."""
_NO_CHOICE = (-1, -1, -1, -1, -1)
_REQUEST = struct.Struct("=13q")
_DRAFT_HEADER = struct.Struct("=4q")  # magic, total bytes, step, drafts
_DRAFT = struct.Struct("=4q")  # slot, origin, tokens, positions without states
_INT64 = 8
_WANTS_DRAFT, _RESET = 1, 2


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _INT64) * _INT64


def request_bytes(num_tokens: int, num_states: int, state_bytes: int, num_blocks: int) -> int:
    """Bytes one request takes in a message; ``state_bytes`` is the size of one row of states."""
    return _REQUEST.size + _aligned(4 * num_tokens) + _aligned(num_states * state_bytes) + _INT64 * num_blocks


def state_bytes(request: Verified) -> int:
    """Bytes of one row of the states of ``request``."""
    return request.states.shape[1] * request.states.element_size()


def verified_bytes(batch: VerifiedBatch) -> int:
    """Exact size of the encoded message."""
    body = sum(
        request_bytes(r.tokens.shape[0], r.states.shape[0], state_bytes(r), len(r.block_ids)) for r in batch.requests
    )
    return _VERIFIED_HEADER.size + _INT64 * (len(batch.released) + len(batch.overwritten)) + body


def encode_verified(batch: VerifiedBatch, buffer: memoryview) -> None:
    """Write ``batch`` into ``buffer`` of ``verified_bytes(batch)`` bytes; states are copied once, device to buffer.

    Raises:
        ValueError: a dtype or shape that ``transport/messages.py`` does not allow.
    """
    counts = (len(batch.requests), len(batch.released), len(batch.overwritten), batch.cache_block_size)
    choice = _NO_CHOICE if batch.choice is None else batch.choice
    fields = (_VERIFIED_MAGIC, len(buffer), batch.step, *counts, *choice, batch.min_accept_prob)
    _VERIFIED_HEADER.pack_into(buffer, 0, *fields)
    at = _put_int64s(batch.released, buffer, _VERIFIED_HEADER.size)
    at = _put_int64s(batch.overwritten, buffer, at)
    for request in batch.requests:
        _REQUEST.pack_into(buffer, at, *_request_fields(request))
        at += _REQUEST.size
    for request in batch.requests:
        at = _put(request.tokens, buffer, at)
        at = _put(request.states, buffer, at)
        at = _put_int64s(request.block_ids, buffer, at)


def decode_verified(buffer: memoryview) -> VerifiedBatch:
    """The message in ``buffer``; its tensors are copies, so the buffer may be used again at once.

    Raises:
        ValueError: not a whole, well-formed message.
    """
    reader = _Reader(buffer)
    magic, total, step, *counts = reader.fields(_VERIFIED_HEADER)
    num_requests, num_released, num_overwritten, block_size, *round_shape, least = counts
    _check_header(magic == _VERIFIED_MAGIC and total == len(buffer), "VerifiedBatch", magic, total, len(buffer))
    released, overwritten = reader.int64s(num_released), reader.int64s(num_overwritten)
    records = list(reader.records(_REQUEST, num_requests))
    requests = tuple(_read_request(record, reader) for record in records)
    reader.finish()
    if block_size < 0:
        raise ValueError(f"message names a cache block of {block_size} positions")
    if not 0 <= least < 1:
        raise ValueError(f"message names a probability of {least}")
    return VerifiedBatch(step, requests, released, overwritten, block_size, _read_choice(*round_shape), least)


def draft_bytes(batch: DraftBatch) -> int:
    """Exact size of the encoded message."""
    return _DRAFT_HEADER.size + sum(_DRAFT.size + _aligned(4 * len(d.tokens)) for d in batch.drafts)


def encode_draft(batch: DraftBatch, buffer: memoryview) -> None:
    """Write ``batch`` into ``buffer`` of ``draft_bytes(batch)`` bytes."""
    _DRAFT_HEADER.pack_into(buffer, 0, _DRAFT_MAGIC, len(buffer), batch.step, len(batch.drafts))
    at = _DRAFT_HEADER.size
    for draft in batch.drafts:
        _DRAFT.pack_into(buffer, at, draft.slot, int(draft.origin), len(draft.tokens), draft.num_missing)
        at += _DRAFT.size
    for draft in batch.drafts:
        struct.pack_into(f"={len(draft.tokens)}i", buffer, at, *draft.tokens)
        at += _aligned(4 * len(draft.tokens))


def decode_draft(buffer: memoryview) -> DraftBatch:
    """The message in ``buffer``. Raises ValueError when it is not a whole, well-formed one."""
    reader = _Reader(buffer)
    magic, total, step, num_drafts = reader.fields(_DRAFT_HEADER)
    _check_header(magic == _DRAFT_MAGIC and total == len(buffer), "DraftBatch", magic, total, len(buffer))
    records = list(reader.records(_DRAFT, num_drafts))
    drafts = tuple(
        Draft(slot, reader.int32s(length), Origin(origin), missing) for slot, origin, length, missing in records
    )
    reader.finish()
    return DraftBatch(step=step, drafts=drafts)


def _request_fields(request: Verified) -> tuple[int, ...]:
    tokens, states = request.tokens, request.states
    if tokens.dtype != torch.int32 or tokens.dim() != 1:
        raise ValueError(f"tokens must be [num_tokens] int32, got {tuple(tokens.shape)} {tokens.dtype}")
    if states.dtype not in DTYPES or states.dim() != 2:
        raise ValueError(f"states must be [num_states, width] of {DTYPES}, got {tuple(states.shape)} {states.dtype}")
    return (
        request.slot,
        request.token_start,
        tokens.shape[0],
        request.state_start,
        states.shape[0],
        states.shape[1],
        DTYPES.index(states.dtype),
        request.num_accepted,
        request.num_verified,
        request.max_draft_tokens,
        _WANTS_DRAFT * request.wants_draft | _RESET * request.reset,
        request.first_block,
        len(request.block_ids),
    )


def _read_request(record: tuple[int, ...], reader: _Reader) -> Verified:
    (slot, token_start, num_tokens, state_start, num_states, width, dtype, *counts, flags, first_block, num_blocks) = (
        record
    )
    accepted, verified, room = counts
    if min(slot, token_start, state_start, verified) < 0:
        raise ValueError(f"message names a negative slot, position or count: {record}")
    if not 0 <= dtype < len(DTYPES):
        raise ValueError(f"message names state dtype {dtype}, known are 0..{len(DTYPES) - 1}")
    return Verified(
        slot=slot,
        token_start=token_start,
        tokens=reader.tensor(torch.int32, (num_tokens,)),
        state_start=state_start,
        states=reader.tensor(DTYPES[dtype], (num_states, width)),
        num_accepted=accepted,
        num_verified=verified,
        wants_draft=bool(flags & _WANTS_DRAFT),
        max_draft_tokens=room,
        reset=bool(flags & _RESET),
        first_block=first_block,
        block_ids=reader.int64s(num_blocks),
    )


def _read_choice(gamma: int, outcomes: int, passes: int, refreshes: int, refined: int) -> RoundChoice | None:
    choice = RoundChoice(gamma, outcomes, passes, refreshes, refined)
    if choice == _NO_CHOICE:
        return None
    possible = 0 <= gamma <= MAX_DRAFT_TOKENS and 0 <= outcomes <= MAX_OUTCOMES and 1 <= refined <= MAX_OUTCOMES
    if not possible or not (0 <= passes <= MAX_PASSES and 0 <= refreshes <= passes + 1):
        raise ValueError(f"message names an impossible round: {tuple(choice)}")
    return choice


def _put(tensor: torch.Tensor, buffer: memoryview, at: int) -> int:
    """Copy ``tensor`` to ``buffer[at:]``; returns where the next array starts."""
    if tensor.numel():
        torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape).copy_(tensor)
    return at + _aligned(tensor.numel() * tensor.element_size())


def _put_int64s(values: tuple[int, ...], buffer: memoryview, at: int) -> int:
    """Write ``values`` to ``buffer[at:]``; returns where the next array starts."""
    struct.pack_into(f"={len(values)}q", buffer, at, *values)
    return at + _INT64 * len(values)


def _check_header(right: bool, what: str, magic: int, total: int, given: int) -> None:
    if not right:
        raise ValueError(f"not a {what} message: magic {magic:#x}, says {total} bytes, has {given}")


class _Reader:
    """Walks a buffer from front to back and never past its end."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._at = 0

    def _take(self, num_bytes: int) -> int:
        start, end = self._at, self._at + _aligned(num_bytes)
        if num_bytes < 0 or end > len(self._buffer):
            raise ValueError(f"message cut short: wants {num_bytes} bytes at {start}, has {len(self._buffer)}")
        self._at = end
        return start

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._buffer, self._take(layout.size))

    def records(self, layout: struct.Struct, count: int) -> Iterator[tuple[int, ...]]:
        start = self._take(count * layout.size)
        return layout.iter_unpack(self._buffer[start : self._at])

    def int64s(self, count: int) -> tuple[int, ...]:
        return struct.unpack_from(f"={count}q", self._buffer, self._take(_INT64 * count))

    def int32s(self, count: int) -> tuple[int, ...]:
        return struct.unpack_from(f"={count}i", self._buffer, self._take(4 * count))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        # An empty tensor takes no bytes, whatever its other size says: that is bounded here.
        if min(shape) < 0 or shape[0] > len(self._buffer) or max(shape[1:], default=0) > MAX_WIDTH:
            raise ValueError(f"message names impossible sizes {shape}")
        count = math.prod(shape)
        start = self._take(count * dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=start).view(shape).clone()

    def finish(self) -> None:
        if self._at != len(self._buffer):
            raise ValueError(f"message has {len(self._buffer) - self._at} bytes too many")
