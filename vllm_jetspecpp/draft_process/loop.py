"""What the draft process does all day: answer first, work after."""

from __future__ import annotations

import logging
import threading

from vllm_jetspecpp.runtime.base import Engine
from vllm_jetspecpp.transport.base import DraftEnd, TransportClosed

logger = logging.getLogger(__name__)

_LOOK_AT_STOP = 0.5
"""Seconds between two looks at ``stop`` while no message comes."""


def run_loop(engine: Engine, end: DraftEnd, stop: threading.Event) -> None:
    """Serve until ``stop`` is set or the worker is gone; then return.

    What the engine raises is logged and raised again: after it nobody knows what the caches hold, so the process is to
    end and to be started afresh.
    """
    while not stop.is_set():
        try:
            batch = end.receive(_LOOK_AT_STOP)
        except TransportClosed:
            return
        if batch is None:
            continue
        try:
            answer = engine.answer(batch)
            if batch.wants_reply:
                end.send(answer)
            engine.work()
        except TransportClosed:
            return
        except Exception:
            logger.exception("the draft engine failed at step %d", batch.step)
            raise
