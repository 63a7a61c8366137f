"""Damaged bytes, seeded: only ValueError comes out, and no more memory is asked for than a message may hold."""

import random
import resource
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.transport.test_codec import BATCHES, encoded
from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, VerifiedBatch
from vllm_jetspecpp.transport.ring import CONTROL_BYTES, LINE, Ring
from vllm_jetspecpp.types import Origin

DRAFTS = (
    DraftBatch(0),
    DraftBatch(12, (Draft(1, (5, 6, 7), Origin.HIT), Draft(2, (49151,), Origin.FALLBACK), Draft(3, (), Origin.NONE))),
)
HUGE = (-1, -(1 << 63), 1 << 20, 1 << 31, (1 << 32) + 1, 1 << 40, 1 << 60, 1 << 61, 1 << 62, (1 << 63) - 1)
SPARE_BYTES = 64 << 20


@contextmanager
def bounded_memory():
    """This process may not grow by more than SPARE_BYTES of address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def encoded_draft(batch):
    buffer = memoryview(bytearray(codec.draft_bytes(batch)))
    codec.encode_draft(batch, buffer)
    return buffer


MESSAGES = [
    *((codec.decode_verified, bytes(encoded(batch))) for batch in BATCHES.values()),
    *((codec.decode_draft, bytes(encoded_draft(batch))) for batch in DRAFTS),
]


def decode(decoder, data):
    """Whether ``data`` was a message. What it gives is never larger than what came."""
    try:
        batch = decoder(memoryview(bytearray(data)))
    except ValueError:
        return False
    if isinstance(batch, VerifiedBatch):
        held = sum(r.tokens.nbytes + r.states.nbytes for r in batch.requests)
        assert all(len(r.states) <= len(data) for r in batch.requests), "a loop over rows ends"
    else:
        held = sum(4 * len(d.tokens) for d in batch.drafts)
    assert held <= len(data)
    return True


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_damaged_messages(number):
    decoder, data = MESSAGES[number]
    rng = random.Random(number)
    assert decode(decoder, data)
    with bounded_memory():
        for size in {*range(0, min(len(data), 400)), *rng.sample(range(len(data)), min(len(data), 100))}:
            assert not decode(decoder, data[:size]), "cut short"
        assert not decode(decoder, data + bytes(8)), "too long"
        for _ in range(600):  # flips of bits
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            decode(decoder, damaged)
        for _ in range(600):  # numbers that cannot be, where numbers stand
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 3))):
                at = 8 * rng.randrange(min(len(data) // 8, 60))
                struct.pack_into("=q", damaged, at, rng.choice(HUGE))
            decode(decoder, damaged)


@pytest.mark.parametrize("decoder", [codec.decode_verified, codec.decode_draft])
def test_random_bytes_behind_a_right_header(decoder):
    rng = random.Random(7)
    magic = codec._VERIFIED_MAGIC if decoder is codec.decode_verified else codec._DRAFT_MAGIC
    with bounded_memory():
        for _ in range(2000):
            size = 8 * rng.randrange(2, 60)
            small = (rng.choice((0, 1, 2, 3, rng.getrandbits(63))) for _ in range(size // 8 - 2))
            decode(decoder, struct.pack(f"={size // 8}q", magic, size, *small))


@pytest.mark.parametrize("shape", [(0, 1 << 62), (1 << 62, 0), (1 << 31, 1 << 32), (1 << 40, 0)])
def test_sizes_whose_product_is_small_or_overflows(shape):
    """0 states of 2^62 numbers take no bytes, nor do 2^62 states of none; 2^31 times 2^32 is 2^63."""
    buffer = encoded(VerifiedBatch(1, BATCHES["no states"].requests))
    fields = buffer.cast("q")
    at = codec._VERIFIED_HEADER.size // 8
    assert (fields[at + 4], fields[at + 5]) == (0, 5)
    fields[at + 4], fields[at + 5] = shape
    with pytest.raises(ValueError, match="impossible sizes"):
        codec.decode_verified(buffer)


def test_damaged_rings():
    """Whatever stands in the shared words, both ends see ValueError, TimeoutError or a record of no harm."""
    rng = random.Random(3)
    capacity = 16 * LINE
    outcomes = set()
    for _ in range(3000):
        control, data = torch.zeros(CONTROL_BYTES, dtype=torch.uint8), torch.zeros(capacity, dtype=torch.uint8)
        memory = [memoryview(tensor.numpy()) for tensor in (control, data)]
        ring = Ring(*memory, lambda: True, 0.0)
        ring.reserve(100, 0.0).release()
        ring.commit()
        words = rng.choice(((ring._control, 0), (ring._control, LINE // 8), (ring._lengths, 0)))
        words[0][words[1]] = rng.choice((*HUGE, 8, 64, 65, 128, 192, 1024, 4096, -64))
        for use in (reserve, read):
            try:
                use(ring)
                outcomes.add("record")
            except (ValueError, TimeoutError) as error:
                outcomes.add(type(error).__name__)
    assert outcomes == {"record", "ValueError", "TimeoutError"}


def reserve(ring):
    assert len(ring.reserve(200, 0.0)) == 200


def read(ring):
    assert ring.wait(0.0) in (True, False)
    record = ring.peek()
    assert len(record) <= ring.max_record
    ring.consume()
