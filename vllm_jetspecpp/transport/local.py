"""Both ends in one process: drafting is not hidden behind verification. For tests and for debugging an engine."""

from __future__ import annotations

from vllm_jetspecpp.runtime.base import Engine
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch


class LocalEnd:
    """A worker's end that runs the engine itself, in ``send``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reply: DraftBatch | None = None

    def send(self, batch: VerifiedBatch) -> None:
        """Answer, then work; whatever the engine raises comes out here."""
        answer = self._engine.answer(batch)
        self._reply = answer if batch.wants_reply else None
        self._engine.work()

    def receive(self, step: int, timeout: float) -> DraftBatch:
        """The answer to message ``step``. Raises TimeoutError at once when there is none: nothing else can come."""
        if self._reply is None or self._reply.step != step:
            raise TimeoutError(f"no answer to step {step}: the last message wanted none, or was another step")
        return self._reply

    def close(self) -> None:
        """Nothing to free."""
