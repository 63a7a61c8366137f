"""Whether the process at the other end still runs."""

from __future__ import annotations

import os
import select


class Peer:
    """Holds a pidfd: unlike a pid it is never reused, and it tells a zombie from a running process."""

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None
        else:
            self._poll.register(self._fd, select.POLLIN)

    def alive(self) -> bool:
        """False from the moment the process ended, reaped or not."""
        return self._fd is not None and not self._poll.poll(0)

    def close(self) -> None:
        """Free the descriptor; the peer then counts as gone."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
