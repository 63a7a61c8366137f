"""Seen from outside: the processes of a draft process's Ray cluster, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)


def freeze(pid: int) -> None:
    """SIGSTOP, and wait for it: on another core the process may run on for a moment, and answer a message."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_for(lambda: all(" T " in (t / "stat").read_text() for t in tasks.iterdir()), 5, f"the stop of {pid}")


def cluster_processes(directory: str) -> dict[int, str]:
    """Command lines by id of processes that were started in ``directory`` or have a file of it open."""
    found = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            line = " ".join(process.info["cmdline"] or [])
            paths = [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and (directory in line or any(p.startswith(directory) for p in paths)):
            found[process.pid] = line
    return found


def ended(pid: int) -> bool:
    """Gone, or a zombie that init has not reaped yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def own_temp_dir() -> Iterator[str]:
    """Clusters of a test get their directories in here, so that what they leave can be told from others' files."""
    with tempfile.TemporaryDirectory(prefix="jt-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", directory)
        patch.setenv("TMPDIR", directory)
        yield directory


def assert_nothing_left(directory: str, seconds: float = 0.0) -> None:
    wait_for(lambda: not cluster_processes(directory), seconds, f"end of {cluster_processes(directory)}")
    wait_for(lambda: not list(Path(directory).glob("jspp-*")), seconds, "removal of the cluster's directory")
