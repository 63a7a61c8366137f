"""Drive an engine with a fixed number of requests in flight, and take times from outside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

from vllm_jetspecpp.benchmarking.records import RequestRecord, StepRecord


class SteppedEngine(Protocol):
    """What is used of vLLM's ``LLMEngine``."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Queue a request."""

    def step(self) -> Sequence[Any]:
        """Compute once; outputs with ``request_id``, ``finished`` and the *new* tokens in ``outputs[0].token_ids``."""


class Phases(Protocol):
    """Times of the step that just ended."""

    def take(self) -> tuple[float, float, tuple[int, ...]]:
        """Seconds of verification and of exposed drafting; hits, misses and copied blocks since the last call."""


def closed_loop(
    engine: SteppedEngine,
    phases: Phases,
    prompts: Sequence[tuple[int, list[int]]],
    concurrency: int,
    params: Callable[[], Any],
) -> dict[str, Any]:
    """Answer all prompts, ``concurrency`` at a time: where one ends the next begins.

    Args:
        prompts: index and token ids of each.
        params: makes the sampling parameters of one request; outputs must be deltas.

    Returns:
        ``seconds`` of the whole, ``requests`` as :class:`RequestRecord` fields and ``steps`` as tuples.
    """
    waiting = list(reversed(prompts))
    open_requests: dict[str, RequestRecord] = {}
    done: list[RequestRecord] = []
    steps: list[StepRecord] = []
    phases.take()  # what came before is not ours
    began = perf_counter()
    while waiting or open_requests:
        while waiting and len(open_requests) < concurrency:
            index, tokens = waiting.pop()
            name = str(len(done) + len(open_requests))
            open_requests[name] = RequestRecord(index, perf_counter() - began, [], [], [])
            engine.add_request(name, {"prompt_token_ids": tokens}, params())
        before = perf_counter()
        outputs = engine.step()
        after = perf_counter()
        decoding = [record for record in open_requests.values() if record.times]
        committed = 0
        is_decode = len(decoding) == len(open_requests)
        for output in outputs:
            record = open_requests[output.request_id]
            new = list(output.outputs[0].token_ids)
            if new:
                record.times.append(after - began)
                record.counts.append(len(new))
                record.tokens.extend(new)
                committed += len(new)
            if output.finished:
                done.append(open_requests.pop(output.request_id))
        verify, exposed, blocks = phases.take()
        total = after - before
        steps.append(StepRecord(total, verify, exposed, is_decode, len(decoding), committed, *blocks))
    seconds = perf_counter() - began
    return {
        "seconds": seconds,
        "requests": [vars(record) for record in done],
        "steps": [tuple(vars(step).values()) for step in steps],
    }
