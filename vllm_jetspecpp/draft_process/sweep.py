"""Removes what a private Ray cluster may leave behind.

When Ray's driver is killed, its raylet and GCS go with it, but the agents of the raylet stay: they try to report to
the GCS that is gone (Ray 2.60). They are recognised by the cluster's own directory, which no other process uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

_PREFIX = "jspp-"  # short: Ray puts sockets below the directory, and their paths end at 107 bytes
_OWNER = "owner"
_PATIENCE = 5.0
_STALE = 10.0


def make_directory() -> tuple[str, int]:
    """A directory for a private cluster, and the descriptor that says, while it is open, that somebody owns it."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    lock = os.open(f"{directory}/{_OWNER}", os.O_CREAT | os.O_RDONLY, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock


def sweep_abandoned(parent: str) -> None:
    """Sweep the directories whose owners were killed together with their keepers, so that nobody could clean up."""
    for owner in Path(parent).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):  # it is owned, went just now, or is another user's
            lock = os.open(owner, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - owner.stat().st_mtime > _STALE:  # not one that is being made
                    sweep(str(owner.parent), spare={os.getpid()})
            finally:
                os.close(lock)


def sweep(directory: str, spare: set[int]) -> None:
    """Kill every Ray process that uses ``directory``, wait until they are gone, then remove it.

    Args:
        directory: temp directory of the private cluster, unique to it.
        spare: process ids never to be killed, such as the caller's.
    """
    deadline = time.monotonic() + _PATIENCE
    while (pids := ray_processes(directory) - spare) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


def sweep_after_me(directory: str) -> None:
    """Have ``directory`` swept when this process has ended, even if it is killed together with all its descendants.

    That is what ``vllm serve`` does at Ctrl-C: it kills its engine's process tree, and whoever would clean up is in it.
    So a forked process leaves the tree and waits. To be called while this process has one thread.
    """
    ended = os.pidfd_open(os.getpid())
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(ended)
        return
    try:
        os.setsid()
        if not os.fork():  # its parent ends now, so it is in nobody's tree
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor != ended:  # the worker waits for the end of our pipes
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            os.chdir("/")
            select.select([ended], [], [])
            sweep(directory, spare={os.getpid()})
    finally:
        os._exit(0)


def ray_processes(directory: str) -> set[int]:
    """Ids of the processes of the cluster in ``directory``: started with it, or titled ``ray::`` with a log in it."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _uses(entry, directory)}


def _uses(process: Path, directory: str) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
        if b"/ray/" in command and f"{directory}/".encode() in command:
            return True
        return command.startswith(b"ray::") and any(
            os.readlink(fd).startswith(f"{directory}/") for fd in (process / "fd").iterdir()
        )
    except OSError:  # it ended, or is another user's
        return False
