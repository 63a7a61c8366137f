"""A ring of records in shared memory: one process writes, one reads, nobody locks.

``head`` counts bytes ever written, ``tail`` bytes ever read. A record is one 64-byte line with its length, then its
bytes; one that would cross the end of the memory starts at the front instead, behind a WRAP mark. The writer fills a
record first and moves ``head`` after, by one aligned 8-byte store, with a fence between: x86 would keep that order by
itself, ARM would not.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

from vllm_jetspecpp.transport import futex
from vllm_jetspecpp.transport.base import TransportClosed

LINE = 64
CONTROL_BYTES = 3 * LINE
_HEAD, _TAIL, _CLOSED = 0, LINE // 8, 2 * LINE // 8
_WRAP = -1
_LOOK_AT_PEER = 0.1
_FULL_SLEEP = 0.0002


class _Fence:
    """A full memory barrier from Python: no access passes a release that an acquire follows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


class Ring:
    """One direction of a connection.

    Args:
        control: CONTROL_BYTES bytes, zero at first, on a 64-byte boundary.
        data: the ring's memory; its length a multiple of 64.
        peer_alive: whether the process at the other end runs.
        spin: seconds to look for a record before sleeping. Sleeping costs a wake-up of some 50 µs, spinning a core: so
            who waited in vain sleeps at once the next time.
    """

    def __init__(self, control: memoryview, data: memoryview, peer_alive: Callable[[], bool], spin: float) -> None:
        self._control = control.cast("q")
        self._data = data
        self._lengths = data.cast("q")
        self._capacity = len(data)
        self._peer_alive = peer_alive
        self._spin = spin
        self._idle = False
        self._record_end = 0
        self._fence = _Fence()
        self._word = ctypes.addressof(ctypes.c_char.from_buffer(control))  # low half of head: little-endian

    @property
    def max_record(self) -> int:
        """Largest record that always fits once the ring is empty, wherever it stands."""
        return self._capacity // 2 - LINE

    def reserve(self, size: int, timeout: float) -> memoryview:
        """``size`` writable bytes that ``commit`` will publish.

        Raises:
            TimeoutError: the reader has not made room in time.
            TransportClosed: the reader is gone.
            ValueError: more than ``max_record``.
        """
        if size > self.max_record:
            raise ValueError(f"a record of {size} bytes does not fit, at most {self.max_record}")
        deadline = time.monotonic() + timeout
        while (record := self._try_reserve(size)) is None:
            self._check_open()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no room for {size} bytes in {timeout:g} s: the other end does not read")
            time.sleep(_FULL_SLEEP)
        return record

    def _try_reserve(self, size: int) -> memoryview | None:
        head = self._control[_HEAD]
        need = LINE + -(-size // LINE) * LINE
        offset = head % self._capacity
        skip = self._capacity - offset if need > self._capacity - offset else 0
        if head + skip + need - self._control[_TAIL] > self._capacity:
            return None
        if skip:
            self._lengths[offset // 8] = _WRAP
            offset = 0
        self._lengths[offset // 8] = size
        self._record_end = head + skip + need
        return self._data[offset + LINE : offset + LINE + size]

    def commit(self) -> None:
        """Publish the reserved record and wake the reader."""
        self._fence()
        self._control[_HEAD] = self._record_end
        futex.wake(self._word)

    def wait(self, timeout: float) -> bool:
        """Whether there is a record to read, waiting at most ``timeout`` seconds for one.

        Raises:
            TransportClosed: there is none and the writer is gone.
        """
        now = time.monotonic()
        deadline, spin_end = now + timeout, now + (0.0 if self._idle else min(timeout, self._spin))
        while (head := self._control[_HEAD]) == self._control[_TAIL]:
            now = time.monotonic()
            if now < spin_end:
                os.sched_yield()
                continue
            self._check_open()
            if now >= deadline:
                self._idle = True
                return False
            futex.wait(self._word, head & 0xFFFF_FFFF, min(deadline - now, _LOOK_AT_PEER))
        self._idle = False
        return True

    def peek(self) -> memoryview:
        """The oldest record; valid until ``consume``. Call it after ``wait`` said there is one.

        Raises:
            ValueError: the ring is damaged.
        """
        self._fence()
        tail = self._control[_TAIL]
        offset = tail % self._capacity
        if self._lengths[offset // 8] == _WRAP:
            tail += self._capacity - offset
            offset = 0
        size = self._lengths[offset // 8]
        end = tail + LINE + -(-size // LINE) * LINE
        if not 0 <= size <= self.max_record or end > self._control[_HEAD]:
            raise ValueError(f"damaged ring: a record of {size} bytes at {tail}, written up to {self._control[_HEAD]}")
        self._record_end = end
        return self._data[offset + LINE : offset + LINE + size]

    def consume(self) -> None:
        """Free the record that ``peek`` gave."""
        self._fence()
        self._control[_TAIL] = self._record_end

    def mark_closed(self) -> None:
        """Tell the other end that no more will be written or read."""
        self._control[_CLOSED] = 1
        futex.wake(self._word)

    def _check_open(self) -> None:
        if self._control[_CLOSED]:
            raise TransportClosed("the other end closed the connection")
        if not self._peer_alive():
            raise TransportClosed("the process at the other end is gone")

    def release(self) -> None:
        """Let go of the memory; the ring is of no more use."""
        self._lengths.release()
        self._control.release()
        self._data.release()
