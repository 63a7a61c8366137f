"""Both ends of a transport in two real processes, for the tests of each of them."""

import dataclasses
import multiprocessing
import os
import time
from contextlib import contextmanager
from threading import Thread

import torch

from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, Verified
from vllm_jetspecpp.transport.processes import make_draft_end
from vllm_jetspecpp.transport.shared_memory import SharedMemoryWorkerEnd
from vllm_jetspecpp.transport.tcp import TcpWorkerEnd
from vllm_jetspecpp.types import Origin

LOOPBACK = "127.0.0.1"
SAW_THE_END = 17
"""Exit code of a draft process that noticed that its worker is gone."""


def verified(slot, tokens, states, **fields):
    return Verified(slot, 0, torch.tensor(tokens, dtype=torch.int32), 0, states, wants_draft=True, **fields)


def checksum(states):
    return int(states.float().sum())


def echo(transport, handle):
    """Drafts (states received so far, their sum, last token); a token of -1 is answered late, with -2 first."""
    torch.set_num_threads(1)
    end = make_draft_end(transport, handle)
    rows = total = 0
    while True:
        try:
            batch = end.receive(1.0)
        except TransportClosed:
            os._exit(SAW_THE_END)
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


def attach_only(transport, handle):
    end = make_draft_end(transport, handle)
    time.sleep(60)
    end.close()


def make_worker(transport, **options):
    """A worker's end, and the fields of the handle that its draft process attaches with."""
    if transport == "tcp":
        end = TcpWorkerEnd(**options)
        return end, dataclasses.asdict(end.handle.listen(LOOPBACK))
    end = SharedMemoryWorkerEnd(**options)
    return end, dataclasses.asdict(end.handle)


@contextmanager
def connected(transport, target=echo, **options):
    end, handle = make_worker(transport, **options)
    process = multiprocessing.get_context("spawn").Process(target=target, args=(transport, handle), daemon=True)
    process.start()
    try:
        wait_attached(end, process.is_alive)
        yield end, process
    finally:
        process.kill()
        process.join()
        end.close()


def attach_here(transport, end, handle):
    """A draft end in this process, attached to ``end``."""
    made = []
    thread = Thread(target=lambda: made.append(make_draft_end(transport, handle)))
    thread.start()
    wait_attached(end)
    thread.join()
    return made[0]


def wait_attached(end, alive=lambda: True, seconds=60):
    deadline = time.monotonic() + seconds
    while not end.attached:
        assert time.monotonic() < deadline and alive(), "the other process did not attach"
        time.sleep(0.01)
