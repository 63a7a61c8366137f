"""The draft process is killed, stopped, slow, wrong or short of memory, and so are Ray's own: nothing is lost.

Each fault happens to a real draft process while vLLM answers, in float32. Every answer is plain vLLM's, token for
token; no step stalls; one warning says what happened; another draft process drafts again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.draft_process_tools import assert_nothing_left, cluster_processes, ended, own_temp_dir, wait_for
from tests.faulty_engine import FAILED, FULL, order, orders_file, scribble
from tests.vllm_plugin.conftest import MAX_TOKENS, running_engine, worker_of
from vllm_jetspecpp.demo.server import free_port
from vllm_jetspecpp.draft_process import supervisor
from vllm_jetspecpp.draft_process.sweep import sweep
from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.ring import Ring

pytestmark = pytest.mark.parametrize("family", ["llama"], indirect=True)

REPLY_TIMEOUT = 2.0
LONGEST_STEP = 2 * REPLY_TIMEOUT + 3.0
"""Seconds: a step may wait for room and for the answer, and other programs use the machine too."""
RESTART_TIMEOUT = 120.0
FIRST_DELAY, MAX_DELAY = 0.1, 0.4
GCS_TIMEOUT = 3
"""Seconds after which Ray's processes give up on their GCS; Ray's own default is a minute."""
RAY = Path(sys.executable).with_name("ray")


class Warnings(logging.Handler):
    """What is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Served:
    """vLLM with a draft process, and what can be seen of it from outside."""

    def __init__(
        self, llm: Any, directory: str, sequences: Path, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        self.llm, self.directory, self.sequences = llm, directory, sequences
        self.prompts, self.expected = prompts, expected
        self.warnings = Warnings()
        self.longest_step = 0.0
        self._count = 0

    @property
    def client(self) -> Any:
        return worker_of(self.llm).draft_client

    def processes(self, mark: str) -> list[int]:
        return [pid for pid, line in cluster_processes(self.directory).items() if mark in line]

    def draft_pid(self) -> int:
        (pid,) = self.processes("ray::DraftActor")
        return pid

    def stats(self) -> dict[str, Any]:
        return self.llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]

    def answer(self, at_step: int = -1, act: Callable[[], object] = lambda: None) -> None:
        """Answer all prompts at once, as plain vLLM does; ``act`` after a given number of steps."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        engine, first = self.llm.llm_engine, self._count
        for prompt in self.prompts:
            engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
            self._count += 1
        outputs: dict[int, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests():
            began = time.monotonic()
            for output in engine.step():
                if output.finished:
                    outputs[int(output.request_id) - first] = list(output.outputs[0].token_ids)
            self.longest_step = max(self.longest_step, time.monotonic() - began)
            steps += 1
            if steps == at_step:
                act()
        assert [outputs[i] for i in range(len(self.prompts))] == self.expected

    def assert_drafts(self) -> None:
        """All drafts are right, as this engine's are as long as nothing happens."""
        self.stats()
        self.answer()
        stats = self.stats()
        assert stats["accepted"] == stats["drafted"] > 0 and not stats["client"]["restarts"]

    def wait_replaced(self, pid: int) -> None:
        """Until another draft process is ready; the former one is gone."""
        generation = self.client.generation
        wait_for(lambda: self.client.ready() and self.client.generation > generation, RESTART_TIMEOUT, "the restart")
        assert ended(pid) and self.draft_pid() != pid


@contextlib.contextmanager
def served(
    model: Path, sequences: Path, prompts: list[list[int]], expected: list[list[int]], directory: str, **options: Any
) -> Iterator[Served]:
    """Chunked prefill (64 tokens a step) of eight requests; waits for little."""
    method = {
        "method": "jetspecpp",
        "model": str(sequences),
        "draft_engine": "tests.faulty_engine.FaultyEngine",
        "num_speculative_tokens": 3,  # many steps, so that faults have time to happen
        "reply_timeout": REPLY_TIMEOUT,
        "start_timeout": RESTART_TIMEOUT,
    }
    loggers = [logging.getLogger(name) for name in ("vllm_jetspecpp", "vllm.jetspecpp")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "FIRST_DELAY", FIRST_DELAY)
        patch.setattr(supervisor, "MAX_DELAY", MAX_DELAY)
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(GCS_TIMEOUT))
        with running_engine(model, max_num_batched_tokens=64, speculative_config=method | options) as llm:
            everything = Served(llm, directory, sequences, prompts, expected)
            for logger in loggers:
                logger.setLevel(logging.WARNING)
                logger.addHandler(everything.warnings)
            yield everything
            for logger in loggers:
                logger.removeHandler(everything.warnings)


@pytest.fixture(scope="module")
def temp_dir() -> Iterator[str]:
    with own_temp_dir() as directory:
        yield directory


