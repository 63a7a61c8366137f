"""The parent's end of child processes: start them, keep them idle, run one at a time, end them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vllm_jetspecpp.benchmarking.methods import Method
from vllm_jetspecpp.demo.run import SERVE_ENV
from vllm_jetspecpp.demo.server import explain

START_TIMEOUT = 900.0
"""Seconds: with compilation, beside other starts."""
RUN_TIMEOUT = 1800.0
STOP_TIMEOUT = 60.0
LIBRARY = Path(__file__).parents[2]


class ChildError(RuntimeError):
    """A method does not run; the message says why."""


def environment(threads: int) -> dict[str, str]:
    """Variables of a child, chosen before torch is imported: the same for all but for the most threads it may use."""
    path = [str(LIBRARY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "VLLM_PLUGINS": "jetspecpp",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ,
        **{name: value for name, value in SERVE_ENV.items() if name.startswith("MALLOC")},
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        # vLLM's ngram runs on numba, which would raise OpenMP's threads of the whole process to all cores: two threads
        # that wait for each other on one core take thirty times as long.
        "NUMBA_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class ChildProcess:
    """One engine in a process group of its own, for all methods that differ in their cores alone."""

    def __init__(self, methods: Sequence[Method], engine: Mapping[str, Any], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm_jetspecpp.benchmarking.child"],
                env=environment(max(method.threads for method in methods)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        speculative = methods[0].speculative
        self._send({**engine, **({"speculative_config": dict(speculative)} if speculative else {})})

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # what it said before it ended is read next
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise ChildError(f"no answer within {timeout:.0f} s; {explain(self.log)}")
        line = self.process.stdout.readline()
        if not line:
            raise ChildError(f"ended with status {self.process.wait()}; {explain(self.log)}")
        said = json.loads(line)
        if "error" in said:
            raise ChildError(said["error"])
        return said

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Return when the engine can be used.

        Raises:
            ChildError: it did not start.
        """
        self._receive(timeout)

    def run(self, method: Method, **command: Any) -> dict[str, Any]:
        """Have it answer prompts on the method's cores; see ``child.Child.run``.

        Raises:
            ChildError: the engine failed.
        """
        self._send({"cores": method.cores, **command})
        return self._receive(RUN_TIMEOUT)

    def cpu_seconds(self) -> float:
        """Processor time used so far by it and all it started."""
        return sum(map(_cpu_seconds, _tree(self.process.pid)))

    def stop(self) -> None:
        """End it and all it started; may be called again."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT)
        with suppress(ProcessLookupError):  # the usual end: nobody is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def idle_cores(children: Iterable[ChildProcess], seconds: float) -> float:
    """Cores that idle children keep busy, measured over ``seconds``: what they take from the one that runs."""
    children = list(children)
    before = sum(child.cpu_seconds() for child in children)
    time.sleep(seconds)
    return max(0.0, sum(child.cpu_seconds() for child in children) - before) / seconds
