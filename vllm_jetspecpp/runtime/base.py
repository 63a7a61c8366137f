"""What a draft process runs: the engine's interface, small enough to write another one."""

from __future__ import annotations

from typing import Protocol

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch


class Engine(Protocol):
    """Answers first, works after: ``answer`` is on the critical path, ``work`` runs while the target verifies.

    The loop of the draft process calls ``answer`` for every message and ``work`` after the answer is on its way.
    """

    def __init__(self, config: EngineConfig) -> None: ...

    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        """Drafts for every request of ``batch`` that wants one, in order; the same step number."""

    def work(self) -> None:
        """Everything that can wait until the answer is sent: commit states, foresee, pre-draft."""
