"""Keeps a draft process running, from a thread of the vLLM worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.draft_process.placement import PlacementConfig, actor_environment, module_path
from vllm_jetspecpp.draft_process.sweep import make_directory, sweep, sweep_abandoned
from vllm_jetspecpp.transport.base import ProcessWorkerEnd
from vllm_jetspecpp.transport.processes import make_worker_end

logger = logging.getLogger(__name__)

FIRST_DELAY, MAX_DELAY = 1.0, 30.0
"""Seconds before a restart: doubled from one to the next, up to the second value."""
_STEADY = 60.0  # a process that ran this long starts the delays anew
_POLL = 0.2
PATIENCE = 10.0
"""Seconds a keeper gets to end its draft process and its cluster before it is killed."""
TELLING = 1.0
"""Seconds before the end of the time to start at which a keeper says which resources are missing."""
_LAST_LINES = 20


class DraftProcessError(RuntimeError):
    """The draft process could not be started."""


class Supervisor:
    """Starts a draft process at once and, whenever it ends, another one after a delay, until ``close``.

    The worker's thread and this object's thread meet in three places: ``take`` (a new connection), ``give_up`` (the
    present one does not answer) and ``close``.
    """

    def __init__(
        self,
        engine: EngineConfig,
        placement: PlacementConfig,
        transport: str,
        reply_timeout: float,
        start_timeout: float,
    ) -> None:
        self._engine = engine
        self._placement = placement
        self._transport = transport
        self._environment = actor_environment(engine.num_threads, engine.device)
        self._reply_timeout = reply_timeout
        self._start_timeout = start_timeout
        self._lock = threading.Lock()
        self._new: ProcessWorkerEnd | None = None
        self._given_up: tuple[ProcessWorkerEnd, str] | None = None
        self._stopping = threading.Event()
        self._first_start = threading.Event()
        self._first_error: str | None = None
        self.restarts = 0
        self.alive = False
        """Whether a draft process is attached and neither ended nor given up."""
        self._thread = threading.Thread(target=self._run, name="jetspecpp-supervisor", daemon=True)
        self._thread.start()

    def wait_started(self, timeout: float) -> None:
        """Return when the first draft process is ready.

        Raises:
            DraftProcessError: it failed to start, and why.
            TimeoutError: it did not start in ``timeout`` seconds.
        """
        if not self._first_start.wait(timeout):
            raise TimeoutError(f"the draft process is not ready after {timeout:g} s")
        if self._first_error is not None:
            raise DraftProcessError(f"the draft process did not start: {self._first_error}")

    def take(self) -> ProcessWorkerEnd | None:
        """The connection to a draft process that became ready since the last call; the caller is to close it."""
        with self._lock:
            new, self._new = self._new, None
        return new

    def give_up(self, end: ProcessWorkerEnd, reason: str) -> None:
        """The process behind ``end`` is of no use any more: replace it."""
        self._given_up = (end, reason)

    def close(self) -> None:
        """End the draft process and its Ray cluster; returns when nothing of them is left."""
        self._stopping.set()
        self._thread.join(2 * PATIENCE)

    def _run(self) -> None:
        delay = FIRST_DELAY
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                reason = self._run_one()
            except Exception as error:  # no memory, no process, no descriptor: try again like after any other failure
                reason = f"{type(error).__name__}: {error}"
            if not self._first_start.is_set():
                self._first_error = reason
                self._first_start.set()
                return
            if self._stopping.is_set():
                return
            if time.monotonic() - began > _STEADY:
                delay = FIRST_DELAY
            logger.warning(
                "draft process: %s. Requests go on without drafts; next start in %g s.", reason.rstrip(". "), delay
            )
            self._stopping.wait(delay)
            delay = min(2 * delay, MAX_DELAY)
            self.restarts += 1

    def _run_one(self) -> str:
        """One draft process from start to end; returns why it ended."""
        end = make_worker_end(self._transport, self._reply_timeout)
        try:
            keeper = _Keeper(self._job(end))
        except Exception:
            end.close()
            raise
        reason = self._wait_attached(keeper, end)
        if reason is None:
            self._new = end
            self.alive = True
            self._first_start.set()
            reason = self._watch(keeper, end)
            self.alive = False
            end_is_ours = self.take() is not None  # nobody took it
        else:
            end_is_ours = True
        keeper.end()
        if end_is_ours:
            end.close()
        return keeper.reason or reason

    def _job(self, end: ProcessWorkerEnd) -> dict[str, Any]:
        placement = dataclasses.replace(self._placement, ray_address=self._placement.ray_address or _ray_in_use())
        return {
            "engine": dataclasses.asdict(self._engine),
            "placement": dataclasses.asdict(placement),
            "transport": self._transport,
            "handle": dataclasses.asdict(end.handle),
            "inherited": end.inherited,
            "environment": self._environment,
            "deadline": time.monotonic() + self._start_timeout - TELLING,
            "worker": os.getpid(),
        }

    def _wait_attached(self, keeper: _Keeper, end: ProcessWorkerEnd) -> str | None:
        deadline = time.monotonic() + self._start_timeout
        while not end.attached:
            if self._stopping.wait(_POLL):
                return "closed"
            if not keeper.running():
                return "it ended while it started"
            if time.monotonic() > deadline:
                return f"it did not start in {self._start_timeout:g} s"
        return None

    def _watch(self, keeper: _Keeper, end: ProcessWorkerEnd) -> str:
        while not self._stopping.wait(_POLL):
            if self._given_up is not None and self._given_up[0] is end:
                return self._given_up[1]
            if not keeper.running():
                return "it ended"
        return "closed"


class _Keeper:
    """The keeper process, and what a private cluster of it may leave behind."""

    def __init__(self, job: dict[str, Any]) -> None:
        sweep_abandoned(tempfile.gettempdir())
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _remove
        self._directory, self._lock = make_directory()
        try:
            self._process = self._start(None if job["placement"]["log_to_driver"] else self._output, job["inherited"])
        except OSError:
            self._remove()
            raise
        self.reason = ""
        with contextlib.suppress(BrokenPipeError):
            stdin = self._stdin
            stdin.write(json.dumps({**job, "directory": self._directory}) + "\n")
            stdin.flush()

    def _start(self, errors: IO[bytes] | None, inherited: tuple[int, ...]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "vllm_jetspecpp.draft_process.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_keeper_environment(),
            pass_fds=inherited,
            start_new_session=True,  # a Ctrl-C at the terminal is for the server alone
        )

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Ask it to end, insist after a while, remove what is left, and note the reason it gave."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        killed = False
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            killed = True
        assert self._process.stdout is not None
        self.reason = self._process.stdout.read().strip() or ("" if killed else self._last_output())
        self._process.stdout.close()
        self._remove()

    def _remove(self) -> None:
        self._output.close()
        sweep(self._directory, spare={os.getpid()})
        os.close(self._lock)

    def _last_output(self) -> str:
        """Its last words, for the case that it crashed."""
        if not self._process.returncode:
            return ""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"its keeper ended with status {self._process.returncode}", *lines])


def _keeper_environment() -> dict[str, str]:
    """The worker's, without what vLLM set for its own threads and metrics (Ray would add its own to those of a server
    with several API servers), and with its module path.
    """
    threads = ("LD_PRELOAD", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_NUM_THREADS", "OMP_PROC_BIND")
    dropped = (*threads, "PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**environment, "PYTHONPATH": module_path()}


def _ray_in_use() -> str | None:
    """Address of the cluster that RAY_ADDRESS names or that vLLM already uses in this process."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    return None
