"""A draft engine that fails on order, in a draft process of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines import EchoEngine
from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.transport import codec, ring, shared_memory
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch

MORE_MEMORY = 256 << 20
"""Bytes that the fault ``memory`` may still allocate."""
FULL = "the engine has filled its memory"
FAILED = "the engine failed on order"


def order(sequences: Path, fault: str, when: str, seconds: float = 0.0) -> None:
    """Have the engine that reads ``sequences`` commit a fault at its next ``start``, ``prefill`` or ``decode``."""
    orders = orders_file(sequences)
    new = orders.with_suffix(".new")
    new.write_text(json.dumps({"fault": fault, "when": when, "seconds": seconds}))
    new.rename(orders)


def orders_file(sequences: str | Path) -> Path:
    """Gone once the orders have been carried out."""
    return Path(f"{sequences}.orders")


class FaultyEngine(EchoEngine):
    """Drafts what is right until it is ordered otherwise; the order is used up before it is followed."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._follow("start")

    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        answer = super().answer(batch)
        if any(not request.wants_draft for request in batch.requests):
            self._follow("prefill")
        elif any(request.num_accepted >= 0 for request in batch.requests):
            self._follow("decode")
        return answer

    def _follow(self, moment: str) -> None:
        orders = orders_file(self.config.checkpoint)
        try:
            wanted = json.loads(orders.read_text())
        except FileNotFoundError:
            return
        if wanted["when"] == moment:
            orders.unlink()
            FAULTS[wanted["fault"]](wanted)


def fail(wanted: dict[str, Any]) -> None:
    raise RuntimeError(FAILED)


def fill_memory(wanted: dict[str, Any]) -> None:
    """Until the kernel refuses more; the limit is this process's own."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, resource.RLIM_INFINITY))
    blocks = []
    try:
        while True:
            blocks.append(bytearray(1 << 20))
    except MemoryError:
        blocks.clear()
        raise MemoryError(FULL) from None


def lose_answer(wanted: dict[str, Any]) -> None:
    shared_memory.SharedMemoryDraftEnd.send = lambda self, batch: None  # type: ignore[method-assign]


def garble_answer(wanted: dict[str, Any]) -> None:
    codec.encode_draft = scribble  # type: ignore[assignment]


def garble_ring(wanted: dict[str, Any]) -> None:
    """The ring's own counters instead of what they count."""

    def commit(self: ring.Ring) -> None:
        self._control[0] = -(1 << 60) + 12345

    ring.Ring.commit = commit  # type: ignore[method-assign]


def scribble(message: object, buffer: memoryview) -> None:
    """Random bytes where a message should be."""
    buffer[:] = os.urandom(len(buffer))


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "kill": lambda wanted: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda wanted: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda wanted: time.sleep(wanted["seconds"]),
    "fail": fail,
    "memory": fill_memory,
    "lose answer": lose_answer,
    "garble answer": garble_answer,
    "garble ring": garble_ring,
}
