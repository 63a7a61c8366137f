"""The draft process is killed, stopped, slow, wrong, short of memory, or does not start: nothing is lost.

Each fault happens to a real draft process while vLLM answers, in float32. Every answer is plain vLLM's, token for
token; no step stalls; one warning says what happened; another draft process drafts again.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.draft_process_tools import own_temp_dir, wait_for
from tests.faulty_engine import FAILED, FULL, order, scribble
from tests.vllm_plugin.served import FIRST_DELAY, NO_ANSWER, REPLY_TIMEOUT, Fault, Served, served, suffer
from vllm_jetspecpp.demo.server import free_port
from vllm_jetspecpp.draft_process.sweep import sweep
from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.ring import Ring

pytestmark = pytest.mark.parametrize("family", ["llama"], indirect=True)

RAY = Path(sys.executable).with_name("ray")


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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(joined: Served, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    suffer(joined, fault, monkeypatch)
