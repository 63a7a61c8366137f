"""A clock, and what happened when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


class EventLoop:
    """A clock and what is to happen; events at one time run in the order they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``delay`` ms."""
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), action))

    def step(self) -> None:
        """Run the next event."""
        self.now, _, action = heapq.heappop(self._events)
        action()


@dataclass(frozen=True)
class Segment:
    """A bar of the timeline."""

    row: str
    kind: str
    start: float
    end: float
    target: int


class Timeline:
    """Bars up to a time."""

    def __init__(self, until_ms: float) -> None:
        self.until_ms = until_ms
        self.segments: list[Segment] = []

    def add(self, row: str, kind: str, start: float, end: float, target: int) -> None:
        """Keep a bar unless it begins too late or has no length."""
        if start < self.until_ms and end > start:
            self.segments.append(Segment(row, kind, start, end, target))
