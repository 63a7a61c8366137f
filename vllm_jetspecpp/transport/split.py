"""One big message as several small ones: what a prefill does to a ring of fixed size."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right

from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.messages import NO_BLOCK, Verified, VerifiedBatch


def split_batch(batch: VerifiedBatch, max_bytes: int) -> list[VerifiedBatch]:
    """Messages of at most ``max_bytes`` each that mean the same as ``batch``, to be sent in this order.

    All keep the step. Early pieces look like prefill chunks: positions below a cut, nothing wanted. The last one
    alone wants drafts: it has every anchor and outcome, so there is still one answer a step. Slots are released and
    blocks overwritten in the first piece (they may belong to a new request by now), and a request resets its slot in
    its first piece. Block ids go with every piece.

    Raises:
        ValueError: ``max_bytes`` cannot hold one position, or all anchors at once.
    """
    if codec.verified_bytes(batch) <= max_bytes:
        return [batch]
    pieces = _Pieces(batch, max_bytes)
    anchors = []
    for request in batch.requests:
        if request.wants_draft:
            early, anchor = _cut(request, request.anchor_position)
            anchors.append(anchor)
            if early is not None:
                pieces.add(early)
        else:
            pieces.add(request)
    pieces.flush()
    if anchors:
        pieces.add_whole(pieces.take(tuple(anchors)))
    return pieces.done


class _Pieces:
    """Fills one message after the other."""

    def __init__(self, batch: VerifiedBatch, max_bytes: int) -> None:
        self._rest = dataclasses.replace(batch, requests=())
        self._max_bytes = max_bytes
        self._requests: list[Verified] = []
        self.done: list[VerifiedBatch] = []

    def take(self, requests: tuple[Verified, ...]) -> VerifiedBatch:
        """A piece with ``requests``; the first one also has what belongs to no request."""
        rest, self._rest = self._rest, dataclasses.replace(self._rest, released=(), overwritten=())
        return dataclasses.replace(rest, requests=requests)

    def add(self, request: Verified) -> None:
        """Put ``request`` into the present piece as far as it goes, and the rest into the next ones."""
        rest: Verified | None = request
        while rest is not None:
            used = codec.verified_bytes(dataclasses.replace(self._rest, requests=tuple(self._requests)))
            head, rest = _fill(rest, self._max_bytes - used)
            if head is not None:
                self._requests.append(head)
            elif not self._requests:
                raise ValueError(f"a message of {self._max_bytes} bytes cannot hold one position of states")
            if rest is not None:
                self.flush()

    def flush(self) -> None:
        """End the present piece."""
        if self._requests:
            self.done.append(self.take(tuple(self._requests)))
            self._requests = []

    def add_whole(self, piece: VerifiedBatch) -> None:
        """Append a piece that must not be split."""
        if codec.verified_bytes(piece) > self._max_bytes:
            raise ValueError(f"a message of {self._max_bytes} bytes cannot hold {len(piece.requests)} anchors")
        self.done.append(piece)


def _fill(request: Verified, room: int) -> tuple[Verified | None, Verified | None]:
    """The longest part of ``request`` that fits ``room`` bytes, and what is left; either may be None."""

    def size(position: int) -> int:
        num_tokens, num_states = _counts_below(request, position)
        return codec.request_bytes(num_tokens, num_states, codec.state_bytes(request), len(request.block_ids))

    if size(_end(request)) <= room:
        return request, None
    positions = range(_start(request) + 1, _end(request))
    return _cut(request, _start(request) + bisect_right(positions, room, key=size))


def _cut(request: Verified, position: int) -> tuple[Verified | None, Verified]:
    """``request`` below ``position``, as a prefill chunk (None if nothing is there), and from it on."""
    num_tokens, num_states = _counts_below(request, position)
    if not num_tokens and not num_states:
        return None, request
    head = dataclasses.replace(
        request,
        tokens=request.tokens[:num_tokens],
        states=request.states[:num_states],
        num_accepted=NO_BLOCK,
        num_verified=0,
        wants_draft=False,
    )
    tail = dataclasses.replace(
        request,
        token_start=request.token_start + num_tokens,
        tokens=request.tokens[num_tokens:],
        state_start=request.state_start + num_states,
        states=request.states[num_states:],
        reset=False,
    )
    return head, tail


def _counts_below(request: Verified, position: int) -> tuple[int, int]:
    num_tokens = min(max(position - request.token_start, 0), request.tokens.shape[0])
    num_states = min(max(position - request.state_start, 0), request.states.shape[0])
    return num_tokens, num_states


def _start(request: Verified) -> int:
    starts = [s for s, n in _spans(request) if n] or [request.token_start]
    return min(starts)


def _end(request: Verified) -> int:
    return max((s + n for s, n in _spans(request)), default=0)


def _spans(request: Verified) -> tuple[tuple[int, int], tuple[int, int]]:
    return (request.token_start, request.tokens.shape[0]), (request.state_start, request.states.shape[0])
