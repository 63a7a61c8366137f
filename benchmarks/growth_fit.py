"""How a cost grows: the exponent of its marginal part, with an interval from resampled repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Exponent:
    """p of ``cost - cost at smallest size ∝ (size - smallest size)^p``: 1 for linear growth, towards 2 for a square."""

    value: float
    low: float
    high: float
    """95 % of the resampled fits lie between ``low`` and ``high``."""
    tail: float
    """p between the two largest sizes alone, where a square that is small at first would show."""

    def __str__(self) -> str:
        return "–" if np.isnan(self.value) else f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def marginal_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Log-log least squares over what each size costs beyond the smallest; NaN where less than two cost more."""
    size, cost = np.asarray(sizes, float), np.asarray(costs, float)
    more, further = cost[1:] - cost[0], size[1:] - size[0]
    grown = more > 0
    if grown.sum() < 2:
        return float("nan")
    return float(np.polyfit(np.log(further[grown]), np.log(more[grown]), 1)[0])


def fit(sizes: Sequence[float], repeats: Sequence[Sequence[float]], seed: int = 0) -> Exponent:
    """Exponent of the medians.

    Args:
        sizes: ascending.
        repeats: measured costs of every size.
    """
    generator = np.random.default_rng(seed)
    medians = [float(np.median(values)) for values in repeats]
    drawn = [
        marginal_exponent(sizes, [float(np.median(generator.choice(values, len(values)))) for values in repeats])
        for _ in range(RESAMPLES if max(map(len, repeats)) > 1 else 1)
    ]
    low, high = np.nanquantile(drawn, [0.025, 0.975]) if not np.all(np.isnan(drawn)) else (np.nan, np.nan)
    ends = [0, -2, -1]
    tail = marginal_exponent([sizes[i] for i in ends], [medians[i] for i in ends]) if len(sizes) > 2 else np.nan
    return Exponent(marginal_exponent(sizes, medians), float(low), float(high), float(tail))
