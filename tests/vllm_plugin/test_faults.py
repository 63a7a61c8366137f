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
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.draft_process_tools import cluster_processes, freeze, own_temp_dir, wait_for
from tests.faulty_engine import FAILED, FULL, order, scribble
from tests.vllm_plugin.served import FIRST_DELAY, MAX_DELAY, NO_ANSWER, REPLY_TIMEOUT, Fault, Served, served, suffer
from vllm_jetspecpp.demo.server import free_port
from vllm_jetspecpp.draft_process.supervisor import DraftProcessError
from vllm_jetspecpp.draft_process.sweep import sweep
from vllm_jetspecpp.transport import codec
from vllm_jetspecpp.transport.ring import Ring

pytestmark = pytest.mark.parametrize("family", ["llama"], indirect=True)

FEW = 8
"""Descriptors and threads: fewer than one for each of the draft processes replaced here."""
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


def test_a_first_start_that_fails_ends_the_server(
    tiny_model: Path, sequences_file: Path, prompts: list[list[int]], plain: dict[str, Any], temp_dir: str, cluster: str
) -> None:
    """With the engine's own error; before the engine that the other tests share."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cores = os.sched_getaffinity(0)
    order(sequences_file, "fail", "start")
    engine = served(tiny_model, sequences_file, prompts, plain["outputs"], temp_dir, ray_address=cluster)
    with pytest.raises(DraftProcessError, match=FAILED), engine:
        pass
    cleanup_dist_env_and_memory()
    assert os.sched_getaffinity(0) == cores
    assert not [line for line in cluster_processes(temp_dir).values() if "ray::DraftActor" in line]
    assert not list(Path(temp_dir).glob("jspp-*"))


def held() -> dict[str, int]:
    """What this process, which is the worker too, might hold more of with each draft process."""
    return {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}


@pytest.fixture(scope="module")
def joined(
    tiny_model: Path, sequences_file: Path, prompts: list[list[int]], plain: dict[str, Any], temp_dir: str, cluster: str
) -> Iterator[Served]:
    with served(tiny_model, sequences_file, prompts, plain["outputs"], temp_dir, ray_address=cluster) as engine:
        engine.assert_drafts()
        before = held()
        yield engine
        after = held()
        assert all(after[what] <= before[what] + FEW for what in before), (before, after)
        assert len(list(Path(temp_dir).glob("jspp-*"))) == 1
    wait_for(lambda: not engine.processes("ray::DraftActor"), 20, "the end of the draft process")
    assert not list(Path(temp_dir).glob("jspp-*"))


def test_starts_that_fail_are_tried_again_later(joined: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """First, while the delays are short. One start finds no place for files, as on a full disk; one engine fails."""
    pid = joined.draft_pid()
    order(joined.sequences, "fail", "start")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", f"{joined.directory}/nowhere")
        joined.answer(10, lambda: os.kill(pid, signal.SIGKILL))
        wait_for(lambda: len(joined.warnings.lines) > 1, 60, "the start that fails")
        joined.answer()
    joined.wait_replaced(pid)
    killed, *no_room, failed = joined.warnings.lines
    assert "was killed" in killed and "did not start" not in killed
    assert no_room and all("did not start" in line and "nowhere" in line for line in no_room)
    assert "did not start" in failed and FAILED in failed
    delays = [float(re.findall(r"next start in ([\d.]+) s", line)[0]) for line in joined.warnings.lines]
    assert delays == [min(FIRST_DELAY * 2**i, MAX_DELAY) for i in range(len(delays))]
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


def keeper_pid() -> int:
    (keeper,) = [p.pid for p in psutil.Process().children() if "vllm_jetspecpp.draft_process.keeper" in p.cmdline()]
    return keeper


def kill_keeper(served: Served, patch: pytest.MonkeyPatch) -> None:
    os.kill(keeper_pid(), signal.SIGKILL)


def stop_both(served: Served, patch: pytest.MonkeyPatch) -> None:
    for pid in (keeper_pid(), served.draft_pid()):
        freeze(pid)


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
    Fault("killed in a prefill", "was killed", "kill", "prefill"),
    Fault("stopped", NO_ANSWER, "stop"),
    Fault("stopped with its keeper", NO_ANSWER, outside=stop_both),
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


def test_requests_are_aborted_while_there_is_no_draft_process(joined: Served) -> None:
    """Killed while decoding: the slots of what is broken off are free for the requests that come after."""
    pid = joined.draft_pid()
    joined.warnings.lines.clear()
    joined.answer(10, lambda: os.kill(pid, signal.SIGKILL), abort=4)
    joined.answer(1, abort=7)
    joined.wait_replaced(pid)
    assert len(joined.warnings.lines) == 1 and "was killed" in joined.warnings.lines[0]
    joined.assert_drafts()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(joined: Served, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    suffer(joined, fault, monkeypatch)
