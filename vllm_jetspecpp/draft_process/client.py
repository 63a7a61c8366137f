"""The worker's end of drafting: what the vLLM plugin talks to. It imports neither Ray nor an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from vllm_jetspecpp.config import TRANSPORTS, EngineConfig, check_choice, resolve_class
from vllm_jetspecpp.draft_process.placement import PlacementConfig
from vllm_jetspecpp.draft_process.supervisor import PATIENCE, Supervisor
from vllm_jetspecpp.transport.base import ProcessWorkerEnd, WorkerEnd
from vllm_jetspecpp.transport.local import LocalEnd
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch
from vllm_jetspecpp.transport.processes import SHARED_MEMORY


@dataclass
class ClientStats:
    """What a client saw since it was made."""

    exposed_seconds: float = 0.0
    """Time spent waiting for answers: drafting that verification did not hide."""
    replies: int = 0
    timeouts: int = 0
    """Answers that did not come in time; each costs the draft process its life."""
    restarts: int = 0


class DraftClient(Protocol):
    """Order of calls in a step: ``ready`` (and send all again if ``generation`` changed), ``send``, ``receive``."""

    @property
    def generation(self) -> int:
        """0 before the first draft process, then one more for each. It changes in ``ready`` alone."""

    @property
    def stats(self) -> ClientStats:
        """Counters, up to date."""

    @property
    def alive(self) -> bool:
        """Whether a draft process runs now, known without a step; for other threads than the worker's too."""

    def ready(self) -> bool:
        """Whether there is a draft process now. One that has just started knows nothing: see ``generation``."""

    def send(self, batch: VerifiedBatch) -> bool:
        """Hand over a step; False when there is no draft process at present."""

    def receive(self) -> DraftBatch | None:
        """The answer to the last batch sent; None if it wanted none, or none came in time."""

    def wait_started(self, timeout: float | None = None) -> None:
        """Return when the first draft process is ready; raises when its start fails. For the server's start only."""

    def close(self) -> None:
        """End the draft process; may be called twice."""


class LocalDraftClient:
    """The engine in this process; it answers while it is asked. What the engine raises comes out of ``send``."""

    def __init__(self, engine: EngineConfig) -> None:
        self._end: WorkerEnd = LocalEnd(resolve_class(engine.engine, "engine")(engine))
        self._awaited: int | None = None
        self.generation = 1
        self.alive = True
        self.stats = ClientStats()

    def ready(self) -> bool:
        """Always."""
        return True

    def send(self, batch: VerifiedBatch) -> bool:
        """Answer and work now; counted as exposed time."""
        began = time.perf_counter()
        self._end.send(batch)
        self._awaited = batch.step if batch.wants_reply else None
        self.stats.exposed_seconds += time.perf_counter() - began
        return True

    def receive(self) -> DraftBatch | None:
        """See :class:`DraftClient`."""
        if self._awaited is None:
            return None
        step, self._awaited = self._awaited, None
        self.stats.replies += 1
        return self._end.receive(step, 0.0)

    def wait_started(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to end."""


class RayDraftClient:
    """A draft process placed by Ray, reached through a transport between processes.

    At run time nothing here raises, and no call blocks longer than ``reply_timeout`` seconds: a draft process that is
    dead, or silent for that long, is replaced in the background, and until then drafts are None.
    """

    def __init__(
        self,
        engine: EngineConfig,
        placement: PlacementConfig,
        transport: str,
        reply_timeout: float,
        start_timeout: float,
    ) -> None:
        self._reply_timeout = reply_timeout
        self._start_timeout = start_timeout
        self._end: ProcessWorkerEnd | None = None
        self._awaited: int | None = None
        self._stats = ClientStats()
        self._supervisor = Supervisor(engine, placement, transport, reply_timeout, start_timeout)
        self.generation = 0

    @property
    def stats(self) -> ClientStats:
        """See :class:`DraftClient`."""
        self._stats.restarts = self._supervisor.restarts
        return self._stats

    @property
    def alive(self) -> bool:
        """See :class:`DraftClient`."""
        return self._supervisor.alive

    def wait_started(self, timeout: float | None = None) -> None:
        """See :class:`DraftClient`; without a ``timeout`` (seconds) until the start succeeded or failed.

        Raises:
            DraftProcessError: the first start failed; the message has the engine's own error.
            TimeoutError: it takes too long.
        """
        self._supervisor.wait_started(self._start_timeout + 2 * PATIENCE if timeout is None else timeout)

    def ready(self) -> bool:
        """See :class:`DraftClient`."""
        new = self._supervisor.take()
        if new is not None:
            self._drop()
            self._end = new
            self.generation += 1
        return self._end is not None

    def send(self, batch: VerifiedBatch) -> bool:
        """See :class:`DraftClient`."""
        self._awaited = None
        if self._end is None:
            return False
        try:
            self._end.send(batch)
        except (OSError, ValueError) as error:  # TransportClosed and TimeoutError are OSErrors
            self._fail(error)
            return False
        self._awaited = batch.step if batch.wants_reply else None
        return True

    def receive(self) -> DraftBatch | None:
        """See :class:`DraftClient`."""
        if self._end is None or self._awaited is None:
            return None
        step, self._awaited = self._awaited, None
        began = time.perf_counter()
        try:
            reply = self._end.receive(step, self._reply_timeout)
        except (OSError, ValueError) as error:
            self._fail(error)
            return None
        finally:
            self._stats.exposed_seconds += time.perf_counter() - began
        self._stats.replies += 1
        return reply

    def _fail(self, error: Exception) -> None:
        """Forget the connection and have the process replaced; the supervisor logs the one warning."""
        assert self._end is not None
        if isinstance(error, TimeoutError):
            self._stats.timeouts += 1
        self._supervisor.give_up(self._end, str(error))
        self._drop()

    def _drop(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def close(self) -> None:
        """See :class:`DraftClient`; returns when no process of the draft side is left."""
        self._drop()
        self._supervisor.close()


def make_client(
    engine: EngineConfig, placement: PlacementConfig, transport: str, reply_timeout: float, start_timeout: float
) -> DraftClient:
    """Start a draft process in the background (in this process for ``local``) and return its client.

    Args:
        transport: ``shared_memory``, ``tcp`` or ``local``.
        reply_timeout: seconds after which a draft process that does not answer is taken for hung.
        start_timeout: seconds it may take to start: Ray, weights, compilation.

    Raises:
        ValueError: an unknown transport, or an option that cannot be.
    """
    check_choice("transport", transport, TRANSPORTS)
    if transport == "local":
        return LocalDraftClient(engine)
    if transport == SHARED_MEMORY and placement.any_node:
        raise ValueError("transport 'shared_memory' ends at this host: a draft process on any node needs 'tcp'")
    return RayDraftClient(engine, placement, transport, reply_timeout, start_timeout)
