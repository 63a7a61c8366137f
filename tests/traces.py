"""Checks of Chrome trace files that several tests share."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

ROUNDING = 2e-3
"""Microseconds: times are written as floats."""


def check_trace_file(path: Path) -> list[dict[str, Any]]:
    """The events of a file whose slices nest on every track and whose arrows lead from slice to slice."""
    events = json.loads(path.read_text())["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "s", "f") and event["name"] and {"pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        check_nested(slices)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(tracks)
    check_flows(events, tracks)
    return events


def check_nested(slices: list[tuple[float, float]]) -> None:
    stack: list[float] = []
    for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while stack and stack[-1] <= start + ROUNDING:
            stack.pop()
        assert not stack or end <= stack[-1] + ROUNDING, f"a slice from {start} to {end} crosses the end of another"
        stack.append(end)


def check_flows(events: list[dict[str, Any]], tracks: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    begun = {e["id"]: e for e in events if e["ph"] == "s"}
    ended = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(begun) + len(ended) == sum(e["ph"] in ("s", "f") for e in events), "an id is used twice"
    assert begun.keys() == ended.keys()
    for number, first in begun.items():
        last = ended[number]
        assert first["ts"] <= last["ts"] and first["name"] == last["name"] and first["pid"] != last["pid"]
        for event in (first, last):
            starts = (start for start, _ in tracks[event["pid"], event["tid"]])
            assert any(abs(start - event["ts"]) < ROUNDING for start in starts), "an arrow hangs in the air"
