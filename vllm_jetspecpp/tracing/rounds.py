"""Rounds, put together from the spans of both processes.

A round of the worker ends when it has the drafts of the next one in hand, and begins where the round before ended: in
between lie one verification, the message with its outcome, and the wait for the reply.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_jetspecpp.tracing.phases import OTHER, Piece, draft_pieces, within, worker_pieces
from vllm_jetspecpp.tracing.recording import Recording, Span

LATE, OUT, ANSWERING, BACK = "drafting not finished", "message out", "answer", "reply back"
CAUSES = (LATE, OUT, ANSWERING, BACK)
"""What the worker waits for, in the order in which it happens."""


@dataclass(frozen=True)
class Exchange:
    """How one outcome met its reply in the draft process; nanoseconds."""

    asked: int
    """It looks for a message from here on."""
    received: int
    answering: int
    """It begins to answer."""
    replying: int
    """It begins to send the reply."""
    next_received: int | None
    """The next message; None after the last."""


@dataclass(frozen=True)
class Round:
    """One round of the worker; nanoseconds."""

    step: int
    start: int
    end: int
    send: Span
    wait: Span
    verified: tuple[tuple[int, int, int], ...]
    """Slot, draft tokens verified and accepted, for every block that was under verification."""
    origins: tuple[str, ...]
    """Where the next blocks come from, for the same requests: ``hit``, ``fallback``, or another."""
    phases: dict[str, int]
    """Time in each phase of the worker; with OTHER they add up to the round."""
    exchange: Exchange | None
    """None where the processes' clocks differ, or the draft process's recording ends before."""

    @property
    def duration(self) -> int:
        """Of the whole round."""
        return self.end - self.start

    @property
    def num_committed(self) -> int:
        """Tokens: accepted drafts and one bonus token each."""
        return sum(accepted + 1 for _, _, accepted in self.verified)

    @property
    def num_accepted(self) -> int:
        """k, summed over the requests."""
        return sum(accepted for _, _, accepted in self.verified)

    @property
    def is_hit(self) -> bool:
        """Whether every outcome had been foreseen: else the reply waits for a fallback block."""
        return bool(self.origins) and all(origin == "hit" for origin in self.origins)

    @property
    def is_copied(self) -> bool:
        """Whether nothing had to be drafted for the reply, but not all of it was foreseen: some blocks are copied."""
        return "copied" in self.origins and not {"first", "fallback"} & set(self.origins)

    @property
    def exposed(self) -> int:
        """The worker's wait for the reply, after it had nothing else to do."""
        return self.wait.end - self.wait.start

    def causes(self) -> dict[str, int] | None:
        """The wait by what the draft process did meanwhile; the parts add up to it."""
        if self.exchange is None:
            return None
        edges = [self.wait.start]
        for edge in (self.exchange.asked, self.exchange.received, self.exchange.replying, self.wait.end):
            edges.append(min(max(edge, edges[-1]), self.wait.end))
        return {name: b - a for name, (a, b) in zip(CAUSES, pairwise(edges), strict=True)}

    def communication(self) -> int | None:
        """T_comm: the way out, from sending on or from when the draft process listens, and the way back.

        The way back counts from when the worker listens: before, it hides behind the worker's own work.
        """
        if self.exchange is None:
            return None
        out = self.exchange.received - max(self.send.start, self.exchange.asked)
        return max(out, 0) + self.wait.end - max(self.exchange.replying, self.wait.start)


@dataclass(frozen=True)
class DraftRound:
    """The draft process from one outcome to the next: it answers, commits, foresees and drafts; nanoseconds."""

    step: int
    """Of the outcome it begins with."""
    start: int
    end: int
    phases: dict[str, int]
    """Time in each of its phases; with OTHER they add up."""
    was_hit: bool

    @property
    def duration(self) -> int:
        """With the wait for the next outcome."""
        return self.end - self.start


class Pieces:
    """Pieces of time in order, to be asked for a stretch of them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.all = pieces
        self._ends = [piece.end for piece in pieces]

    def between(self, start: int, end: int) -> Iterator[Piece]:
        """Those that lie in a stretch of time, if only in part."""
        for piece in self.all[bisect.bisect_right(self._ends, start) :]:
            if piece.start >= end:
                return
            yield piece

    def phases(self, start: int, end: int) -> dict[str, int]:
        """Time in each phase; what no piece covers is OTHER."""
        sums = within(self.between(start, end), start, end)
        return sums | {OTHER: end - start - sum(sums.values())}


@dataclass(frozen=True)
class Timeline:
    """A recording, understood."""

    recording: Recording
    worker: Pieces
    draft: Pieces
    rounds: list[Round]

    @classmethod
    def of(cls, recording: Recording) -> Timeline:
        """Put the rounds together."""
        worker = Pieces(worker_pieces(recording.worker))
        exchanges = find_exchanges(recording.draft) if recording.aligned else {}
        rounds = list(_rounds(recording.worker, worker, exchanges))
        return cls(recording, worker, Pieces(draft_pieces(recording.draft)), rounds)

    def draft_rounds(self) -> Iterator[DraftRound]:
        """Those of the draft process that follow the outcomes of :attr:`rounds` and end with another one."""
        for r in self.rounds:
            if r.exchange is not None and r.exchange.next_received is not None:
                start, end = r.exchange.received, r.exchange.next_received
                yield DraftRound(r.step, start, end, self.draft.phases(start, end), r.is_hit)


def find_exchanges(draft: Iterable[Span]) -> dict[int, Exchange]:
    """By step. A draft process that follows a killed one starts no step anew: the worker counts them."""
    received: dict[int, Span] = {}
    answering: dict[int, int] = {}
    replying: dict[int, int] = {}
    following: dict[int, int] = {}
    before = None
    for span in draft:
        if span.name == "receive" and "step" in span.details:
            received[span.details["step"]] = span
            if before is not None:
                following[before] = span.end
            before = span.details["step"]
        elif span.name == "answer" and "step" in span.details:
            answering[span.details["step"]] = span.start
        elif span.name == "send" and "step" in span.details:
            replying[span.details["step"]] = span.start
    return {
        step: Exchange(received[step].start, received[step].end, answering[step], start, following.get(step))
        for step, start in replying.items()
        if step in received and step in answering
    }


def _rounds(spans: Iterable[Span], pieces: Pieces, exchanges: dict[int, Exchange]) -> Iterator[Round]:
    """A round for each reply that follows another one with a verified block between."""
    sent: Span | None = None
    former: Span | None = None
    for span in spans:
        if span.name == "send" and "step" in span.details:
            if sent is not None and (former is None or former.start < sent.start):
                former = None  # that message got no reply: no drafts were in hand
            sent = span
        elif span.name == "receive" and sent is not None and span.details.get("step") == sent.details["step"]:
            verified = tuple(tuple(entry) for entry in sent.details["verified"])
            if former is not None and verified:
                drafts = {slot: origin for slot, origin, _ in span.details["drafts"]}
                origins = tuple(drafts[slot] for slot, *_ in verified if slot in drafts)
                phases = pieces.phases(former.end, span.end)
                exchange = exchanges.get(span.details["step"])
                step = span.details["step"]
                yield Round(step, former.end, span.end, sent, span, verified, origins, phases, exchange)
            former = span
