"""A recording in Chrome's trace event format, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_jetspecpp.tracing.phases import DRAFT_PHASES, WORKER_PHASES
from vllm_jetspecpp.tracing.recording import Span
from vllm_jetspecpp.tracing.rounds import Exchange, Round, Timeline

WORKER, DRAFT = 1, 2
ROUNDS, STEPS = 1, 2
WAITING, IDLE = "wait", "idle"
Event = dict[str, Any]
COLOURS = {
    "forward": "thread_state_running",
    "sample": "rail_response",
    "wait": "terrible",
    "fallback": "bad",
    "simulate_verification": "rail_animation",
    "draft_pass": "good",
    "hit": "good",
    "miss": "terrible",
}
"""Chrome's names; Perfetto colours by the names of the slices."""


def trace_events(timeline: Timeline) -> list[Event]:
    """All events, in microseconds since the first one."""
    recording = timeline.recording
    draft = recording.draft if recording.aligned else []
    zero = min(span.start for span in [*recording.worker[:1], *draft[:1]])
    events = list(_names(bool(draft)))
    events += [_slice(_named(span, WAITING), zero, WORKER, STEPS) for span in recording.worker]
    events += [_slice(_named(span, IDLE), zero, DRAFT, STEPS) for span in draft]
    events += [_slice(_round(r), zero, WORKER, ROUNDS) for r in timeline.rounds]
    starts = [span.start for span in recording.worker]
    for r in timeline.rounds:
        after = bisect.bisect_left(starts, r.wait.end)
        if r.exchange is not None and after < len(starts):
            events += _flows(r.step, r.send.start, r.exchange, starts[after], zero)
    return events


def write_trace(path: Path, timeline: Timeline, about: dict[str, Any]) -> None:
    """Write the file that the viewers open; ``about`` goes into it for people."""
    text = json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms", "otherData": about})
    path.write_text(text + "\n", encoding="utf8")


def _names(with_draft: bool) -> Iterator[Event]:
    processes = {WORKER: "vLLM worker (target)"} | ({DRAFT: "draft process"} if with_draft else {})
    for process, name in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    tracks = {(WORKER, ROUNDS): "rounds", (WORKER, STEPS): "steps", (DRAFT, STEPS): "drafting"}
    for (process, track), name in tracks.items():
        if process in processes:
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}


def _named(span: Span, waiting: str) -> Span:
    return Span(waiting if span.name == "receive" else span.name, span.start, span.end, span.details)


def _round(r: Round) -> Span:
    name = "hit" if r.is_hit else "miss"
    details = {
        "step": r.step,
        "accepted": [accepted for *_, accepted in r.verified],
        "verified": [verified for _, verified, _ in r.verified],
        "next_blocks": list(r.origins),
        "exposed_ms": r.exposed / 1e6,
        "waited_for_ms": {cause: time / 1e6 for cause, time in (r.causes() or {}).items()},
    }
    return Span(name, r.start, r.end, details)


def _slice(span: Span, zero: int, process: int, track: int) -> Event:
    event = {
        "ph": "X",
        "name": span.name,
        "cat": TEXTS.get(span.name, span.name),
        "pid": process,
        "tid": track,
        "ts": (span.start - zero) / 1e3,
        "dur": (span.end - span.start) / 1e3,
        "args": dict(span.details),
    }
    return event | ({"cname": COLOURS[span.name]} if span.name in COLOURS else {})


TEXTS = {phase.name: phase.text for phase in (*WORKER_PHASES, *DRAFT_PHASES)}


def _flows(step: int, sent: int, exchange: Exchange, going_on: int, zero: int) -> Iterator[Event]:
    """Two arrows, each from the start of one slice to that of another one, to which viewers bind them.

    Args:
        sent: when the worker began to send the outcome.
        going_on: when it went on with the reply.
    """
    arrows = (
        ("outcome", 2 * step, (WORKER, sent), (DRAFT, exchange.answering)),
        ("reply", 2 * step + 1, (DRAFT, exchange.replying), (WORKER, going_on)),
    )
    for name, number, (source, left), (destination, arrived) in arrows:
        common = {"name": name, "cat": "message", "id": number, "tid": STEPS}
        yield {"ph": "s", "pid": source, "ts": (left - zero) / 1e3, **common}
        yield {"ph": "f", "bp": "e", "pid": destination, "ts": (arrived - zero) / 1e3, **common}