@pytest.fixture(scope="module")
def cluster(temp_dir: str) -> Iterator[str]:
    """Address of a Ray cluster that outlives the draft processes: they start faster than with clusters of their own."""
    directory, port = f"{temp_dir}/ray", free_port()
    sizes = ["--num-cpus=1", f"--object-store-memory={80 << 20}", "--include-dashboard=false"]
    options = [f"--port={port}", f"--temp-dir={directory}", "--disable-usage-stats", *sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        command = [str(RAY), "start", "--head", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        try:
            assert done.returncode == 0, done.stdout + done.stderr
            yield f"127.0.0.1:{port}"
        finally:
            sweep(directory, spare={os.getpid()})


@pytest.fixture(scope="module")
def joined(
    tiny_model: Path, sequences_file: Path, prompts: list[list[int]], plain: dict[str, Any], temp_dir: str, cluster: str
) -> Iterator[Served]:
    with served(tiny_model, sequences_file, prompts, plain["outputs"], temp_dir, ray_address=cluster) as engine:
        engine.assert_drafts()
        yield engine
    wait_for(lambda: not engine.processes("ray::DraftActor"), 20, "the end of the draft process")
    assert not list(Path(temp_dir).glob("jspp-*"))


def test_a_start_that_fails_is_tried_again_later(joined: Served) -> None:
    """First, while the delays are short: the engine fails, and so do the next two starts."""
    pid = joined.draft_pid()
    order(joined.sequences, "fail", "start", times=2)
    joined.answer(10, lambda: os.kill(pid, signal.SIGKILL))
    joined.wait_replaced(pid)
    killed, *failed = joined.warnings.lines
    assert "killed" in killed and len(failed) == 2 and all(FAILED in line for line in failed)
    delays = [float(re.findall(r"next start in ([\d.]+) s", line)[0]) for line in (killed, *failed)]
    assert delays == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    joined.assert_drafts()


def test_slow_answers_are_waited_for(joined: Served) -> None:
    pid = joined.draft_pid()
    joined.warnings.lines.clear()
    order(joined.sequences, "sleep", "decode", seconds=REPLY_TIMEOUT / 4)
    joined.stats()
    joined.answer()
    stats = joined.stats()
    assert stats["accepted"] == stats["drafted"] > 0 and joined.warnings.lines == []
    assert stats["client"]["exposed_seconds"] > REPLY_TIMEOUT / 4 and joined.draft_pid() == pid


@dataclass(frozen=True)
class Fault:
    """How it is brought about: by an order to the engine, or after some steps from outside."""

    name: str
    reason: str
    """What the warning says."""
    fault: str = ""
    when: str = "decode"
    seconds: float = 0.0
    outside: Callable[[Served, pytest.MonkeyPatch], None] | None = None
    at_step: int = 10


def kill_draft(served: Served, patch: pytest.MonkeyPatch) -> None:
    os.kill(served.draft_pid(), signal.SIGKILL)


def kill_keeper(served: Served, patch: pytest.MonkeyPatch) -> None:
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "draft_process.keeper"], capture_output=True)
    (keeper,) = map(int, children.stdout.split())
    os.kill(keeper, signal.SIGKILL)


def lose_request(served: Served, patch: pytest.MonkeyPatch) -> None:
    commit = Ring.commit

    def lose(self: Ring) -> None:
        patch.setattr(Ring, "commit", commit)

    patch.setattr(Ring, "commit", lose)


def garble_request(served: Served, patch: pytest.MonkeyPatch) -> None:
    encode = codec.encode_verified

    def garble(batch: Any, buffer: memoryview) -> None:
        scribble(batch, buffer)
        patch.setattr(codec, "encode_verified", encode)

    patch.setattr(codec, "encode_verified", garble)


NO_ANSWER = "no answer to step"
FAULTS = [
    Fault("killed while idle", "was killed", outside=kill_draft, at_step=0),
    Fault("killed while decoding", "was killed", outside=kill_draft),
    Fault("killed in a prefill", "was killed", "kill", "prefill"),
    Fault("stopped", NO_ANSWER, "stop"),
    Fault("too slow", NO_ANSWER, "sleep", seconds=3 * REPLY_TIMEOUT),
    Fault("answer lost", NO_ANSWER, "lose answer"),
    Fault("request lost", NO_ANSWER, outside=lose_request),
    Fault("answer garbled", "not a DraftBatch message", "garble answer"),
    Fault("ring garbled", "damaged ring", "garble ring"),
    Fault("request garbled", "not a VerifiedBatch message", outside=garble_request),
    Fault("engine failed", FAILED, "fail"),
    Fault("memory full", FULL, "memory"),
    Fault("keeper killed", "keeper ended with status -9", outside=kill_keeper),
]


def suffer(served: Served, fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Everything a fault must not and must do."""
    pid = served.draft_pid()
    served.warnings.lines.clear()
    served.longest_step = 0.0
    served.stats()
    if fault.fault:
        order(served.sequences, fault.fault, fault.when, seconds=fault.seconds)
    elif fault.outside is not None and fault.at_step == 0:
        fault.outside(served, patch)
    outside = fault.outside
    served.answer(fault.at_step, lambda: outside and outside(served, patch))
    assert not orders_file(served.sequences).exists(), "the fault did not happen"
    assert served.longest_step < LONGEST_STEP
    timeouts = served.stats()["client"]["timeouts"]
    served.wait_replaced(pid)
    assert len(served.warnings.lines) == 1, served.warnings.lines
    assert fault.reason in served.warnings.lines[0] and timeouts == (fault.reason == NO_ANSWER)
    served.assert_drafts()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(joined: Served, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    suffer(joined, fault, monkeypatch)


def kill_ray(mark: str) -> Callable[[Served, pytest.MonkeyPatch], None]:
    def kill(served: Served, patch: pytest.MonkeyPatch) -> None:
        (pid,) = served.processes(mark)
        os.kill(pid, signal.SIGKILL)

    return kill


def test_rays_own_processes_are_killed(
    tiny_model: Path,
    sequences_file: Path,
    prompts: list[list[int]],
    plain: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a cluster of the draft process's own, which is started anew with it and leaves nothing."""
    with own_temp_dir() as directory:
        with served(tiny_model, sequences_file, prompts, plain["outputs"], directory) as engine:
            for mark in ("raylet/raylet", "gcs/gcs_server"):
                suffer(engine, Fault(mark, "", outside=kill_ray(mark)), monkeypatch)
        assert_nothing_left(directory)
