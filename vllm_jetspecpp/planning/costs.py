"""What a step of the target and a round of drafting cost: measured times, and the few lines fitted through them."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from vllm_jetspecpp.config import check_keys
from vllm_jetspecpp.types import RoundChoice

MAX_SECONDS = 1e4
MAX_POINTS = 64
MAX_FILE_BYTES = 1 << 20
_SWEEPS = 2000


class Line(NamedTuple):
    """Seconds over rows (requests · branches · positions of a block)."""

    base: float
    slope: float

    def __call__(self, rows: float) -> float:
        """Seconds."""
        return self.base + self.slope * rows


@dataclass(frozen=True)
class Grid:
    """Seconds of a target step, measured over batch and tokens a request; linear between the points and beyond."""

    batches: tuple[int, ...]
    sizes: tuple[int, ...]
    """Tokens of each request in the step; 1 is plain decoding."""
    seconds: tuple[tuple[float, ...], ...]
    """One row for each batch."""

    def __call__(self, batch: float, size: float) -> float:
        """Seconds of a step of ``batch`` requests with ``size`` tokens each."""
        rows = [_interpolate(self.sizes, row, size) for row in self.seconds]
        return _interpolate(self.batches, rows, batch)


def _interpolate(points: Sequence[int], values: Sequence[float], at: float) -> float:
    if len(points) == 1:
        return values[0]
    right = min(max(bisect_right(points, at), 1), len(points) - 1)
    left = right - 1
    share = (at - points[left]) / (points[right] - points[left])
    value = values[left] + share * (values[right] - values[left])
    return max(value, min(values) / 2)  # noise must not let an extrapolation reach zero


@dataclass(frozen=True)
class Costs:
    """All times of Eqs. 3 and 4, in seconds, on the machine that measured them."""

    verify: Grid
    """T_verify(batch, γ + 1), and at one token a request plain decoding."""
    commit: Line
    """Replacing predictions by true states, over batch · (γ + 1) rows: after a hit beside the target's next step; after
    a miss before the answer, and then part of T_fallback."""
    foresight: Line
    """T_host and T_pred(1), foreseeing the block, over batch · (γ + 1) rows."""
    draft_pass: Line
    """T_pass over batch · B · (γ + 1) rows."""
    refresh: Line
    """T_pred of a context refresh, over as many rows."""
    fallback: Line
    """T_fallback over (requests that missed) · (γ + 1) rows: the answer to a miss, which the step waits for."""
    comm: float
    """T_comm: an answer from the cache, there and back."""
    target_slowdown: float = 1.0
    """Factor on a target step while the draft process works: two cores share memory, caches, perhaps more."""
    draft_slowdown: float = 1.0
    """Factor on drafting while the target works."""
    concurrent: bool = True
    """Whether drafting runs beside the target; in the target's own process (``transport: local``) nothing is hidden."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """How they were measured."""

    def draft(self, drafted: int, choice: RoundChoice) -> float:
        """Left side of Eq. 3 for ``drafted`` requests in one round, without the commit."""
        if not choice.num_outcomes:
            return 0.0
        work = RoundWork.of(drafted, choice)
        passes = self.draft_pass.base * work.passes + self.draft_pass.slope * work.pass_rows
        refreshes = self.refresh.base * work.refreshes + self.refresh.slope * work.refresh_rows
        return self.foresight(work.foresight_rows) + passes + refreshes

    def overlap(self, verify: float, draft: float) -> tuple[float, float]:
        """When a target step and a round end that begin together, each with the time it takes alone.

        With no slowdown these are the times themselves, and the later end is the maximum of Eq. 4.
        """
        if not self.concurrent:
            return verify, verify + draft
        target, drafting = self.target_slowdown * verify, self.draft_slowdown * draft
        if drafting <= target:
            return verify + drafting * (1 - 1 / self.target_slowdown), drafting
        return target, target + draft - target / self.draft_slowdown

    def save(self, path: Path) -> None:
        """Write as JSON; :func:`load_costs` reads it."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Self:
        """Check and build.

        Raises:
            ValueError: not what :meth:`save` writes; the message names ``where``.
        """
        lines = ("commit", "foresight", "draft_pass", "refresh", "fallback")
        slowdowns = ("target_slowdown", "draft_slowdown")
        keys = ("verify", *lines, "comm", *slowdowns, "concurrent", "made_by")
        if not isinstance(values, dict):
            raise ValueError(f"{where} must hold a JSON object, got {str(values)[:60]!r}")
        check_keys(values, keys, where)
        for key in keys:
            if key not in values:
                raise ValueError(f"{where}: key {key!r} is missing; found: {', '.join(sorted(values))}")
        for key in lines:
            _check_seconds(values[key], 2, f"{where}: {key}")
        _check_seconds([values["comm"]], 1, f"{where}: comm")
        for key in slowdowns:
            _check_seconds([values[key]], 1, f"{where}: {key}")
            if values[key] < 1:
                raise ValueError(f"{where}: {key} is a factor from 1 on, got {values[key]}")
        if not isinstance(values["concurrent"], bool) or not isinstance(values["made_by"], dict):
            raise ValueError(f"{where}: concurrent must be true or false, and made_by an object")
        return cls(
            verify=_grid(values["verify"], f"{where}: verify"),
            commit=Line(*values["commit"]),
            foresight=Line(*values["foresight"]),
            draft_pass=Line(*values["draft_pass"]),
            refresh=Line(*values["refresh"]),
            fallback=Line(*values["fallback"]),
            comm=values["comm"],
            target_slowdown=values["target_slowdown"],
            draft_slowdown=values["draft_slowdown"],
            concurrent=values["concurrent"],
            made_by=values["made_by"],
        )


def load_costs(path: Path) -> Costs:
    """Costs that were saved before.

    Raises:
        ValueError: no such file, or not what ``jetspecpp plan --save`` writes.
    """
    if not path.is_file():
        raise ValueError(f"plan_profile {str(path)!r} is not a file; `jetspecpp plan --save FILE` writes one")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"plan_profile {path} has {path.stat().st_size} bytes, allowed are {MAX_FILE_BYTES}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"plan_profile {path} is not JSON: {error}") from None
    return Costs.from_dict(values, f"plan_profile {path}")


def _grid(value: Any, where: str) -> Grid:
    if not isinstance(value, dict) or set(value) != {"batches", "sizes", "seconds"}:
        raise ValueError(f"{where} must be an object of batches, sizes and seconds")
    for name in ("batches", "sizes"):
        points = value[name]
        whole = isinstance(points, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in points)
        if not whole or not 0 < len(points) <= MAX_POINTS or points != sorted(set(points)) or points[0] < 1:
            raise ValueError(f"{where}: {name} must be 1 to {MAX_POINTS} whole numbers from 1 on that rise")
    rows = value["seconds"]
    if not isinstance(rows, list) or len(rows) != len(value["batches"]):
        raise ValueError(f"{where}: seconds must have one row for each of {len(value['batches'])} batches")
    for row in rows:
        _check_seconds(row, len(value["sizes"]), f"{where}: seconds")
        if min(row) <= 0:
            raise ValueError(f"{where}: a step takes more than 0 seconds, got {min(row)}")
    return Grid(tuple(value["batches"]), tuple(value["sizes"]), tuple(map(tuple, rows)))


def _check_seconds(values: Any, count: int, where: str) -> None:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{where} must be a list of {count} numbers, got {str(values)[:60]!r}")
    for n in values:
        number = isinstance(n, int | float) and not isinstance(n, bool)
        if not number or not math.isfinite(n) or not 0 <= n <= MAX_SECONDS:
            raise ValueError(f"{where}: seconds lie between 0 and {MAX_SECONDS:g}, got {n!r}")


class RoundWork(NamedTuple):
    """How often the networks run in a round, and over how many rows in all."""

    foresight_rows: int
    passes: int
    """Of the draft model."""
    pass_rows: int
    refreshes: int
    refresh_rows: int

    @classmethod
    def of(cls, drafted: int, choice: RoundChoice) -> RoundWork:
        """Of a round of ``drafted`` requests."""
        blocks = drafted * choice.num_outcomes
        refined = drafted * min(choice.num_refined, choice.num_outcomes)
        size = choice.num_draft_tokens + 1
        # Anchors refreshed before the initial draft: a row each, and the blocks drafted are one shorter.
        anchors = int(choice.context_refreshes > choice.jacobi_passes)
        passes = choice.jacobi_passes + 1 if size - anchors > 1 else 0
        refreshes = (choice.context_refreshes - anchors) if passes else 0
        drawn = blocks + (passes - 1) * refined if passes else 0
        return cls(
            foresight_rows=drafted * size,
            passes=passes,
            pass_rows=drawn * (size - anchors),
            refreshes=refreshes + anchors,
            refresh_rows=refreshes * refined * (size - anchors) + anchors * blocks,
        )


class MeasuredRound(NamedTuple):
    """One measured round of drafting."""

    drafted: int
    """Requests in it."""
    choice: RoundChoice
    seconds: float
    """From the answer to the end of the round."""


def fit_rounds(rounds: Sequence[MeasuredRound]) -> tuple[Line, Line, Line]:
    """``foresight``, ``draft_pass`` and ``refresh`` of :class:`Costs`, by least squares of the relative error.

    A round takes F + (J + 1) P + R Q with F, P and Q linear in their rows (:class:`RoundWork`): six numbers, none below
    zero.
    """
    features, times = [], []
    for drafted, choice, seconds in rounds:
        features.append([1, *RoundWork.of(drafted, choice)])
        times.append(seconds)
    a, b, c, d, e, f = non_negative_least_squares(features, times)
    return Line(a, b), Line(c, d), Line(e, f)


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """A line through (rows, seconds), neither number below zero."""
    base, slope = non_negative_least_squares([[1, rows] for rows, _ in points], [seconds for _, seconds in points])
    return Line(base, slope)


def non_negative_least_squares(features: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises Σ ((features · x - value) / value)², by coordinate descent.

    Args:
        values: all above zero.
    """
    scaled = [[x / value for x in row] for row, value in zip(features, values, strict=True)]
    columns = list(zip(*scaled, strict=True))
    norms = [sum(x * x for x in column) for column in columns]
    found, rest = [0.0] * len(columns), [1.0] * len(values)
    for _ in range(_SWEEPS):
        moved = 0.0
        for index, column in enumerate(columns):
            if not norms[index]:
                continue
            step = sum(x * r for x, r in zip(column, rest, strict=True)) / norms[index]
            new = max(found[index] + step, 0.0)
            change, found[index] = new - found[index], new
            rest = [r - change * x for x, r in zip(column, rest, strict=True)]
            moved = max(moved, abs(change) * math.sqrt(norms[index]))
        if moved < 1e-9:
            break
    return found
