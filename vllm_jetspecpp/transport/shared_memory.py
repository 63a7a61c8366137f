"""Worker and draft process on one host: two rings in one nameless piece of memory.

The worker makes a memfd, and the draft process opens it as ``/proc/<pid>/fd/<fd>``, which the kernel allows to the
same user only. Nothing has a name in ``/dev/shm``, so nothing is left behind, however either process ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import DraftBatch, VerifiedBatch
from vllm_jetspecpp.transport.peer import Peer
from vllm_jetspecpp.transport.ring import CONTROL_BYTES, Ring
from vllm_jetspecpp.transport.split import split_batch

TO_DRAFT_BYTES = 64 << 20
TO_WORKER_BYTES = 1 << 20
SPIN_SECONDS = 0.05
"""Longer than one verification of a small model: within a stream of steps neither end sleeps, an idle server does."""

_MAGIC = 0x4A53_5050_4D45_4D31
_HEADER = struct.Struct("=2q")  # magic, nonce
_DRAFT_PID = 16  # offset, in bytes
_TO_DRAFT, _TO_WORKER = 256, 512  # offsets of the control blocks of the rings
_HEADER_BYTES = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class SharedMemoryHandle:
    """All the draft process needs to find the memory; plain integers."""

    pid: int
    """Of the worker."""
    fd: int
    """Of the memfd, in the worker."""
    nonce: int
    """Says that the memory is the one meant, should pid and fd be in use again."""
    to_draft_bytes: int
    to_worker_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the whole memory."""
        return _HEADER_BYTES + self.to_draft_bytes + self.to_worker_bytes


class _Region:
    """The mapped memory and its two rings."""

    def __init__(self, fd: int, handle: SharedMemoryHandle, peer_alive: Callable[[], bool], spin: float) -> None:
        self._map = mmap.mmap(fd, handle.size)
        self.bytes = memoryview(self._map)
        middle = _HEADER_BYTES + handle.to_draft_bytes
        self.to_draft = self._ring(_TO_DRAFT, self.bytes[_HEADER_BYTES:middle], peer_alive, spin)
        self.to_worker = self._ring(_TO_WORKER, self.bytes[middle:], peer_alive, spin)
        self.closed = False

    def _ring(self, control: int, data: memoryview, peer_alive: Callable[[], bool], spin: float) -> Ring:
        return Ring(self.bytes[control : control + CONTROL_BYTES], data, peer_alive, spin)

    @property
    def draft_pid(self) -> int:
        """0 until the draft process attached."""
        return struct.unpack_from("=q", self.bytes, _DRAFT_PID)[0]

    def close(self) -> None:
        for ring in (self.to_draft, self.to_worker):
            ring.mark_closed()
            ring.release()
        self.bytes.release()
        self._map.close()
        self.closed = True


