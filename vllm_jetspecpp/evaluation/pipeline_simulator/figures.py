"""What a simulation showed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_jetspecpp.evaluation.pipeline_simulator.draft_device import DraftDevice
from vllm_jetspecpp.evaluation.pipeline_simulator.setup import Setup
from vllm_jetspecpp.evaluation.pipeline_simulator.target import Rounds, Target


@dataclass(frozen=True)
class Figures:
    """What a simulation showed, over whole rounds after the warm-up; means over targets and devices."""

    tok_s: float
    """Tokens per second of one target, all its requests together."""
    tok_s_error: float | None
    """Standard error of ``tok_s`` (batch means; targets taken as independent); None below 100 rounds."""
    total_tok_s: float
    tau: float
    hit_rate: float | None
    """Share of requests and rounds whose outcome had been pre-drafted; None where nothing is."""
    round_ms: float
    exposed_ms: float
    """Of a round: from the end of verification until the next blocks are there."""
    exposed_hit_ms: float | None
    """The same over rounds without a miss; None when there was none."""
    exposed_miss_ms: float | None
    """The same over rounds with a miss."""
    utilisation: float | None
    """Share of the time that a draft device works."""
    wait_ms: float | None
    """Of a job in a device's queue."""
    rounds: int
    slowest_tok_s: float
    """Of the slowest target."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def figures_of(setup: Setup, targets: Sequence[Target], devices: Sequence[DraftDevice], warm_up: int) -> Figures:
    """Figures over the rounds after the first ``warm_up`` of every target."""
    per_target = [_counted(target.rounds, setup, warm_up) for target in targets]
    rates = [1000 * c.tokens.sum() / c.lengths.sum() for c in per_target]
    errors = [error for c in per_target if (error := _rate_error(c.tokens, c.lengths)) is not None]
    tokens, lengths, exposed, hits = (
        np.concatenate([getattr(c, name) for c in per_target]) for name in ("tokens", "lengths", "exposed", "hits")
    )
    missed = hits < setup.batch_size
    begin = max(target.rounds.ends[warm_up - 1] for target in targets)
    end = max(target.rounds.ends[-1] for target in targets)
    return Figures(
        tok_s=float(np.mean(rates)),
        tok_s_error=1000 * math.hypot(*errors) / len(errors) if len(errors) == len(rates) else None,
        total_tok_s=float(np.sum(rates)),
        tau=float(tokens.mean()) / setup.batch_size,
        hit_rate=float(hits.mean()) / setup.batch_size if devices else None,
        round_ms=float(lengths.mean()),
        exposed_ms=float(exposed.mean()),
        exposed_hit_ms=_mean(exposed[~missed]) if devices else None,
        exposed_miss_ms=_mean(exposed[missed]) if devices else None,
        utilisation=float(np.mean([_busy_share(d, begin, end) for d in devices])) if devices else None,
        wait_ms=_mean(np.array([ms for d in devices for start, ms in d.waits if start >= begin])) if devices else None,
        rounds=len(tokens),
        slowest_tok_s=float(min(rates)),
    )


@dataclass(frozen=True)
class _Counted:
    """Rounds after the warm-up."""

    tokens: np.ndarray  # [rounds] int64, of all requests
    lengths: np.ndarray  # [rounds] float64, ms
    exposed: np.ndarray  # [rounds] float64, ms
    hits: np.ndarray  # [rounds] int64


def _counted(rounds: Rounds, setup: Setup, warm_up: int) -> _Counted:
    ends = np.array(rounds.ends)
    verified = np.array(rounds.verified[: len(ends)])
    tokens, hits = np.array(rounds.tokens), np.array(rounds.hits)
    return _Counted(tokens[warm_up:], np.diff(ends)[warm_up - 1 :], (ends - verified)[warm_up:], hits[warm_up:])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _rate_error(tokens: np.ndarray, lengths: np.ndarray, batches: int = 50) -> float | None:
    """Standard error of Σ tokens / Σ lengths, from residuals summed over runs of rounds: rounds are chained."""
    if len(tokens) < 2 * batches:
        return None
    residuals = tokens - tokens.sum() / lengths.sum() * lengths
    sums = np.array([part.sum() for part in np.array_split(residuals, batches)])
    return float(math.sqrt(batches * sums.var(ddof=1)) / lengths.sum())


def _busy_share(device: DraftDevice, begin: float, end: float) -> float:
    if end <= begin:
        return 0.0
    return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in device.busy) / (end - begin)
