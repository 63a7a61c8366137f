"""The interface every transport implements, seen from both ends."""

from __future__ import annotations

from typing import Any, Protocol

from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch


class TransportClosed(ConnectionError):
    """The other end is gone: its process ended or it closed the connection."""


class WorkerEnd(Protocol):
    """The vLLM worker's end of a connection."""

    def send(self, batch: VerifiedBatch) -> None:
        """Hand over a message; returns as soon as it is written.

        Raises:
            TransportClosed: the draft process is gone.
            TimeoutError: it has not taken earlier messages for too long.
        """

    def receive(self, step: int, timeout: float) -> DraftBatch:
        """The answer to message ``step``; answers to earlier steps are dropped.

        Args:
            timeout: seconds.

        Raises:
            TransportClosed: the draft process is gone.
            TimeoutError: no answer in time.
        """

    def close(self) -> None:
        """Free everything this end holds; may be called twice."""


class ProcessWorkerEnd(WorkerEnd, Protocol):
    """A worker's end whose other end is in another process, which has still to be started."""

    @property
    def handle(self) -> Any:
        """A dataclass of plain values, from which the keeper makes what the draft process attaches with."""

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that the keeper is to inherit."""

    @property
    def attached(self) -> bool:
        """Whether the draft process has attached: it answers from now on. Never waits."""


class DraftEnd(Protocol):
    """The draft process's end of a connection."""

    def receive(self, timeout: float) -> VerifiedBatch | None:
        """The next message, or None after ``timeout`` seconds without one.

        Raises:
            TransportClosed: the worker is gone.
        """

    def send(self, batch: DraftBatch) -> None:
        """Answer. Raises TransportClosed when the worker is gone."""

    def close(self) -> None:
        """Free everything this end holds; may be called twice."""
