"""What a target step and a round of drafting take here, measured at start for the planner.

The target's steps are real ones of the model runner, over requests that were made up, as vLLM's own warm-up of its V2
runner does it. The draft process is measured from outside, through the messages it always gets: whatever engine and
transport serve, their times are what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.draft_process.client import DraftClient
from vllm_jetspecpp.planning.costs import Costs, Grid, Line, MeasuredRound, fit_line, fit_rounds
from vllm_jetspecpp.transport.messages import Verified, VerifiedBatch
from vllm_jetspecpp.types import RoundChoice

CONTEXT = 256
"""Positions before the measured steps, where ``max_model_len`` allows."""
BATCHES = (1, 2, 4, 8, 16)
REPEATS = 3
"""Of each measurement, the least of which counts: what a busy machine adds is for running averages to learn."""
MAX_TOKENS = 256
"""Of a measured target step: beyond it time grows in proportion."""
MAX_ROWS = 160
"""Of a measured round: branches times positions of all requests."""
BUDGET = 20.0
"""Seconds for the rounds of drafting; after it the fit has to do with what is there."""
SLOWDOWN_STEPS = 8
MAX_SLOWDOWN = 4.0
_FIRST_STEP = -(1 << 40)  # before any step of serving


def measure(
    worker: Any, client: DraftClient | None, limits: RoundChoice, engine: EngineConfig, width: int, *, concurrent: bool
) -> Costs | None:
    """All times of the planner. Every rank takes the same steps of the target, and the one that drafts gets the times.

    Args:
        worker: vLLM's, of the V1 model runner, before any request was served.
        client: with a draft process that has just started and is left as if nobody had spoken with it; None on ranks
            that do not draft.
        limits: largest shape of a round.
        width: of a row of states.
        concurrent: False for an engine in this process, which answers only when its round is over.

    Raises:
        RuntimeError: the draft process did not answer.
    """
    began = time.perf_counter()
    steps = TargetSteps(worker, limits.num_draft_tokens)
    verify = measure_verify(steps, limits.num_draft_tokens)
    probe, times, error, requests = None, None, None, min(engine.num_slots, 4)
    if client is not None:
        try:
            probe = Probe(client, steps.vocab_size, width, getattr(torch, engine.dtype), engine.max_model_len)
            probe.fill(requests)
            times = measure_drafting(probe, limits, requests, concurrent=concurrent)
        except RuntimeError as failed:
            error = failed  # told below: the other ranks go on with their steps, and wait for ours
    beside = probe if concurrent and error is None else None
    target_slowdown, draft_slowdown = measure_slowdowns(steps, beside, limits)
    if error is not None:
        raise error
    if probe is None or times is None:
        return None
    probe.release(requests)
    made_by = {
        "dtype": engine.dtype,
        "draft_device": engine.device,
        "measured_in_seconds": round(time.perf_counter() - began, 2),
    }
    return Costs(verify, *times, target_slowdown, draft_slowdown, concurrent, made_by)


def measure_verify(steps: TargetSteps, num_draft_tokens: int) -> Grid:
    """T_verify over batch and tokens a request, up to a block of γ = ``num_draft_tokens``."""
    sizes = sorted({1, 2, 4, 8, 16, num_draft_tokens + 1})
    sizes = [size for size in sizes if size <= num_draft_tokens + 1]
    most = steps.max_batch(MAX_TOKENS // 4)
    batches = [batch for batch in BATCHES if batch == 1 or batch <= most]
    rows = []
    for batch in batches:
        steps.begin(batch)
        row: list[float] = []
        for size in sizes:
            if not row or (batch * size <= max(MAX_TOKENS, num_draft_tokens + 1) and steps.fits(batch, size)):
                row.append(steps.least(size))
            else:  # as the last two sizes go on
                slope = (row[-1] - row[-2]) / (sizes[len(row) - 1] - sizes[len(row) - 2]) if len(row) > 1 else 0.0
                row.append(row[-1] + max(slope, 0.0) * (size - sizes[len(row) - 1]))
        rows.append(tuple(row))
        steps.end()
    return Grid(tuple(batches), tuple(sizes), tuple(rows))


def measure_slowdowns(steps: TargetSteps, probe: Probe | None, limits: RoundChoice) -> tuple[float, float]:
    """How much longer target and draft process take while both work: both factors at least 1.

    The draft process gets more to do than the target's steps take. From the time that is left when they are over
    follows how much it did meanwhile.

    Args:
        probe: None on ranks that do not draft, whose factors mean nothing, and where both never work at once.
    """
    shape = RoundChoice(
        min(7, limits.num_draft_tokens), min(4, limits.num_outcomes), limits.jacobi_passes, limits.context_refreshes
    )
    shape = shape._replace(jacobi_passes=min(1, shape.jacobi_passes))
    shape = shape._replace(context_refreshes=min(shape.jacobi_passes, shape.context_refreshes))
    size = shape.num_draft_tokens + 1
    steps.begin(1)
    found = []
    error: RuntimeError | None = None
    for _ in range(REPEATS):
        alone = SLOWDOWN_STEPS * steps.least(size)
        wait = None
        if probe is not None and error is None:
            try:
                count = max(math.ceil(1.6 * alone / (probe.rounds(shape, 3)() / 3)), 3)
                whole = probe.rounds(shape, count)()
                wait = probe.rounds(shape, count)
            except RuntimeError as failed:
                error = failed  # as above
        beside = steps.repeat(size, SLOWDOWN_STEPS)
        if wait is not None:
            done = whole - wait()
            found.append((max(beside / alone, 1.0), max(beside / done, 1.0) if done > 0.2 * beside else MAX_SLOWDOWN))
    steps.end()
    if error is not None:
        raise error
    targets, drafts = zip(*found, strict=True) if found else ((1.0,), (1.0,))
    return median(targets), median(drafts)


class TargetSteps:
    """Decoding steps over made-up requests that stay where they are: each step is taken back before the next."""

    def __init__(self, worker: Any, num_draft_tokens: int) -> None:
        self._worker, runner = worker, worker.model_runner
        self._max_tokens: int = runner.scheduler_config.max_num_batched_tokens
        self._max_seqs: int = runner.scheduler_config.max_num_seqs
        self._groups = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
        self._num_blocks: int = runner.kv_cache_config.num_blocks
        self.vocab_size: int = runner.model_config.get_vocab_size()
        self._context = max(min(CONTEXT, runner.max_model_len - num_draft_tokens - 3), 1)
        self._length = self._context + num_draft_tokens + 2
        self._ids: list[str] = []

    def max_batch(self, limit: int) -> int:
        """Requests there is room for."""
        per_request = sum(-(-self._length // size) for size in self._groups)
        return min(self._max_seqs, limit, self._max_tokens, (self._num_blocks - 1) // per_request)

    def fits(self, batch: int, size: int) -> bool:
        """Whether a step may have so many tokens."""
        return batch * size <= self._max_tokens

    def begin(self, batch: int) -> None:
        """Make up ``batch`` requests, whose context counts as computed."""
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        self._ids = [f"jetspecpp-measured-{index}" for index in range(batch)]
        output, free = self._empty(), 1
        for request_id in self._ids:
            block_ids = []
            for block_size in self._groups:
                count = -(-self._length // block_size)
                block_ids.append(list(range(free, free + count)))
                free += count
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=request_id,
                    prompt_token_ids=self._tokens(self._context + 1),
                    mm_features=[],
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=self._length, detokenize=False),
                    pooling_params=None,
                    block_ids=tuple(block_ids),
                    num_computed_tokens=self._context,
                    lora_request=None,
                )
            )
        self._run(output, 1)

    def _tokens(self, count: int) -> list[int]:
        return [1 + 7 * index % (self.vocab_size - 1) for index in range(count)]

    @staticmethod
    def _empty() -> Any:
        from vllm.v1.core.sched.output import SchedulerOutput

        return SchedulerOutput.make_empty()

    def least(self, size: int) -> float:
        """Seconds of a step with ``size`` tokens a request, after one to warm up."""
        self._step(size)
        return min(self._step(size) for _ in range(REPEATS))

    def repeat(self, size: int, count: int) -> float:
        """Seconds of ``count`` such steps."""
        return sum(self._step(size) for _ in range(count))

    def _step(self, size: int) -> float:
        output = self._empty()
        cached = output.scheduled_cached_reqs
        cached.req_ids = list(self._ids)
        cached.new_block_ids = [None] * len(self._ids)
        cached.num_computed_tokens = [self._context] * len(self._ids)
        cached.num_output_tokens = [0] * len(self._ids)
        if size > 1:
            output.scheduled_spec_decode_tokens = {name: self._tokens(size - 1) for name in self._ids}
        began = time.perf_counter()
        self._run(output, size)
        return time.perf_counter() - began

    def _run(self, output: Any, size: int) -> None:
        output.num_scheduled_tokens = dict.fromkeys(self._ids, size)
        output.total_num_scheduled_tokens = size * len(self._ids)
        if self._worker.execute_model(output) is None:
            self._worker.sample_tokens(None)

    def end(self) -> None:
        """Take the requests back."""
        output = self._empty()
        output.finished_req_ids = set(self._ids)
        self._worker.execute_model(output)
        self._ids = []


def round_designs(limits: RoundChoice, max_requests: int) -> Iterator[tuple[int, RoundChoice]]:
    """Requests and shapes of the rounds that are measured, cheap ones first: enough for the six numbers of the fit."""
    long, outcomes = limits.num_draft_tokens, limits.num_outcomes
    short = min(3, long)
    shapes = [
        (1, short, 1, 0, 0),
        (1, long, 1, 0, 0),
        (1, short, 4, 0, 0),
        (1, short, 4, 1, 0),
        (1, short, 4, 0, 1),
        (1, short, 1, 1, 1),
        (4, short, 1, 0, 0),
        (1, short, 4, 1, 1),
        (1, short, 2, 3, 3),
        (1, long, 4, 0, 0),
        (4, short, 2, 1, 1),
        (1, long, 4, 1, 1),
        (1, long, 2, 2, 2),
        (1, short, 16, 1, 1),
    ]
    seen: set[tuple[int, RoundChoice]] = set()
    for requests, gamma, b, passes, refreshes in shapes:
        shape = (
            min(requests, max_requests),
            RoundChoice(
                gamma, min(b, outcomes), min(passes, limits.jacobi_passes), min(refreshes, limits.context_refreshes)
            ),
        )
        rows = shape[0] * shape[1].num_outcomes * (gamma + 1)
        if shape not in seen and (rows <= MAX_ROWS or not seen):
            seen.add(shape)
            yield shape


def measure_drafting(
    probe: Probe, limits: RoundChoice, requests: int, *, concurrent: bool
) -> tuple[Line, Line, Line, Line, Line, float]:
    """``commit``, ``foresight``, ``draft_pass``, ``refresh``, ``fallback`` and ``comm`` of :class:`Costs`.

    Args:
        requests: that the probe has filled.
    """
    rounds: list[MeasuredRound] = []
    answers: list[tuple[float, float]] = []
    comms: list[float] = []
    commits: list[tuple[float, float]] = []
    began = time.perf_counter()
    for count, choice in round_designs(limits, requests):
        if rounds and time.perf_counter() - began > BUDGET:
            break
        probe.measure(count, choice)  # warms up
        measured = [probe.measure(count, choice) for _ in range(REPEATS)]
        answer, whole = (min(times) for times in zip(*measured, strict=True))
        if not concurrent:
            alone = min(probe.measure(count, choice._replace(num_outcomes=0))[0] for _ in range(REPEATS))
            answer, whole = alone, answer - alone
        rounds.append(MeasuredRound(count, choice, max(whole, 1e-6)))
        answers.append((count * (choice.num_draft_tokens + 1), answer))
        comms.append(probe.echo())
        rows = count * (choice.num_draft_tokens + 1)
        commits.append((rows, max(min(probe.commit(count) for _ in range(REPEATS)), 1e-6)))
    return fit_line(commits), *fit_rounds(rounds), fit_line(answers), min(comms)


class Probe:
    """Speaks with a draft process as a worker does, about requests that were made up."""

    def __init__(
        self, client: DraftClient, vocab_size: int, width: int, dtype: torch.dtype, max_model_len: int
    ) -> None:
        self._client, self._vocab_size, self._dtype = client, vocab_size, dtype
        self._states = torch.randn(CONTEXT, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        self._step, self._max_model_len = _FIRST_STEP, max_model_len
        self._length = max(min(CONTEXT, max_model_len // 2), 2)
        if not client.ready():
            raise RuntimeError("there is no draft process")

    def fill(self, requests: int) -> None:
        """Give slots 0.. a context."""
        states = self._states[: self._length - 1]
        news = [
            Verified(slot, 0, self._tokens(self._length), 0, states, wants_draft=False, reset=True)
            for slot in range(requests)
        ]
        self._send(news, None)
        self.echo()

    def _tokens(self, count: int) -> torch.Tensor:
        return (torch.arange(count) * 7 % (self._vocab_size - 1) + 1).int()

    def _post(self, requests: Sequence[Verified], choice: RoundChoice | None, released: tuple[int, ...] = ()) -> bool:
        """Send a message; whether it will be answered."""
        self._step += 1
        batch = VerifiedBatch(self._step, tuple(requests), released, choice=choice)
        if not self._client.send(batch):
            raise RuntimeError("the draft process ended while it was measured")
        return batch.wants_reply

    def _send(self, requests: Sequence[Verified], choice: RoundChoice | None) -> float:
        """Seconds until the answer, where one is wanted."""
        began = time.perf_counter()
        if self._post(requests, choice) and self._client.receive() is None:
            raise RuntimeError("the draft process did not answer while it was measured")
        return time.perf_counter() - began

    def measure(self, requests: int, choice: RoundChoice) -> tuple[float, float]:
        """Seconds to a first block for each of ``requests``, and from there to the end of their round.

        The last position of the context is said again, with its state, as if it had just been verified.
        """
        last, token = self._length - 1, self._tokens(self._length)[-1:]
        news = [Verified(slot, last, token, last - 1, self._states[:1], wants_draft=True) for slot in range(requests)]
        return self._send(news, choice), self.echo(choice)

    def commit(self, requests: int) -> float:
        """Seconds that a few states of each of ``requests`` take."""
        last, none = self._length - 1, torch.empty(0, dtype=torch.int32)
        states = self._states[: min(2, last)]
        self._post([Verified(slot, last, none, last - len(states), states) for slot in range(requests)], None)
        return self.echo()

    def rounds(self, choice: RoundChoice, count: int) -> Callable[[], float]:
        """Have ``count`` rounds of one request done; what is returned waits for them and says for how many seconds."""
        last, token = self._length - 1, self._tokens(self._length)[-1:]
        for _ in range(count):
            self._post([Verified(0, last, token, last - 1, self._states[:1], wants_draft=True)], choice)
        return lambda: self.echo(choice)

    def echo(self, choice: RoundChoice | None = None) -> float:
        """Seconds until an answer that takes no drafting; it comes when the round that runs is over."""
        last = self._length - 1
        token, none = self._tokens(self._length)[-1:], self._states[:0]
        return self._send([Verified(0, last, token, last, none, wants_draft=True, max_draft_tokens=0)], choice)

    def release(self, requests: int) -> None:
        """Empty the slots."""
        self._post([], None, tuple(range(requests)))
