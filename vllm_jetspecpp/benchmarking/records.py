"""What one run of one method leaves behind: plain values, as they pass from the child process to the parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RequestRecord:
    """One request, seen from outside the engine."""

    prompt: int
    """Index of its prompt in the workload."""
    added: float
    """Seconds since the run began at which it was handed to the engine."""
    times: list[float]
    """Seconds since the run began at which output came. Under speculation one output is a burst of k + 1 tokens."""
    counts: list[int]
    """Tokens in each of these outputs."""
    tokens: list[int]


@dataclass(frozen=True)
class StepRecord:
    """One engine step, in seconds."""

    total: float
    """From calling the engine to its return."""
    verify: float
    """From the start of the target's forward to the sampled tokens: forward, logits, sampler."""
    exposed: float
    """Drafting that the step waited for: in line all of it, beside verification the wait for the reply."""
    decode: bool
    """Whether every request in it had output before: no prefill is part of it."""
    requests: int
    """Requests that had output before."""
    committed: int
    """Tokens that came out, of all requests."""
    hits: int = 0
    """Blocks that the step received and that had been drafted ahead (methods that predict outcomes)."""
    misses: int = 0
    """Blocks that the step received and that were drafted while it waited, as no foreseen outcome came true."""
    copied: int = 0
    """Blocks that the step received and that were copied from the request itself."""


@dataclass(frozen=True)
class Run:
    """One method over one group of prompts, once."""

    method: str
    concurrency: int
    repeat: int
    group: int
    seconds: float
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    @classmethod
    def from_json(cls, method: str, concurrency: int, repeat: int, group: int, said: dict[str, Any]) -> Run:
        """What a child answered."""
        requests = [RequestRecord(**request) for request in said["requests"]]
        steps = [StepRecord(*step) for step in said["steps"]]
        return cls(method, concurrency, repeat, group, said["seconds"], requests, steps)
