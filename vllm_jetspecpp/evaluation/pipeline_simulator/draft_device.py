"""A draft device and its queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_jetspecpp.evaluation.pipeline_simulator.events import EventLoop, Timeline
from vllm_jetspecpp.evaluation.pipeline_simulator.setup import Setup

DRAFT_ROUND, FALLBACK = "draft round", "fallback"


@dataclass(eq=False)
class Job:
    """Work for a draft device."""

    kind: str
    target: int
    num_requests: int
    done: Callable[[], None]
    submitted: float


@dataclass
class DraftDevice:
    """Serves one job, or one batch of jobs, at a time; first come, first served unless the setup says otherwise."""

    name: str
    loop: EventLoop
    setup: Setup
    timeline: Timeline
    queue: list[Job] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    """(start, end) of everything served."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(start, ms waited) of every job."""

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self.queue.append(job)
        self._serve()

    def cancel(self, job: Job) -> bool:
        """Take a job back; False when it runs already or is done."""
        if job not in self.queue:
            return False
        self.queue.remove(job)
        return True

    def _serve(self) -> None:
        if not self.queue or (self.busy and self.busy[-1][1] > self.loop.now):
            return
        jobs = self._next_jobs()
        count = sum(job.num_requests for job in jobs)
        cost = self.setup.costs.fallback(count) if jobs[0].kind == FALLBACK else self.setup.draft_round_ms(count)
        start, end = self.loop.now, self.loop.now + cost
        self.busy.append((start, end))
        for job in jobs:
            self.queue.remove(job)
            self.waits.append((start, start - job.submitted))
            self.timeline.add(self.name, job.kind, start, end, job.target)
        self.loop.after(cost, lambda: self._finish(jobs))

    def _next_jobs(self) -> list[Job]:
        first = self.queue[0]
        if self.setup.fallbacks_first:
            first = next((job for job in self.queue if job.kind == FALLBACK), first)
        return [job for job in self.queue if job.kind == first.kind] if self.setup.merge else [first]

    def _finish(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.done()
        self._serve()
