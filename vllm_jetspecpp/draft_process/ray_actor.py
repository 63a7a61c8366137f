"""The draft process itself: a Ray actor with one long-running method. Data goes through a transport, not Ray."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

logger = logging.getLogger(__name__)


class DraftActor:
    """Made an actor by ``keeper.py``, with two threads: one for ``serve``, one so that ``whereabouts`` always answers.

    torch and the engine are imported in ``serve``, after the process has its cores.
    """

    def whereabouts(self) -> tuple[str, int]:
        """Ray's id of the node, and the process id there; also the sign of life."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def serve(self, engine: dict[str, Any], transport: str, handle: dict[str, Any], cores: list[int] | None) -> None:
        """Build the engine, attach to the worker (which tells it that drafting begins), serve until the worker leaves.

        Engine and loop share this thread, since torch keeps its number of threads and its modes per thread.

        Args:
            engine: fields of an ``EngineConfig``.
            transport: one between processes.
            handle: what ``transport.processes.publish`` made.
            cores: CPU cores of this machine to run on; None: any.

        Raises:
            ValueError: the engine class cannot be found, or a core; and whatever the engine raises.
        """
        _take_cores(cores)
        import torch

        from vllm_jetspecpp.config import EngineConfig, RoundConfig, resolve_class
        from vllm_jetspecpp.draft_process.loop import run_loop
        from vllm_jetspecpp.tracing.draft_hooks import trace_draft_process
        from vllm_jetspecpp.transport.processes import make_draft_end

        config = EngineConfig(**{**engine, "round": RoundConfig(**engine["round"])})
        torch.set_num_threads(config.num_threads)
        drafter = resolve_class(config.engine, "engine")(config)
        end = make_draft_end(transport, handle)
        recorder = trace_draft_process(drafter, end, config, os.getpid())
        try:
            run_loop(drafter, end, threading.Event())
        finally:
            if recorder is not None:
                recorder.close()
            end.close()


def _take_cores(cores: list[int] | None) -> None:
    """Pin every thread of this process, Ray's too, and undo the low priority Ray gives its workers."""
    known = os.cpu_count() or 1
    if cores is not None and cores[-1] >= known:
        raise ValueError(f"draft_cores must name cores from 0 to {known - 1} on the draft process's node, got {cores}")
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), range(known) if cores is None else cores)
        try:
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)
        except PermissionError:
            logger.warning("the draft process runs at Ray's low priority (RAY_worker_niceness): no right to raise it")
            return
