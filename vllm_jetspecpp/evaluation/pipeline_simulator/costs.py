"""What a round costs: times of one deployment, measured or assumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_jetspecpp.config import RoundConfig, check_keys

Points = Mapping[str, float] | Mapping[int, float]


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds over a size (requests, blocks): straight lines between measured points, the last one goes on."""

    points: tuple[tuple[float, float], ...]
    """(size, ms), sizes rising. Below the first point the cost is the first one's."""

    @classmethod
    def of(cls, given: float | Points | CostCurve, name: str = "cost") -> CostCurve:
        """From a number (any size costs that), or ``{size: ms}`` with sizes as JSON's strings or numbers.

        Raises:
            ValueError: no point, a size below 1, or a time that is negative or not finite.
        """
        if isinstance(given, CostCurve):
            return given
        try:
            pairs = given.items() if isinstance(given, Mapping) else [(1, given)]
            points = tuple(sorted((float(size), float(ms)) for size, ms in pairs))
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} must be milliseconds or an object {{size: milliseconds}}, got {given!r}"
            ) from None
        sizes = [size for size, _ in points]
        if not points or any(size < 1 or not math.isfinite(size) for size in sizes) or len(set(sizes)) < len(sizes):
            raise ValueError(f"{name} needs one time a size, sizes from 1 up, got {given!r}")
        if any(ms < 0 or not math.isfinite(ms) for _, ms in points):
            raise ValueError(f"{name} must be times of 0 ms or more, got {given!r}")
        return cls(points)

    @classmethod
    def line(cls, first: float, each_more: float) -> CostCurve:
        """``first`` ms at size 1 and ``each_more`` ms for every further one."""
        return cls(((1.0, first), (2.0, first + each_more)))

    def __call__(self, size: int) -> float:
        """Milliseconds at ``size``; 0 at size 0."""
        if size <= 0:
            return 0.0
        if size <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        after = next((i for i, (known, _) in enumerate(self.points) if known >= size), len(self.points) - 1)
        (left, low), (right, high) = self.points[after - 1], self.points[after]
        return max(0.0, low + (high - low) * (size - left) / (right - left))

    def to_json(self) -> float | dict[str, float]:
        """As ``of`` reads it."""
        return self.points[0][1] if len(self.points) == 1 else {f"{size:g}": ms for size, ms in self.points}


ZERO = CostCurve(((1.0, 0.0),))


@dataclass(frozen=True)
class PipelineCosts:
    """Times of one deployment at one γ, in milliseconds. Names as in Eqs. 3 and 4; every curve is over a count."""

    verify: CostCurve
    """T_verify over requests verified together."""
    predict: CostCurve = ZERO
    """T_pred over blocks: one call of adapter and decoder."""
    draft_pass: CostCurve = ZERO
    """T_pass over blocks: one forward of the draft model (SSD: over rows, one token each)."""
    fallback: CostCurve = ZERO
    """T_fallback over requests that missed: their blocks from the verified context, in line."""
    inline_draft: CostCurve = ZERO
    """T_draft over requests of a method that drafts in line (DSpark, DFlash)."""
    plain: CostCurve = ZERO
    """One step of plain decoding over requests."""
    comm_ms: float = 0.0
    """T_comm: outcome to the draft process, lookup, answer back. Once a round, after the draft round is over."""
    host_ms: float = 0.0
    """T_host: CPU work between the phases of a draft round, counted in it."""
    commit_ms: float = 0.0
    """Writing the true states into the caches: the first thing of a draft round, after the answer."""
    step_ms: float = 0.0
    """The target's own work between the answer and the next verification; of every method."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "costs") -> PipelineCosts:
        """From plain values: curves as in ``CostCurve.of``.

        Raises:
            ValueError: an unknown key, ``verify`` missing, or a value that is no time.
        """
        check_keys(values, [f.name for f in fields(cls)], where)
        if "verify" not in values:
            raise ValueError(f"{where}: 'verify' is missing (ms of one verification, a number or {{requests: ms}})")
        made: dict[str, Any] = {name: CostCurve.of(value, f"{where}: {name}") for name, value in values.items()}
        scalars = [name for name in made if name.endswith("_ms")]
        for name in scalars:
            if len(made[name].points) != 1:
                raise ValueError(f"{where}: {name} must be one number of milliseconds, got {values[name]!r}")
            made[name] = made[name].points[0][1]
        return cls(**made)

    @classmethod
    def from_json(cls, text: str) -> PipelineCosts:
        """From the text of a JSON object."""
        return cls.from_dict(json.loads(text))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``from_dict`` reads them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value.to_json() if isinstance(value, CostCurve) else value for name, value in values.items()}

    def draft_round_ms(self, options: RoundConfig, num_requests: int) -> float:
        """T_draft of Eq. 3: T_pred(n) + (J + 1)·T_pass(n·B) + R·T_pred(n·B) + T_host, and the commit before it."""
        blocks = num_requests * options.num_outcomes
        passes = (options.jacobi_passes + 1) * self.draft_pass(blocks)
        foresight = self.predict(num_requests) + options.context_refreshes * self.predict(blocks)
        return self.commit_ms + foresight + passes + self.host_ms

    def autoregressive_round_ms(self, options: RoundConfig, num_requests: int) -> float:
        """SSD's draft round: γ passes, one token each, over the B cached outcomes of every request."""
        rows = num_requests * options.num_outcomes
        return self.commit_ms + options.num_draft_tokens * self.draft_pass(rows) + self.host_ms
