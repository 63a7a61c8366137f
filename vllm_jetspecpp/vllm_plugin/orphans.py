"""Ends the engine of a server that was killed.

vLLM's engine core outlives an API server that died of SIGKILL, and with it worker, draft process and Ray would stay. So
the worker watches the server and then asks the engine core to end, which cleans up as after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from pathlib import Path

logger = logging.getLogger("vllm.jetspecpp")
ENGINE_CORE_TITLE = b"VLLM::EngineCore"
_GRACE = 15.0
"""Seconds that the engine core gets to end by itself."""


def watch_server() -> None:
    """Watch the process that started the engine core; does nothing where the engine runs in the user's own process."""
    core = find_engine_core(os.getpid())
    if core is None:
        return
    server = parent_of(core)
    with contextlib.suppress(OSError):  # it ended just now, and vLLM notices its children's end by itself
        descriptor = os.pidfd_open(server)
        threading.Thread(target=_wait, args=(descriptor, core), name="jetspecpp-orphans", daemon=True).start()


def find_engine_core(pid: int) -> int | None:
    """The engine core among a worker and its parent, by the title vLLM gives it; None when there is none."""
    return next((p for p in (pid, parent_of(pid)) if _title(p).startswith(ENGINE_CORE_TITLE)), None)


def parent_of(pid: int) -> int:
    """Parent's process id, 0 when there is no such process."""
    try:
        # The name, in parentheses, may hold anything; what follows it is state and parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _wait(server: int, core: int) -> None:
    poll = select.poll()
    poll.register(server, select.POLLIN)
    poll.poll()
    os.close(server)
    logger.warning("the server was killed: ending its engine")
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, sent)
        time.sleep(_GRACE)
