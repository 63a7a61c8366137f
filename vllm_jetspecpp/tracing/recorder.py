"""Times calls of one process from outside and appends them to a file of its own.

Nothing here is imported where nothing is traced, and what is timed does not know it. The clock is ``perf_counter_ns``:
on Linux CLOCK_MONOTONIC, one for all processes since the machine started.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.jetspecpp")

Details = Mapping[str, Any]
MAX_BUFFERED = 256
"""Spans in memory, some ten rounds: all that is lost when the process is killed. Writing them takes about half a
millisecond and is a span itself."""
MAX_BYTES = 1 << 28
"""Of a file; then recording ends, so that a server that was left on does not fill its disk."""
IDLE_SECONDS = 0.2
"""After so long without a span the buffer is written by a thread: a server that is stopped kills its draft process."""
FLUSH = "recorder"
NOTHING: Details = {}


def boot_id() -> str:
    """Of the running kernel: recordings with the same one have the same clock. Empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def check_directory(folder: str) -> None:
    """Raise ValueError unless ``folder`` is one that files can be written to."""
    if not os.path.isdir(folder):
        raise ValueError(f"trace_directory must be an existing folder, got {folder!r}")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"trace_directory must be a folder that can be written to, got {folder!r} ({error.strerror})"
        ) from error


class Recorder:
    """Appends spans, one JSON list a line: name, start and end in nanoseconds, details. The first line is a header.

    One thread records; after ``close`` or a failure to write, calls go on untimed.

    Args:
        path: of a file that is not there yet.
        header: plain values that say what is recorded.
        settle: waits for a device that computes on its own, at the end of each span.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, header: Details, settle: Callable[[], None] | None = None) -> None:
        self._file = path.open("x", encoding="utf8")
        self._settle = settle
        self._buffer: list[tuple[str, int, int, Details]] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._room = MAX_BYTES
        self.on = True
        self._write([json.dumps({"pid": os.getpid(), "boot": boot_id(), "began": time.time(), **header})])
        self._thread = threading.Thread(target=self._flush_when_idle, name="jetspecpp-recorder", daemon=True)
        self._thread.start()

    def add(self, name: str, start: int, end: int, details: Details = NOTHING) -> None:
        """Record one span (nanoseconds); it must lie inside or outside of every other one of this process."""
        self._buffer.append((name, start, end, details))
        if len(self._buffer) >= MAX_BUFFERED:
            self._flush_now()

    def timed(
        self, name: str, function: Callable[..., Any], describe: Callable[..., Details | None] | None = None
    ) -> Callable[..., Any]:
        """``function``, each of whose calls is recorded.

        Args:
            describe: result and arguments of a call that returned → details of the span; None leaves it out.
        """

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if not self.on:
                return function(*args, **options)
            start = time.perf_counter_ns()
            try:
                result = function(*args, **options)
                if self._settle is not None:
                    self._settle()
                end = time.perf_counter_ns()
            except BaseException:
                self.add(name, start, time.perf_counter_ns())
                raise
            details = NOTHING if describe is None else describe(result, *args)
            if details is not None:
                self.add(name, start, end, details)
            return result

        return timed

    def wrap(
        self,
        owner: Any,
        attribute: str,
        name: str | None = None,
        describe: Callable[..., Details | None] | None = None,
    ) -> None:
        """Replace a method of one object, or a function of a module, by itself timed."""
        setattr(owner, attribute, self.timed(name or attribute.strip("_"), getattr(owner, attribute), describe))

    def _flush_now(self) -> None:
        start = time.perf_counter_ns()
        self.flush()
        self._buffer.append((FLUSH, start, time.perf_counter_ns(), NOTHING))

    def flush(self) -> None:
        """Write what is in memory."""
        with self._lock:
            spans, self._buffer = self._buffer, []
            if self.on and spans:
                self._write([json.dumps(span, separators=(",", ":")) for span in spans])

    def _write(self, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        self._room -= len(text)
        try:
            if self._room < 0:
                raise OSError(f"the file has {MAX_BYTES >> 20} MiB")
            self._file.write(text)
            self._file.flush()
        except OSError as error:  # a full disk, say: what is traced goes on
            self.on = False
            logger.warning("the step recorder stopped: %s", error)

    def _flush_when_idle(self) -> None:
        newest = None
        while not self._stopping.wait(IDLE_SECONDS):
            if self._buffer and self._buffer[-1] is newest:
                self.flush()
            newest = self._buffer[-1] if self._buffer else None

    def close(self) -> None:
        """Write the rest; may be called twice."""
        self._stopping.set()
        self.flush()
        self.on = False
        self._thread.join()
        self._file.close()


def open_recorder(path: str, header: Details, device: str) -> Recorder | None:
    """A recorder for what computes on ``device``; None, with one warning, where its file cannot be made."""
    try:
        return Recorder(Path(path), header, settle_on(device))
    except OSError as error:
        logger.warning("the step recorder is off: %s", error)
        return None


def settle_on(device: str) -> Callable[[], None] | None:
    """Waits until a GPU has done what it was told, unless that is being captured in a graph; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    def settle() -> None:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    return settle
