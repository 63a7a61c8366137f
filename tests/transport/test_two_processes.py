"""What every transport between two processes does, with two real ones."""

import multiprocessing
import os
import signal
import statistics
import time

import pytest
import torch

from tests.transport.ends import SAW_THE_END, attach_here, attach_only, connected, make_worker, verified, wait_attached
from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, VerifiedBatch
from vllm_jetspecpp.transport.processes import BETWEEN_PROCESSES, make_draft_end, make_worker_end
from vllm_jetspecpp.types import Origin

PAGE = 4096
SMALL = {
    "shared_memory": {"to_draft_bytes": 16 * PAGE},
    "tcp": {"max_bytes": 8 * PAGE},
}
"""Options with which a message of some 100 kB goes in pieces."""


@pytest.fixture(scope="module", params=BETWEEN_PROCESSES)
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def echoing(transport):
    """A worker's end whose draft process runs ``echo``, and notices in the end that it is closed."""
    with connected(transport, **SMALL[transport]) as (end, process):
        yield end
        end.close()
        process.join(20)
        assert process.exitcode == SAW_THE_END


def test_round_trips(echoing):
    """Also through a ring that wraps."""
    times = []
    for step in range(500):
        states = torch.ones(step % 7, 64, dtype=torch.bfloat16)
        batch = VerifiedBatch(step, (verified(step % 5, [3, step], states),))
        began = time.perf_counter()
        echoing.send(batch)
        reply = echoing.receive(step, 20.0)
        times.append(time.perf_counter() - began)
        rows = step % 7
        assert reply == DraftBatch(step, (Draft(step % 5, (rows, rows * 64, step), Origin.HIT),))
    print(f"round trip: median {statistics.median(times) * 1e6:.0f} µs, p99 {sorted(times)[-5] * 1e6:.0f} µs")


def test_a_large_message_arrives_in_pieces(echoing):
    states = torch.ones(2000, 64, dtype=torch.bfloat16)  # 256 kB
    echoing.send(VerifiedBatch(1001, (verified(0, list(range(2001)), states, reset=True),)))
    assert echoing.receive(1001, 20.0).drafts[0].tokens == (2000, 2000 * 64, 2000)


def test_a_late_answer_is_not_taken_for_the_next(echoing):
    echoing.send(VerifiedBatch(1002, (verified(0, [-1], torch.ones(1, 8)),)))
    with pytest.raises(TimeoutError, match="step 1002"):
        echoing.receive(1002, 0.05)
    echoing.send(VerifiedBatch(1003, (verified(0, [8], torch.ones(2, 8)),)))
    assert echoing.receive(1003, 20.0) == DraftBatch(1003, (Draft(0, (2, 16, 8), Origin.HIT),))


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_worker_notices_a_dead_draft_process(transport, stop):
    with connected(transport, attach_only) as (end, process):
        end.send(VerifiedBatch(1, (verified(0, [1], torch.ones(1, 8)),)))
        os.kill(process.pid, stop)  # it stays a zombie: nobody waits for it here
        began = time.monotonic()
        with pytest.raises(TransportClosed):
            end.receive(1, 60.0)
        assert time.monotonic() - began < 20.0


def test_a_peer_that_does_not_read_is_a_timeout(transport):
    batch = VerifiedBatch(1, (verified(0, list(range(4001)), torch.ones(4000, 2048)),))  # 32 MB: more than TCP buffers
    end, handle = make_worker(transport, **SMALL[transport], send_timeout=0.2)
    draft = attach_here(transport, end, handle)
    with pytest.raises(TimeoutError, match="does not read"):
        end.send(batch)
    draft.close()
    end.close()


def killed_worker(transport, connection):
    end, handle = make_worker(transport)
    connection.send(handle)
    wait_attached(end)
    time.sleep(60)


def test_draft_process_notices_a_killed_worker(transport):
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    worker = context.Process(target=killed_worker, args=(transport, its), daemon=True)
    worker.start()
    handle = mine.recv()
    end = make_draft_end(transport, handle)
    assert end.receive(0.05) is None
    worker.kill()
    began = time.monotonic()
    with pytest.raises(TransportClosed):
        end.receive(60.0)
    assert time.monotonic() - began < 20.0
    end.close()
    worker.join()
    with pytest.raises(TransportClosed):
        make_draft_end(transport, handle)


def test_closing_is_idempotent(transport):
    worker = make_worker_end(transport, 1.0)
    assert not worker.attached
    worker.close()
    worker.close()
    for use in (lambda: worker.receive(1, 0.0), lambda: worker.send(VerifiedBatch(1, ()))):
        with pytest.raises(TransportClosed):
            use()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'shared_memory', 'tcp', got 'pigeon'"):
        make_worker_end("pigeon", 1.0)