class SharedMemoryWorkerEnd:
    """The vLLM worker's end; it owns the memory. One thread at a time.

    Args:
        send_timeout: seconds ``send`` waits for room when the draft process does not read.
        spin: see :class:`Ring`.
    """

    def __init__(
        self,
        to_draft_bytes: int = TO_DRAFT_BYTES,
        to_worker_bytes: int = TO_WORKER_BYTES,
        send_timeout: float = 5.0,
        spin: float = SPIN_SECONDS,
    ) -> None:
        for name, size in (("to_draft_bytes", to_draft_bytes), ("to_worker_bytes", to_worker_bytes)):
            if size <= 0 or size % mmap.PAGESIZE:
                raise ValueError(f"{name} must be a multiple of {mmap.PAGESIZE}, got {size}")
        self._fd = os.memfd_create("vllm_jetspecpp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._fd, 0o600)
        self.handle = SharedMemoryHandle(os.getpid(), self._fd, secrets.randbits(62), to_draft_bytes, to_worker_bytes)
        # Its pages now: a machine without memory for them fails here, and not with SIGBUS where they are first written.
        os.posix_fallocate(self._fd, 0, self.handle.size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)  # nobody can cut the memory under the other end
        self._send_timeout = send_timeout
        self._peer: Peer | None = None
        self._region = _Region(self._fd, self.handle, self._peer_alive, spin)
        _HEADER.pack_into(self._region.bytes, 0, _MAGIC, self.handle.nonce)

    @property
    def inherited(self) -> tuple[int, ...]:
        """None: the draft process finds the memory by the worker's process id."""
        return ()

    @property
    def attached(self) -> bool:
        """Whether the draft process has opened the memory: it answers from now on."""
        return self._region.draft_pid != 0

    def _peer_alive(self) -> bool:
        if self._peer is None:
            if not self.attached:
                return True  # not there yet: whoever starts it watches the start
            self._peer = Peer(self._region.draft_pid)
        return self._peer.alive()

    def send(self, batch: VerifiedBatch) -> None:
        """See :class:`~vllm_jetspecpp.transport.base.WorkerEnd`. What is too big for the ring goes in pieces."""
        self._check_open()
        ring = self._region.to_draft
        for piece in split_batch(batch, ring.max_record):
            with ring.reserve(codec.verified_bytes(piece), self._send_timeout) as record:
                codec.encode_verified(piece, record)
            ring.commit()

    def receive(self, step: int, timeout: float) -> DraftBatch:
        """See :class:`~vllm_jetspecpp.transport.base.WorkerEnd`."""
        self._check_open()
        ring = self._region.to_worker
        deadline = time.monotonic() + timeout
        while ring.wait(max(deadline - time.monotonic(), 0.0)):
            with ring.peek() as record:
                reply = codec.decode_draft(record)
            ring.consume()
            if reply.step == step:
                return reply
        raise TimeoutError(f"no answer to step {step} in {timeout:g} s")

    def _check_open(self) -> None:
        if self._region.closed:
            raise TransportClosed("this end was closed")

    def close(self) -> None:
        """Unmap the memory and tell the draft process."""
        if not self._region.closed:
            self._region.close()
            os.close(self._fd)
            if self._peer is not None:
                self._peer.close()


class SharedMemoryDraftEnd:
    """The draft process's end. Attaching says that this process is ready to answer. One thread at a time.

    Raises:
        TransportClosed: the worker is gone.
        ValueError: what stands there is not the memory of ``handle``.
    """

    def __init__(self, handle: SharedMemoryHandle, spin: float = SPIN_SECONDS) -> None:
        self._peer = Peer(handle.pid)
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
        except FileNotFoundError as error:
            raise TransportClosed(f"worker {handle.pid} or its memory is gone") from error
        try:
            _check_memory(fd, handle)
            self._region = _Region(fd, handle, self._peer.alive, spin)
        finally:
            os.close(fd)
        struct.pack_into("=q", self._region.bytes, _DRAFT_PID, os.getpid())

    def receive(self, timeout: float) -> VerifiedBatch | None:
        """See :class:`~vllm_jetspecpp.transport.base.DraftEnd`. Raises ValueError for a damaged message."""
        ring = self._region.to_draft
        if not ring.wait(timeout):
            return None
        with ring.peek() as record:
            batch = codec.decode_verified(record)
        ring.consume()
        return batch

    def send(self, batch: DraftBatch) -> None:
        """See :class:`~vllm_jetspecpp.transport.base.DraftEnd`. Waits for room as long as the worker lives."""
        ring = self._region.to_worker
        with ring.reserve(codec.draft_bytes(batch), float("inf")) as record:
            codec.encode_draft(batch, record)
        ring.commit()

    def close(self) -> None:
        """Unmap the memory and tell the worker."""
        if not self._region.closed:
            self._region.close()
            self._peer.close()


def _check_memory(fd: int, handle: SharedMemoryHandle) -> None:
    size = os.fstat(fd).st_size
    if size != handle.size:
        raise ValueError(f"the memory of worker {handle.pid} has {size} bytes, {handle.size} were promised")
    magic, nonce = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    if magic != _MAGIC or nonce != handle.nonce:
        raise ValueError(f"file {handle.fd} of process {handle.pid} is not the memory of this connection")
