"""One ``vllm serve`` subprocess: start it, wait until it answers, ask the worker for its counters, stop it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT = 600.0
"""Seconds: a first start on a slow machine compiles and reads weights."""
STOP_TIMEOUT = 60.0
"""Seconds for a clean stop before the process group is killed."""
TAIL_LINES = 20


class ServerError(RuntimeError):
    """The server ended or did not answer; the message carries the end of its log."""


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def vllm_command() -> Path:
    """The ``vllm`` command of this Python's environment.

    Raises:
        FileNotFoundError: vLLM is not installed beside this Python.
    """
    command = Path(sys.executable).with_name("vllm")
    if not command.is_file():
        raise FileNotFoundError(f"no vllm command beside {sys.executable}; `make demo` installs one")
    return command


def explain(log: Path) -> str:
    """Why a server failed, as far as its log says: the first exception, which vLLM wraps in others, and the end."""
    lines = log.read_text(errors="replace").splitlines()
    raised = (re.search(r"(?:^|[\] ])([\w.]*(?:Error|Exception): .*)", line) for line in lines)
    first = next((match.group(1) for match in raised if match), "none")
    return f"first error in {log}: {first}\nits last lines:\n" + "\n".join(lines[-TAIL_LINES:])


class Server:
    """``vllm serve MODEL`` on a free port of this host, its output in a log file.

    It runs in a process group of its own, so that nothing it started in there outlives :meth:`stop`. As a context
    manager it stops on the way out.
    """

    def __init__(self, model: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.model = model
        self.log = log
        self.port = free_port()
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(vllm_command()), "serve", model, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        # The dev mode adds the route that reads the worker's counters.
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **env}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where the server listens, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(
        self, on_wait: Callable[[float], None] = lambda seconds: None, timeout: float = START_TIMEOUT
    ) -> float:
        """Wait for ``/health``, calling ``on_wait`` with the seconds so far; returns them.

        Raises:
            ServerError: the server ended, or did not answer in time.
        """
        start = time.monotonic()
        while not self._is_healthy():
            waited = time.monotonic() - start
            if self.process.poll() is not None:
                raise ServerError(f"vllm serve ended with status {self.process.returncode}; {explain(self.log)}")
            if waited > timeout:
                raise ServerError(f"vllm serve did not answer within {timeout:.0f} s; {explain(self.log)}")
            on_wait(waited)
            time.sleep(0.25)
        return time.monotonic() - start

    def stats(self) -> dict[str, Any]:
        """Counters of the first worker that has some (``jetspecpp_stats``).

        Raises:
            ServerError: no worker counts, as when the server runs without the method, or the server is gone.
        """
        request = urllib.request.Request(
            f"{self.url}/collective_rpc",
            data=json.dumps({"method": "jetspecpp_stats"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                results: list[Any] = json.load(response)["results"]
        except (urllib.error.URLError, TimeoutError) as error:
            raise ServerError(f"the worker's counters cannot be read: {error}; {explain(self.log)}") from error
        counters = next((result for result in results if result), None)
        if counters is None:
            raise ServerError(f"no worker of {self.url} has counters of jetspecpp")
        return counters

    def stop(self) -> int:
        """Interrupt the server as Ctrl-C would and wait for its clean end; its exit status. May be called again."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):  # killed below with its group
                self.process.wait(STOP_TIMEOUT)
        with suppress(ProcessLookupError):  # the group is empty: the usual end
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
