"""The worker's counts in a small file, for ``/metrics``: the worker writes it, API servers read it when scraped.

vLLM sends to its API servers what the scheduler counts, and has no way for counts of a worker; its statistics of KV
connectors come from workers, but need a connector. A file needs no connection, survives either side, and any number
of API servers may read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.jetspecpp")

INTERVAL = 1.0
"""Seconds between two looks for changes; each costs well under a millisecond, and nothing in the steps."""
MAX_BYTES = 1 << 20
_writers: set[MetricsWriter] = set()
"""Those of this process."""


class MetricsWriter:
    """Keeps ``DIRECTORY/engine-N.json`` up to date from a thread of its own, until ``close``.

    What goes wrong is logged once and never raised.
    """

    def __init__(self, directory: str, model_name: str, engine: int, read: Callable[[], dict[str, Any]]) -> None:
        """Write for the first time and go on.

        Args:
            directory: where API servers look for it; somebody else's to make.
            model_name: label of vLLM's own metrics, the served name.
            engine: label of vLLM's own metrics, the data-parallel rank.
            read: method that returns the counts as plain values; called from the thread, and not kept alive by it.
        """
        self._path = Path(directory, f"engine-{engine}.json")
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self._read = weakref.WeakMethod(read)
        self._written: str | None = None
        self._has_failed = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.flush()
        _writers.add(self)
        self._thread = threading.Thread(target=self._run, name="jetspecpp-metrics", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Write now, if anything changed."""
        with self._lock:
            read = self._read()
            if read is None:  # an engine that was dropped without a shutdown
                self._stopping.set()
                return
            try:
                text = json.dumps({**self._labels, "counts": read()})
                if text != self._written:
                    draft = self._path.with_suffix(".tmp")
                    draft.write_text(text)
                    draft.rename(self._path)  # a reader sees the former file or this one
                    self._written = text
            except Exception as error:  # a full disk, a directory that is gone: serving goes on
                if not self._has_failed:
                    logger.warning("metrics of jetspecpp are not up to date: %s: %s", type(error).__name__, error)
                self._has_failed = True

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL):
            self.flush()

    def close(self) -> None:
        """Stop, and remove the file, and the directory with its last one: its owner may have been killed."""
        _writers.discard(self)
        self._stopping.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._path.with_suffix(".tmp").unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()


def flush_here() -> None:
    """Have the workers inside this process write now: it is the process that reads, as in ``LLM.get_metrics()``."""
    for writer in list(_writers):
        writer.flush()


def read_files(directory: str) -> list[dict[str, Any]]:
    """What the workers wrote last; a file that cannot be read is left out."""
    found = []
    for path in sorted(Path(directory).glob("engine-*.json")):
        with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8") as file:
            content = json.loads(file.read(MAX_BYTES))
            if isinstance(content, dict):
                found.append(content)
    return found


def remove_directory(directory: str) -> None:
    """Remove what workers may have left, and the directory. It holds plain files only."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
