"""Worker and draft process on two hosts: one TCP connection, on which each end proves that it knows a secret.

The worker makes socket and secret; its keeper binds the socket to the address of the worker's Ray node, and Ray hands
address and secret to the draft process. Each end proves to the other that it knows the secret (``admission.py``), no
message is read before, and from then on nobody can connect. Messages are not encrypted: like Ray's own traffic they
belong on a private network.

A message is its length, eight bytes in network order, and the bytes of ``codec.py``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.admission import MAX_GUESTS, SECRET_BYTES, Door, introduce
from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch
from vllm_jetspecpp.transport.split import split_batch

MAX_TO_DRAFT_BYTES = 32 << 20
MAX_TO_WORKER_BYTES = 1 << 20
HANDSHAKE_SECONDS = 30.0
"""For the draft process; the worker drops sooner who does not answer."""

_LENGTH = struct.Struct("!q")
# A host that vanished says nothing: idle connections are probed, and data it never took ends the connection.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 60_000}


@dataclass(frozen=True)
class TcpListener:
    """A socket that is not bound yet, and the secret; for the keeper, which inherits the socket."""

    fd: int
    secret: str = field(repr=False)

    def listen(self, host: str) -> TcpHandle:
        """Listen on ``host``, an IPv4 address of this machine, and nowhere else.

        Raises:
            ValueError: ``host`` is no such address.
        """
        with socket.socket(fileno=os.dup(self.fd)) as listener:
            try:
                listener.bind((host, 0))
            except OSError as error:
                raise ValueError(
                    f"transport tcp listens on the address of the worker's Ray node, which must be an IPv4 address of "
                    f"this machine, got {host} ({error})"
                ) from error
            listener.listen(MAX_GUESTS)
            return TcpHandle(host, listener.getsockname()[1], self.secret)


@dataclass(frozen=True)
class TcpHandle:
    """All the draft process needs to connect."""

    host: str
    port: int
    secret: str = field(repr=False)
    """Hexadecimal, 32 bytes."""


class TcpWorkerEnd:
    """The vLLM worker's end; it listens until one draft process attached. One thread at a time.

    Args:
        send_timeout: seconds ``send`` waits when the draft process does not read.
        max_bytes: of a message; a larger one goes in pieces.
    """

    def __init__(self, send_timeout: float = 5.0, max_bytes: int = MAX_TO_DRAFT_BYTES) -> None:
        secret = secrets.token_bytes(SECRET_BYTES)
        self._door: Door | None = Door(secret)
        self.handle = TcpListener(self._door.fd, secret.hex())
        self._stream: _Stream | None = None
        self._send_timeout = send_timeout
        self._max_bytes = max_bytes

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that the keeper is to inherit."""
        return (self.handle.fd,)

    @property
    def attached(self) -> bool:
        """Whether the draft process has connected and proved itself; looks for it, without waiting."""
        if self._door is not None and (connection := self._door.look()) is not None:
            self._stream = _Stream(connection, MAX_TO_WORKER_BYTES)
            self._close_door()
        return self._stream is not None

    def send(self, batch: VerifiedBatch) -> None:
        """See :class:`~vllm_jetspecpp.transport.base.WorkerEnd`. What the kernel's buffers cannot hold waits.

        After a TimeoutError the connection is closed: part of a message may have been sent.
        """
        stream = self._open_stream()
        for piece in split_batch(batch, self._max_bytes):
            stream.send(codec.verified_bytes(piece), partial(codec.encode_verified, piece), self._send_timeout)

    def receive(self, step: int, timeout: float) -> DraftBatch:
        """See :class:`~vllm_jetspecpp.transport.base.WorkerEnd`."""
        stream = self._open_stream()
        deadline = time.monotonic() + timeout
        while (message := stream.receive(max(deadline - time.monotonic(), 0.0))) is not None:
            reply = codec.decode_draft(memoryview(message))
            if reply.step == step:
                return reply
        raise TimeoutError(f"no answer to step {step} in {timeout:g} s")

    def _open_stream(self) -> _Stream:
        if self._stream is None:
            raise TransportClosed("this end was closed, or no draft process is attached")
        return self._stream

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def close(self) -> None:
        """Close connection and listening socket."""
        self._close_door()
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class TcpDraftEnd:
    """The draft process's end. Attaching says that this process is ready to answer. One thread at a time.

    Raises:
        TransportClosed: the worker is gone, or does not take us for its draft process.
        ValueError: who listens there does not know the secret.
    """

    def __init__(self, handle: TcpHandle, timeout: float = HANDSHAKE_SECONDS) -> None:
        try:
            connection = socket.create_connection((handle.host, handle.port), timeout)
        except OSError as error:
            raise TransportClosed(f"no worker at {handle.host}:{handle.port} ({error})") from error
        try:
            introduce(connection, bytes.fromhex(handle.secret), f"{handle.host}:{handle.port}")
            self._stream = _Stream(connection, MAX_TO_DRAFT_BYTES)
        except BaseException:
            connection.close()
            raise

    def receive(self, timeout: float) -> VerifiedBatch | None:
        """See :class:`~vllm_jetspecpp.transport.base.DraftEnd`. Raises ValueError for a damaged message."""
        message = self._stream.receive(timeout)
        return None if message is None else codec.decode_verified(memoryview(message))

    def send(self, batch: DraftBatch) -> None:
        """See :class:`~vllm_jetspecpp.transport.base.DraftEnd`. Waits for room as long as the worker lives."""
        self._stream.send(codec.draft_bytes(batch), partial(codec.encode_draft, batch), float("inf"))

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()


