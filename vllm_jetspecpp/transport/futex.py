"""Sleep until another process changes a word of shared memory (Linux ``futex``)."""

from __future__ import annotations

import ctypes
import platform
import time

_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_WITHOUT_FUTEX_SLEEP = 0.0005
_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``expected``, at most ``timeout`` seconds.

    It may return early for no reason: look at the word again. The kernel compares and sleeps in one step, so a
    change between the caller's look and this call is not missed. On an unknown architecture it is a short sleep.
    """
    if _SYSCALL is None:
        time.sleep(min(timeout, _WITHOUT_FUTEX_SLEEP))
        return
    limit = _Timespec(int(timeout), int(timeout % 1 * 1e9))
    _libc.syscall(
        ctypes.c_long(_SYSCALL),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(expected),
        ctypes.byref(limit),
        None,
        ctypes.c_int(0),
    )


def wake(address: int) -> None:
    """Wake whoever sleeps on the word at ``address``; about 1 µs when nobody does."""
    if _SYSCALL is not None:
        _libc.syscall(
            ctypes.c_long(_SYSCALL),
            ctypes.c_void_p(address),
            ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(1),
            None,
            None,
            ctypes.c_int(0),
        )
