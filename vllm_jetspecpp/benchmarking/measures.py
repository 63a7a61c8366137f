"""The figures of `bench serve`, defined on the records of runs.

Everything is seen from outside the engine but for the phases of a step (``step_clock.py``). Of each repeat:

* ``tok_s``: tokens/s of one request while it decodes: tokens after its first output over the time from the first
  output to the last, summed over requests before dividing. Prefill is not in it.
* ``total_tok_s``: all tokens over the wall time of the runs, prefill included.
* ``ttft_ms``: time to first token, from handing the request to the engine to its first output; median of requests.
* ``itl_p50_ms``, ``itl_p99_ms``: inter-token latency as vLLM defines it, the time between consecutive *outputs* of a
  request. A speculative method's outputs are bursts of k + 1 tokens, so its latencies are longer and fewer.
* ``tpot_ms``: time per output token, 1000 / ``tok_s``.
* ``tau``: tokens committed per request and decode step (τ); 1 without drafting. Steps without drafts count.
* ``copied_share``: of all blocks of JetSpec++'s, those copied from the request itself.
* ``hit_rate``: of the blocks for which an outcome could have been foreseen, those that had been drafted ahead.
* ``verify_ms`` (T_verify): the target's forward over the anchor and its drafts, logits and sampler; median of steps.
  ``verify_mean_ms``: its mean, which is what steps of blocks of unequal length add up to.
* ``exposed_ms``: drafting the step waits for; mean of steps. ``exposed_ms_hits``: of steps that received hits alone.
* ``host_ms``: the rest of a step: scheduler, inputs, bookkeeping, and for JetSpec++ sending; median of steps.

Phases are of decode steps alone: those in which every request had output before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from vllm_jetspecpp.benchmarking.records import RequestRecord, Run, StepRecord

Figures = dict[str, float | None]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the others lie, linear between neighbours, as ``numpy.percentile``."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(top: float, bottom: float) -> float | None:
    """None over nothing."""
    return top / bottom if bottom else None


def over(function: Callable[[Sequence[float]], float], values: Iterable[float], scale: float = 1.0) -> float | None:
    """``scale * function(values)``, None of nothing."""
    found = list(values)
    return scale * function(found) if found else None


def decode_rate(requests: Sequence[RequestRecord]) -> float | None:
    """Tokens/s after each first output."""
    several = [request for request in requests if len(request.times) > 1]
    tokens = sum(sum(request.counts[1:]) for request in several)
    return ratio(tokens, sum(request.times[-1] - request.times[0] for request in several))


def gaps(requests: Sequence[RequestRecord]) -> list[float]:
    """Seconds between consecutive outputs of each request."""
    return [b - a for r in requests for a, b in zip(r.times, r.times[1:], strict=False)]


def measure(runs: Sequence[Run]) -> Figures:
    """All figures of one method at one concurrency in one repeat."""
    requests = [request for run in runs for request in run.requests]
    steps = [step for run in runs for step in run.steps if step.decode and step.committed]
    rate, between = decode_rate(requests), gaps(requests)
    hits, misses, copied = (
        sum(getattr(step, name) for run in runs for step in run.steps) for name in ("hits", "misses", "copied")
    )
    return {
        "tok_s": rate,
        "total_tok_s": ratio(sum(len(r.tokens) for r in requests), sum(run.seconds for run in runs)),
        "ttft_ms": over(median, (r.times[0] - r.added for r in requests if r.times), 1e3),
        "tpot_ms": 1e3 / rate if rate else None,
        "itl_p50_ms": over(lambda values: percentile(values, 0.5), between, 1e3),
        "itl_p99_ms": over(lambda values: percentile(values, 0.99), between, 1e3),
        "tau": ratio(sum(s.committed for s in steps), sum(s.requests for s in steps)),
        "hit_rate": ratio(hits, hits + misses),
        "copied_share": ratio(copied, hits + misses + copied),
        **phases(steps),
    }


def phases(steps: Sequence[StepRecord]) -> Figures:
    """What the time of decode steps is made of."""
    return {
        "step_ms": over(median, (s.total for s in steps), 1e3),
        "verify_ms": over(median, (s.verify for s in steps), 1e3),
        "verify_mean_ms": over(fmean, (s.verify for s in steps), 1e3),
        "exposed_ms": over(fmean, (s.exposed for s in steps), 1e3),
        "exposed_ms_hits": over(fmean, (s.exposed for s in steps if s.hits and not s.misses), 1e3),
        "host_ms": over(median, (s.total - s.verify - s.exposed for s in steps), 1e3),
    }


def by_repeat(runs: Iterable[Run]) -> dict[tuple[str, int], list[Figures]]:
    """(method, concurrency) → figures of each repeat, in order."""
    found: dict[tuple[str, int], dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[run.method, run.concurrency][run.repeat].append(run)
    return {key: [measure(repeats[index]) for index in sorted(repeats)] for key, repeats in found.items()}


def summary(repeats: Sequence[Figures]) -> dict[str, Any]:
    """Median over repeats of every figure, and its ``spread``: lowest, highest, and each repeat's value."""
    medians: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for name in repeats[0]:
        values = [value for figures in repeats if (value := figures[name]) is not None]
        medians[name] = median(values) if values else None
        if values:
            spread[name] = {"min": min(values), "max": max(values), "values": values}
    return {**medians, "spread": spread}
