"""The draft process itself: a Ray actor with one long-running method. Data goes through shared memory, not Ray."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

logger = logging.getLogger(__name__)


class DraftActor:
    """Made an actor by ``keeper.py``, with two threads: one for ``serve``, one so that ``pid`` always answers.

    torch and the engine are imported in ``serve``, after the process has its cores.
    """

    def pid(self) -> int:
        """Process id; also the sign of life."""
        return os.getpid()

    def serve(self, engine: dict[str, Any], handle: dict[str, int], cores: list[int]) -> None:
        """Build the engine, attach to the worker (which tells it that drafting begins), serve until the worker leaves.

        Engine and loop share this thread, since torch keeps its number of threads and its modes per thread.

        Args:
            engine: fields of an ``EngineConfig``.
            handle: fields of a ``SharedMemoryHandle``.
            cores: CPU cores to run on.

        Raises:
            ValueError: the engine class cannot be found; and whatever the engine raises.
        """
        _take_cores(cores)
        import torch

        from vllm_jetspecpp.config import EngineConfig, RoundConfig, resolve_class
        from vllm_jetspecpp.draft_process.loop import run_loop
        from vllm_jetspecpp.transport.shared_memory import SharedMemoryDraftEnd, SharedMemoryHandle

        config = EngineConfig(**{**engine, "round": RoundConfig(**engine["round"])})
        torch.set_num_threads(config.num_threads)
        drafter = resolve_class(config.engine, "engine")(config)
        end = SharedMemoryDraftEnd(SharedMemoryHandle(**handle))
        try:
            run_loop(drafter, end, threading.Event())
        finally:
            end.close()


def _take_cores(cores: list[int]) -> None:
    """Pin every thread of this process, Ray's too, and undo the low priority Ray gives its workers."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
        try:
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)
        except PermissionError:
            logger.warning("the draft process runs at Ray's low priority (RAY_worker_niceness): no right to raise it")
            return
