"""The transports between two processes, by name: the worker's end, the keeper's part, the draft process's end."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from vllm_jetspecpp.config import check_choice
from vllm_jetspecpp.transport.base import DraftEnd, ProcessWorkerEnd
from vllm_jetspecpp.transport.shared_memory import SharedMemoryDraftEnd, SharedMemoryHandle, SharedMemoryWorkerEnd
from vllm_jetspecpp.transport.tcp import TcpDraftEnd, TcpHandle, TcpListener, TcpWorkerEnd

SHARED_MEMORY, TCP = "shared_memory", "tcp"
BETWEEN_PROCESSES = (SHARED_MEMORY, TCP)


def make_worker_end(transport: str, send_timeout: float) -> ProcessWorkerEnd:
    """The worker's end; ``send_timeout`` in seconds, see :class:`~vllm_jetspecpp.transport.base.WorkerEnd`."""
    check_choice("transport", transport, BETWEEN_PROCESSES)
    if transport == TCP:
        return TcpWorkerEnd(send_timeout=send_timeout)
    return SharedMemoryWorkerEnd(send_timeout=send_timeout)


def publish(transport: str, handle: dict[str, Any], host: str) -> dict[str, Any]:
    """In the keeper: the handle for the draft process, from the fields of the worker's.

    With TCP it begins to listen on ``host``, an IPv4 address of this machine; the inherited descriptor is closed.
    """
    if transport != TCP:
        return handle
    listener = TcpListener(**handle)
    try:
        return asdict(listener.listen(host))
    finally:
        os.close(listener.fd)


def make_draft_end(transport: str, handle: dict[str, Any]) -> DraftEnd:
    """The draft process's end, attached.

    Raises:
        TransportClosed: the worker is gone.
        ValueError: what is found there is not the worker's.
    """
    if transport == TCP:
        return TcpDraftEnd(TcpHandle(**handle))
    return SharedMemoryDraftEnd(SharedMemoryHandle(**handle))
