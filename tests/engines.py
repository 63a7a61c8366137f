"""Engines for tests, plugged in with option ``draft_engine``: they draft what is known to come, or badly on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, Verified, VerifiedBatch
from vllm_jetspecpp.types import Origin


class EchoEngine:
    """Drafts the true continuation.

    ``config.checkpoint`` is a JSON file with a list of token lists, each a prompt with its continuation. It also keeps
    all it is told: ``history`` and ``states`` by slot, and every message.
    """

    last: EchoEngine | None = None
    """The engine of this process that was built last, for tests with transport ``local``."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.sequences: list[list[int]] = json.loads(Path(config.checkpoint).read_text())
        self.history: dict[int, list[int]] = {}
        self.states: dict[int, dict[int, torch.Tensor]] = {}
        self.messages: list[VerifiedBatch] = []
        self.works = 0
        EchoEngine.last = self

    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        self.messages.append(batch)
        for slot in batch.released:
            self.history.pop(slot, None)
        for request in batch.requests:
            self._take(request)
        return DraftBatch(batch.step, tuple(self.draft(r) for r in batch.requests if r.wants_draft))

    def work(self) -> None:
        self.works += 1

    def _take(self, request: Verified) -> None:
        if request.reset:
            self.history[request.slot], self.states[request.slot] = [], {}
        history = self.history[request.slot]
        assert request.token_start <= len(history), "tokens are missing"
        del history[request.token_start :]
        history += request.tokens.tolist()
        for i, row in enumerate(request.states):
            self.states[request.slot][request.state_start + i] = row.clone()

    def continuation(self, request: Verified) -> list[int]:
        """What the target will say next, as far as it is known; not cut to any length."""
        history = self.history[request.slot]
        for sequence in self.sequences:
            if sequence[: len(history)] == history:
                return sequence[len(history) :]
        return []

    def draft(self, request: Verified) -> Draft:
        limit = min(self.config.round.num_draft_tokens, request.max_draft_tokens)
        origin = Origin.FIRST if request.num_accepted < 0 else Origin.HIT
        return Draft(request.slot, tuple(self.continuation(request)[:limit]), origin)


class SwitchableEngine(EchoEngine):
    """Drafts as :attr:`mode` says: ``echo``, ``wrong``, ``mixed`` (right, then wrong) or ``garbage``."""

    mode = "echo"
    vocab_size = 128

    def draft(self, request: Verified) -> Draft:
        right = super().draft(request)
        if self.mode == "garbage":
            return self._garbage(right)
        wrong_from = {"echo": len(right.tokens), "wrong": 0, "mixed": sum(right.tokens) % 4}[self.mode]
        tokens = tuple(t if i < wrong_from else (t + 1) % self.vocab_size for i, t in enumerate(right.tokens))
        return Draft(right.slot, tokens, Origin.FALLBACK if self.mode == "mixed" else right.origin)

    def _garbage(self, right: Draft) -> Draft:
        kinds = (
            Draft(right.slot + 1, right.tokens, right.origin),
            Draft(10**6, right.tokens, right.origin),
            Draft(right.slot, right.tokens + (3,) * 500, right.origin),
            Draft(right.slot, (*right.tokens[:2], self.vocab_size, -1), right.origin),
            Draft(right.slot, (-1, 10**9), right.origin),
            Draft(right.slot, (), right.origin),
            Draft(right.slot, right.tokens, Origin.NONE),
        )
        return kinds[len(self.messages) % len(kinds)]


class ContinuingEngine(SwitchableEngine):
    """Knows answers without their prompts: it drafts what follows the committed end of one, 2 tokens at least."""

    def continuation(self, request: Verified) -> list[int]:
        history = self.history[request.slot]
        for answer in self.sequences:
            for length in range(len(answer), 1, -1):
                if history[-length:] == answer[:length]:
                    return answer[length:]
        return []


class RereadingEngine(SwitchableEngine):
    """Reads its file anew for each request: what a server in another process should draft may be said at any time."""

    mode = "mixed"

    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        if any(request.reset for request in batch.requests):
            self.sequences = json.loads(Path(self.config.checkpoint).read_text())
        return super().answer(batch)


class UniformEngine:
    """Drafts pseudo-random tokens of a vocabulary of :attr:`vocab_size`, the same in every run."""

    vocab_size = 16

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(0)

    def answer(self, batch: VerifiedBatch) -> DraftBatch:
        return DraftBatch(batch.step, tuple(self._draft(r) for r in batch.requests if r.wants_draft))

    def _draft(self, request: Verified) -> Draft:
        count = min(self.config.round.num_draft_tokens, request.max_draft_tokens)
        tokens = torch.randint(self.vocab_size, (count,), generator=self.generator)
        return Draft(request.slot, tuple(tokens.tolist()), Origin.FIRST)

    def work(self) -> None:
        pass
