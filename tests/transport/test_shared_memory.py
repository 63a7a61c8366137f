"""Shared memory between two real processes."""

import dataclasses
import multiprocessing
import os
import signal
import statistics
import time
from contextlib import contextmanager

import pytest
import torch

from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, Verified, VerifiedBatch
from vllm_jetspecpp.transport.shared_memory import SharedMemoryDraftEnd, SharedMemoryWorkerEnd
from vllm_jetspecpp.types import Origin

PAGE = 4096


def verified(slot, tokens, states, **fields):
    return Verified(slot, 0, torch.tensor(tokens, dtype=torch.int32), 0, states, wants_draft=True, **fields)


def checksum(states):
    return int(states.float().sum())


def echo(handle):
    """Drafts (states received so far, their sum, last token); a token of -1 is answered late, with -2 first."""
    torch.set_num_threads(1)
    end = SharedMemoryDraftEnd(handle)
    rows = total = 0
    while True:
        try:
            batch = end.receive(1.0)
        except TransportClosed:
            os._exit(17)
        if batch is None:
            continue
        rows += sum(r.states.shape[0] for r in batch.requests)
        total += sum(checksum(r.states) for r in batch.requests)
        if batch.wants_reply:
            last = int(batch.requests[-1].tokens[-1])
            if last == -1:
                time.sleep(0.5)
            end.send(DraftBatch(batch.step, (Draft(batch.requests[-1].slot, (rows, total, last), Origin.HIT),)))
            rows = total = 0


def attach_only(handle):
    end = SharedMemoryDraftEnd(handle)
    time.sleep(60)
    end.close()


@contextmanager
def connected(target=echo, **options):
    end = SharedMemoryWorkerEnd(**options)
    process = multiprocessing.get_context("spawn").Process(target=target, args=(end.handle,), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + 30
        while not end.attached:
            assert time.monotonic() < deadline and process.is_alive(), "the other process did not attach"
            time.sleep(0.01)
        yield end, process
    finally:
        process.kill()
        process.join()
        end.close()


def test_round_trips_with_a_wrapping_ring():
    with connected(to_draft_bytes=4 * PAGE, to_worker_bytes=PAGE) as (end, process):
        times = []
        for step in range(500):
            states = torch.ones(step % 7, 64, dtype=torch.bfloat16)
            batch = VerifiedBatch(step, (verified(step % 5, [3, step], states),))
            began = time.perf_counter()
            end.send(batch)
            reply = end.receive(step, 5.0)
            times.append(time.perf_counter() - began)
            rows = step % 7
            assert reply == DraftBatch(step, (Draft(step % 5, (rows, rows * 64, step), Origin.HIT),))
        print(f"round trip: median {statistics.median(times) * 1e6:.0f} µs, p99 {sorted(times)[-5] * 1e6:.0f} µs")
        end.close()
        process.join(5)
        assert process.exitcode == 17  # the draft process saw the connection close


def test_a_message_larger_than_the_ring_arrives_in_pieces():
    with connected(to_draft_bytes=16 * PAGE) as (end, _):
        states = torch.ones(2000, 64, dtype=torch.bfloat16)  # 256 kB through a ring of 64 kB
        end.send(VerifiedBatch(1, (verified(0, list(range(2001)), states, reset=True),)))
        assert end.receive(1, 5.0).drafts[0].tokens == (2000, 2000 * 64, 2000)


def test_a_late_answer_is_not_taken_for_the_next():
    with connected() as (end, _):
        end.send(VerifiedBatch(1, (verified(0, [-1], torch.ones(1, 8)),)))
        with pytest.raises(TimeoutError, match="step 1"):
            end.receive(1, 0.05)
        end.send(VerifiedBatch(2, (verified(0, [8], torch.ones(2, 8)),)))
        assert end.receive(2, 5.0) == DraftBatch(2, (Draft(0, (2, 16, 8), Origin.HIT),))


def test_answers_come_after_both_ends_went_to_sleep():
    with connected(spin=0.0) as (end, _):
        for step in range(3):
            time.sleep(0.2)  # longer than any spin of the draft end
            end.send(VerifiedBatch(step, (verified(0, [step], torch.ones(1, 8)),)))
            began = time.perf_counter()
            assert end.receive(step, 5.0).step == step
            assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_worker_notices_a_dead_draft_process(stop):
    with connected(attach_only) as (end, process):
        end.send(VerifiedBatch(1, (verified(0, [1], torch.ones(1, 8)),)))
        os.kill(process.pid, stop)  # it stays a zombie: nobody waits for it here
        began = time.monotonic()
        with pytest.raises(TransportClosed):
            end.receive(1, 20.0)
        assert time.monotonic() - began < 2.0


def test_a_full_ring_is_a_timeout():
    batch = VerifiedBatch(1, (verified(0, list(range(2001)), torch.ones(2000, 64)),))
    with (
        connected(attach_only, to_draft_bytes=16 * PAGE, send_timeout=0.2) as (end, _),
        pytest.raises(TimeoutError, match="does not read"),
    ):
        end.send(batch)


def killed_worker(connection):
    end = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    connection.send(end.handle)
    time.sleep(60)


def test_draft_process_notices_a_killed_worker_and_nothing_is_left():
    before = set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    worker = context.Process(target=killed_worker, args=(its,), daemon=True)
    worker.start()
    handle = mine.recv()
    end = SharedMemoryDraftEnd(handle)
    assert end.receive(0.05) is None
    worker.kill()
    began = time.monotonic()
    with pytest.raises(TransportClosed):
        end.receive(20.0)
    assert time.monotonic() - began < 2.0
    end.close()
    worker.join()
    with pytest.raises(TransportClosed):
        SharedMemoryDraftEnd(handle)
    assert {n for n in set(os.listdir("/dev/shm")) - before if "jetspec" in n} == set()


@pytest.mark.parametrize("change", [{"nonce": 1}, {"to_draft_bytes": 2 * PAGE}])
def test_wrong_memory_is_refused(change):
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    with pytest.raises(ValueError, match="memory"):
        SharedMemoryDraftEnd(dataclasses.replace(worker.handle, **change))
    assert not worker.attached
    worker.close()


def test_a_damaged_ring_is_refused():
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    draft = SharedMemoryDraftEnd(worker.handle)
    worker.send(VerifiedBatch(1, (verified(0, [1], torch.ones(1, 8)),)))
    os.pwrite(worker.handle.fd, (1 << 40).to_bytes(8, "little"), PAGE)  # the length of the first record
    with pytest.raises(ValueError, match="damaged"):
        draft.receive(1.0)
    draft.close()
    worker.close()


def test_close_is_idempotent_and_frees_the_descriptor():
    descriptors = len(os.listdir("/proc/self/fd"))
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    draft = SharedMemoryDraftEnd(worker.handle)
    worker.close()
    worker.close()
    with pytest.raises(TransportClosed):
        draft.receive(1.0)
    with pytest.raises(TransportClosed):
        worker.receive(1, 0.0)
    draft.close()
    draft.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="multiple of"):
        SharedMemoryWorkerEnd(to_draft_bytes=1000)
