"""A target and its requests: one round after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_jetspecpp.evaluation.pipeline_simulator.draft_device import DRAFT_ROUND, FALLBACK, DraftDevice, Job
from vllm_jetspecpp.evaluation.pipeline_simulator.events import EventLoop, Timeline
from vllm_jetspecpp.evaluation.pipeline_simulator.setup import Method, Setup


class Outcomes:
    """Draws how verifications of one target end."""

    def __init__(self, setup: Setup, seed: Sequence[int]) -> None:
        self._random = np.random.default_rng(list(seed))
        acceptance = setup.acceptance
        self._upto = [law.cumulative for law in (acceptance.after_miss, acceptance.after_hit)]
        self._foreseen = np.array(acceptance.foreseen)
        self._hits = np.zeros(setup.batch_size, dtype=bool)  # the first block of a request is a fallback block

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens committed and whether the outcome was foreseen, of every request; [batch_size] int64 and bool."""
        length, foresight = self._random.random((2, len(self._hits)))
        after_miss, after_hit = (np.searchsorted(upto, length, side="right") for upto in self._upto)
        index = np.where(self._hits, after_hit, after_miss)
        self._hits = foresight < self._foreseen[index]
        return index + 1, self._hits

    def all_missed(self) -> None:
        """Nothing was pre-drafted after all."""
        self._hits = np.zeros_like(self._hits)


@dataclass
class Rounds:
    """What one target went through; one entry a round."""

    ends: list[float] = field(default_factory=list)
    """When the next verification could begin."""
    verified: list[float] = field(default_factory=list)
    """When verification was over."""
    tokens: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    """Requests whose outcome was foreseen."""


class Target:
    """One target and its requests, round after round."""

    def __init__(
        self, number: int, setup: Setup, loop: EventLoop, timeline: Timeline, device: DraftDevice | None, seed: int
    ) -> None:
        self.rounds = Rounds()
        self._number, self._setup, self._loop = number, setup, loop
        self._timeline, self._device = timeline, device
        self._outcomes = Outcomes(setup, (seed, number))
        self._job: Job | None = None
        self._waiting_for_draft = self._waiting_for_verify = False

    def begin(self) -> None:
        """Start verifying; the draft round of these blocks starts with it."""
        setup, loop = self._setup, self._loop
        plain = setup.method is Method.PLAIN
        cost = setup.costs.plain(setup.batch_size) if plain else setup.costs.verify(setup.batch_size)
        self._show("verify", cost)
        self._waiting_for_verify = True
        loop.after(cost, self._verified)
        if self._device is not None:
            self._waiting_for_draft = True
            self._job = Job(DRAFT_ROUND, self._number, setup.batch_size, self._drafted, loop.now)
            self._device.submit(self._job)

    def _verified(self) -> None:
        self._waiting_for_verify = False
        self.rounds.verified.append(self._loop.now)
        device, setup = self._device, self._setup
        if device is None:
            self._draft_in_line()
            return
        if setup.drop_queued and self._job is not None and device.cancel(self._job):
            self._waiting_for_draft, self._job = False, None
        self._answer_if_ready()

    def _draft_in_line(self) -> None:
        setup = self._setup
        if setup.method is Method.PLAIN:
            self._end(setup.batch_size, 0)
            return
        tokens, _ = self._outcomes.draw()
        self._outcomes.all_missed()
        cost = setup.costs.inline_draft(setup.batch_size)
        self._show("draft in line", cost)
        self._loop.after(cost, lambda: self._end(int(tokens.sum()), 0))

    def _drafted(self) -> None:
        self._waiting_for_draft = False
        self._answer_if_ready()

    def _answer_if_ready(self) -> None:
        if self._waiting_for_draft or self._waiting_for_verify:
            return
        tokens, hits = self._outcomes.draw()
        if self._job is None:
            self._outcomes.all_missed()
            hits = np.zeros_like(hits)
        total, num_hits = int(tokens.sum()), int(hits.sum())
        comm = self._setup.costs.comm_ms
        self._show("answer", comm)
        self._loop.after(comm, lambda: self._answered(total, num_hits))

    def _answered(self, tokens: int, hits: int) -> None:
        missed = self._setup.batch_size - hits
        if not missed:
            self._end(tokens, hits)
            return
        assert self._device is not None
        job = Job(FALLBACK, self._number, missed, lambda: self._end(tokens, hits), self._loop.now)
        self._device.submit(job)

    def _end(self, tokens: int, hits: int) -> None:
        self.rounds.ends.append(self._loop.now)
        self.rounds.tokens.append(tokens)
        self.rounds.hits.append(hits)
        step = self._setup.costs.step_ms
        self._show("step", step)
        self._loop.after(step, self.begin)

    def _show(self, kind: str, length: float) -> None:
        now = self._loop.now
        self._timeline.add(f"target {self._number}", kind, now, now + length, self._number)
