"""A Ray cluster of two nodes on this machine, at two addresses of the loopback network."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from vllm_jetspecpp.draft_process.sweep import sweep

HEAD_IP, FAR_IP = "127.0.0.2", "127.0.0.3"
FAR = "far"
"""Custom resource that only the second node has."""
_START_SECONDS = 120.0


class RayNodes:
    """Both nodes up; a driver on this machine joins the head. Access by a token."""

    def __init__(self) -> None:
        # Ray puts sockets below it, whose paths end at 107 bytes: not pytest's own directory.
        self._directory = tempfile.mkdtemp(prefix="jn-")
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind((HEAD_IP, 0))
            port = probe.getsockname()[1]
        self.address = f"{HEAD_IP}:{port}"
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        """What a driver needs; the nodes have it too."""
        try:
            self._start(HEAD_IP, "--head", f"--port={port}", f"--temp-dir={self._directory}", "--include-dashboard=0")
            self.start_far()
        except BaseException:
            self.close()
            raise

    def start_far(self) -> None:
        """Start the second node, with the resource FAR."""
        self._start(FAR_IP, f"--address={self.address}", f'--resources={{"{FAR}": 1}}')

    def lose_far(self) -> None:
        """Kill the second node with all that runs on it, as when its machine loses power."""
        process = self._processes.pop()
        for victim in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait()

    def _start(self, ip: str, *options: str) -> None:
        common = ["--block", "--num-cpus=2", "--object-store-memory=80000000", "--dashboard-agent-listen-port=0"]
        log = Path(self._directory) / f"{len(self._processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}", *common, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self._processes.append(process)
        deadline = time.monotonic() + _START_SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def close(self) -> None:
        """End both nodes; nothing is left."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        sweep(self._directory, spare={os.getpid()})
