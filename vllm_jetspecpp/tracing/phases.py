"""The phases of a round: nested calls become pieces of time, each of which belongs to one phase alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_jetspecpp.tracing.recorder import FLUSH
from vllm_jetspecpp.tracing.recording import Span


@dataclass(frozen=True)
class Phase:
    """What a process does for a while."""

    name: str
    group: str
    """The term of the paper's equations that it counts towards."""
    text: str
    colour: str


VERIFY, HOST, COMM, EXPOSED = "T_verify", "T_host", "T_comm", "exposed"
PRED, PASS, DRAFT_HOST, ANSWER, IDLE, RECORDER = "T_pred", "T_pass", "draft host", "answer", "idle", "recorder"
OTHER = "other"

WORKER_PHASES = (
    Phase("forward", VERIFY, "target's forward", "#4c78a8"),
    Phase("logits", VERIFY, "its logits", "#6f9bc8"),
    Phase("sample", VERIFY, "rejection sampler", "#9ecae9"),
    Phase("engine", HOST, "scheduler, executor, front end", "#bab0ac"),
    Phase("prepare", HOST, "inputs of the step", "#c9b8a5"),
    Phase("bookkeeping", HOST, "results of the step", "#a89f91"),
    Phase("message", HOST, "message made", "#8c857b"),
    Phase("collect", HOST, "drafts checked", "#d8d2ca"),
    Phase("send", COMM, "message sent", "#b279a2"),
    Phase("wait", EXPOSED, "waits for drafts", "#ffffff"),
    Phase(FLUSH, RECORDER, "the recorder writes", "#dddddd"),
)
DRAFT_PHASES = (
    Phase("lookup", ANSWER, "outcome looked up", "#e45756"),
    Phase("fallback", ANSWER, "fallback drafted after a miss", "#b5322f"),
    Phase("answer", ANSWER, "rest of the answer", "#f2a09f"),
    Phase("reply", COMM, "reply sent", "#b279a2"),
    Phase("commit", DRAFT_HOST, "true states committed", "#9d755d"),
    Phase("foresight", PRED, "adapter and decoder: foresight", "#f58518"),
    Phase("selection", DRAFT_HOST, "outcomes selected", "#eeca3b"),
    Phase("pass", PASS, "draft pass", "#54a24b"),
    Phase("refresh", PRED, "adapter and decoder: refresh", "#ffbf79"),
    Phase("branches", DRAFT_HOST, "rest of the drafting", "#88d27a"),
    Phase("store", DRAFT_HOST, "drafts stored", "#72b7b2"),
    Phase("work", DRAFT_HOST, "rest of the round", "#cfe8c9"),
    Phase("idle", IDLE, "waits for an outcome", "#ffffff"),
    Phase(FLUSH, RECORDER, "the recorder writes", "#dddddd"),
)
PHASE_OF_CALL = {
    "execute_model": "prepare",
    "sample_tokens": "bookkeeping",
    "take_drafts": "collect",
    "foresee": "selection",
    "draft_pass": "pass",
    "draft_outcomes": "branches",
    "foresee_and_draft": "work",
}
"""For calls that are not named as the phase that their own time, without what they call, belongs to."""
PHASE_OF_DRAFT_CALL = PHASE_OF_CALL | {"receive": "idle", "send": "reply"}
PHASE_OF_WORKER_CALL = PHASE_OF_CALL | {"receive": "wait"}


@dataclass(frozen=True)
class Piece:
    """A stretch of time in one phase."""

    phase: str
    start: int
    end: int


def phase_of(path: Sequence[str], of_call: dict[str, str]) -> str:
    """Phase of the innermost of the calls that are under way, outermost first."""
    name = path[-1]
    if name == FLUSH:
        return FLUSH
    if "fallback" in path:
        return "fallback"
    if name == "simulate_verification":
        return "foresight" if "foresee" in path else "refresh"
    return of_call.get(name, name)


def worker_pieces(spans: Iterable[Span]) -> list[Piece]:
    """Pieces of the worker's time; spans as :class:`~vllm_jetspecpp.tracing.recording.Recording` has them."""
    return list(_pieces(spans, PHASE_OF_WORKER_CALL))


def draft_pieces(spans: Iterable[Span]) -> list[Piece]:
    """Pieces of the draft process's time."""
    return list(_pieces(spans, PHASE_OF_DRAFT_CALL))


def _pieces(spans: Iterable[Span], of_call: dict[str, str]) -> Iterator[Piece]:
    """Flatten nested spans: at any time the innermost call counts."""
    stack: list[Span] = []
    now = 0

    def until(time: int) -> Iterator[Piece]:
        nonlocal now
        if stack and time > now:
            yield Piece(phase_of([span.name for span in stack], of_call), now, time)
        now = max(now, time)

    for span in spans:
        while stack and stack[-1].end <= span.start:
            yield from until(stack[-1].end)
            stack.pop()
        yield from until(span.start)
        stack.append(span)
    while stack:
        yield from until(stack[-1].end)
        stack.pop()


def within(pieces: Iterable[Piece], start: int, end: int) -> dict[str, int]:
    """Nanoseconds of each phase between two times."""
    sums: dict[str, int] = {}
    for piece in pieces:
        time = min(piece.end, end) - max(piece.start, start)
        if time > 0:
            sums[piece.phase] = sums.get(piece.phase, 0) + time
    return sums