class _Stream:
    """Whole messages over a connection whose peer proved itself.

    Args:
        max_bytes: the largest message that is taken; memory is asked for only after the length was checked.
    """

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        self._socket = connection
        self._max_bytes = max_bytes
        self._header = bytearray(_LENGTH.size)
        self._body: bytearray | None = None
        self._filled = 0
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, size: int, encode: Callable[[memoryview], None], timeout: float) -> None:
        """Send the ``size`` bytes that ``encode`` writes. Either error below closes the connection.

        Raises:
            TimeoutError: the other end did not take them in ``timeout`` seconds.
            TransportClosed: it is gone.
        """
        frame = memoryview(bytearray(_LENGTH.size + size))
        _LENGTH.pack_into(frame, 0, size)
        encode(frame[_LENGTH.size :])
        deadline = time.monotonic() + timeout
        with self._closing_on_error():
            while frame:
                try:
                    frame = frame[self._socket.send(frame) :]
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, deadline - time.monotonic()):
                        raise TimeoutError(
                            f"{size} bytes not taken in {timeout:g} s: the other end does not read"
                        ) from None

    def receive(self, timeout: float) -> bytearray | None:
        """The next message, or None when it is not complete in ``timeout`` seconds; what came of it is kept.

        Raises:
            TransportClosed: the other end is gone.
            ValueError: a length that cannot be; the connection is closed.
        """
        deadline = time.monotonic() + timeout
        with self._closing_on_error():
            while (message := self._read()) is None:
                if not self._wait(select.POLLIN, deadline - time.monotonic()):
                    return None
            return message

    def _read(self) -> bytearray | None:
        """A message if it is complete, reading all that has come so far."""
        while True:
            part = self._header if self._body is None else self._body
            if self._filled < len(part):
                try:
                    count = self._socket.recv_into(memoryview(part)[self._filled :])
                except BlockingIOError:
                    return None
                if not count:
                    raise ConnectionError(f"closed{' amid a message' if self._body or self._filled else ''}")
                self._filled += count
                continue
            self._filled = 0
            if self._body is not None:
                body, self._body = self._body, None
                return body
            (size,) = _LENGTH.unpack(self._header)
            if not 0 < size <= self._max_bytes:
                raise ValueError(f"a message of {size} bytes is announced, allowed are 1 to {self._max_bytes}")
            self._body = bytearray(size)

    def _wait(self, event: int, seconds: float) -> bool:
        """Whether the socket is ready, or broken, within ``seconds``."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds == float("inf") else max(seconds, 0.0) * 1000))

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """After an error nobody knows where a message starts. What the system reports becomes TransportClosed."""
        if self._socket.fileno() < 0:
            raise TransportClosed("this end was closed")
        try:
            yield
        except ValueError:
            self.close()
            raise
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError) and error.errno is None:  # ours; the system's means a host that is gone
                raise
            raise TransportClosed(f"the process at the other end is gone ({error})") from error

    def close(self) -> None:
        self._socket.close()
