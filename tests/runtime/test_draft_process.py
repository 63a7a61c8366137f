"""A real Ray actor with a scripted engine: drafting starts, breaks, resumes, and leaves nothing behind."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.draft_process_tools import assert_nothing_left, cluster_processes, ended, freeze, own_temp_dir, wait_for
from tests.runtime.scripted_engines import RAISE
from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.draft_process import supervisor, sweep
from vllm_jetspecpp.draft_process.client import LocalDraftClient, make_client
from vllm_jetspecpp.draft_process.loop import run_loop
from vllm_jetspecpp.draft_process.placement import PlacementConfig, actor_environment
from vllm_jetspecpp.draft_process.supervisor import DraftProcessError
from vllm_jetspecpp.draft_process.sweep import make_directory, sweep_abandoned
from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import DraftBatch, Verified, VerifiedBatch

ROOT = Path(__file__).parents[2]
REPLY_TIMEOUT = 2.0
START_TIMEOUT = 90.0


def engine_config(engine="EchoEngine"):
    return EngineConfig("target", "nowhere", RoundConfig(7), 4, 128, engine=f"tests.runtime.scripted_engines.{engine}")


def client_of(engine="EchoEngine", **placement):
    placement = PlacementConfig(ray_address="local", **placement)
    return make_client(engine_config(engine), placement, "shared_memory", REPLY_TIMEOUT, START_TIMEOUT)


def batch(step, token=1, wants_draft=True):
    tokens = torch.tensor([token], dtype=torch.int32)
    return VerifiedBatch(step, (Verified(0, 0, tokens, 0, torch.ones(1, 8), wants_draft=wants_draft),))


def draft_of(client, step):
    assert client.send(batch(step, token=step))
    reply = client.receive()
    assert reply is not None and reply.step == step
    token, pid, threads = reply.drafts[0].tokens
    assert token == step + 1
    return pid, threads


@pytest.fixture
def temp_dir():
    with own_temp_dir() as directory:
        yield directory


def assert_no_named_shared_memory(directory):
    """What has no name in /dev/shm cannot stay there. (Others use /dev/shm meanwhile: listings cannot be compared.)"""
    for pid in cluster_processes(directory):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            assert not [m for m in maps if "/dev/shm/" in m and not m.endswith("(deleted)")]


def test_life_of_a_draft_process(temp_dir, caplog, monkeypatch):
    """From a worker as vLLM makes it; the draft process is killed, fails, is stopped, and loses its keeper."""
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.05)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    metrics = Path(temp_dir, "metrics")  # of a server with several API servers
    metrics.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(metrics))
    last_core = (os.cpu_count() or 1) - 1
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    caplog.set_level(logging.WARNING)
    client = client_of(draft_cores=[last_core])
    try:
        assert client.generation == 0 and not client.ready() and not client.send(batch(0)) and client.receive() is None
        client.wait_started()
        assert client.ready() and client.generation == 1 and client.stats.restarts == 0 and client.alive
        pid, threads = draft_of(client, 1)
        assert threads == 1
        assert all(os.sched_getaffinity(int(t)) == {last_core} for t in os.listdir(f"/proc/{pid}/task"))
        assert os.getpriority(os.PRIO_PROCESS, pid) == 0
        assert client.send(batch(2, wants_draft=False)) and client.receive() is None
        assert client.stats.replies == 1 and 0 < client.stats.exposed_seconds < 1

        os.kill(pid, signal.SIGKILL)
        pid = assert_replaced(client, pid, generation=2)

        client.send(batch(20, token=RAISE))
        pid = assert_replaced(client, pid, generation=3)
        assert "scripted failure" in caplog.text

        freeze(pid)
        client.send(batch(30))
        began = time.monotonic()
        assert client.receive() is None
        assert REPLY_TIMEOUT <= time.monotonic() - began < 2 * REPLY_TIMEOUT
        assert client.stats.timeouts == 1
        pid = assert_replaced(client, pid, generation=4)

        (keeper,) = [p for p in psutil.Process().children() if "vllm_jetspecpp.draft_process.keeper" in p.cmdline()]
        assert len([r for r in caplog.records if "without drafts" in r.message]) == client.stats.restarts == 3
        assert client.alive
        keeper.kill()  # and close amid the restart
        wait_for(lambda: not client.alive, 10, "notice of the end")
        wait_for(lambda: not client.send(batch(40)) or client.receive() is None, 10, "the end of drafting")
    finally:
        os.sched_setaffinity(0, affinity)
        client.close()
        client.close()
    assert not client.ready() and not client.send(batch(99)) and not client.alive
    assert os.listdir(metrics) == [], "Ray added its own to them"
    assert_nothing_left(temp_dir)


def assert_replaced(client, pid, generation):
    """Requests get None at once, the old process goes, and another one answers; returns its id."""
    wait_for(lambda: not client.send(batch(10)) or client.receive() is None, 5, "the end of drafting")
    began = time.monotonic()
    assert not client.send(batch(11)) and client.receive() is None and time.monotonic() - began < 1.0
    wait_for(client.ready, START_TIMEOUT, "the restart")
    assert client.generation == generation
    new_pid, _ = draft_of(client, 12)
    assert new_pid != pid and ended(pid)
    return new_pid


def test_first_start_that_fails_says_why(temp_dir):
    client = client_of("BrokenEngine")
    with pytest.raises(DraftProcessError, match="no checkpoint at nowhere"):
        client.wait_started()
    client.close()
    assert_nothing_left(temp_dir)


# A job in the background of a script inherits SIGINT as ignored, and Python then leaves it so.
SERVER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {root!r})
from tests.runtime.test_draft_process import client_of, draft_of
if __name__ == "__main__":
    clients = [client_of() for _ in range(2)]
    for client in clients:
        client.wait_started()
        assert client.ready()
        draft_of(client, 1)
    print("ready", flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_server_leaves_nothing(temp_dir, stop):
    """Two clusters of one server at once; the signal goes to its whole process group, as a Ctrl-C does."""
    command = [sys.executable, "-c", SERVER.format(root=str(ROOT))]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout.readline() == "ready\n"
        processes = cluster_processes(temp_dir).values()
        assert_no_named_shared_memory(temp_dir)
        assert len([line for line in processes if "raylet" in line]) >= 2
        assert len([line for line in processes if line.startswith("ray::DraftActor")]) == 2
    finally:
        os.killpg(server.pid, stop)
        server.wait(40)
        server.stdout.close()
    assert_nothing_left(temp_dir, seconds=15)


def test_directories_of_killed_owners_are_swept(temp_dir, monkeypatch):
    """As after a SIGKILL of a server's whole process tree: a directory, a process of the cluster, no owner."""
    abandoned, lock = make_directory()
    os.close(lock)
    owned, lock = make_directory()
    command = [sys.executable, "-c", "import time; time.sleep(60)", f"/ray/raylet --log={abandoned}/logs"]
    process = subprocess.Popen(command)
    wait_for(lambda: cluster_processes(abandoned), 5, "start of the process")
    sweep_abandoned(temp_dir)
    assert os.path.isdir(abandoned), "younger than a directory that is being made"
    monkeypatch.setattr(sweep, "_STALE", 0.0)
    threading.Timer(0.5, process.wait).start()  # a zombie counts as gone for nobody but its parent
    sweep_abandoned(temp_dir)
    assert not os.path.exists(abandoned) and process.wait(5) == -signal.SIGKILL
    assert os.path.isdir(owned)
    os.close(lock)


def test_a_supervisor_that_cannot_start_processes_says_so(temp_dir, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    client = client_of()
    with pytest.raises(DraftProcessError, match="/nowhere/python"):
        client.wait_started(5)
    client.close()


class ScriptedEnd:
    def __init__(self, script):
        self.script = list(script)
        self.sent = []

    def receive(self, timeout):
        item = self.script.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    def send(self, reply):
        self.sent.append(reply.step)


class CountingEngine:
    def __init__(self, end, error=None):
        self.end, self.error, self.log = end, error, []

    def answer(self, message):
        if self.error:
            raise self.error
        self.log.append(("answer", message.step))
        return DraftBatch(message.step)

    def work(self):
        self.log.append(("work", list(self.end.sent)))


def test_loop_answers_before_it_works_and_ends_with_the_worker():
    end = ScriptedEnd([batch(1), None, batch(2, wants_draft=False), TransportClosed("gone")])
    engine = CountingEngine(end)
    run_loop(engine, end, threading.Event())
    assert engine.log == [("answer", 1), ("work", [1]), ("answer", 2), ("work", [1])]


def test_loop_passes_on_what_the_engine_raises(caplog):
    end = ScriptedEnd([batch(1)])
    with pytest.raises(ZeroDivisionError):
        run_loop(CountingEngine(end, ZeroDivisionError()), end, threading.Event())
    assert "step 1" in caplog.text and end.sent == []


def test_loop_stops_when_told():
    stop = threading.Event()
    stop.set()
    run_loop(CountingEngine(None), ScriptedEnd([]), stop)


def test_local_client():
    client = make_client(engine_config(), PlacementConfig(), "local", 1.0, 1.0)
    assert isinstance(client, LocalDraftClient)
    client.wait_started()
    assert client.ready() and client.generation == 1
    assert draft_of(client, 4)[0] == os.getpid()
    assert client.send(batch(5, wants_draft=False)) and client.receive() is None
    assert client.stats.replies == 1
    with pytest.raises(ValueError, match="shared_memory"):
        make_client(engine_config(), PlacementConfig(), "shared_memry", 1.0, 1.0)


@pytest.mark.parametrize("wrong", [{"draft_cores": []}, {"draft_cores": [4096]}, {"draft_resources": {"num_gpus": -1}}])
def test_placement_is_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PlacementConfig(**wrong)


def test_placement_names_resources_as_ray_does():
    placement = PlacementConfig(draft_resources={"num_cpus": 0.5, "num_gpus": 0, "fast": 2})
    assert placement.bundle == {"CPU": 0.5, "fast": 2.0}
    assert placement.private_cluster_resources() == {"num_cpus": 1, "num_gpus": 0, "resources": {"fast": 2.0}}


def test_draft_gpu_is_pinned(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert actor_environment(1, "cuda:1")["CUDA_VISIBLE_DEVICES"] == "6"
    assert "CUDA_VISIBLE_DEVICES" not in actor_environment(1, "cpu")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=4,6"):
        actor_environment(1, "cuda:2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert actor_environment(1, "cuda:3")["CUDA_VISIBLE_DEVICES"] == "3"


def test_core_imports_without_ray_and_vllm():
    code = """
import sys
sys.modules["ray"] = sys.modules["vllm"] = None  # importing them now raises
import vllm_jetspecpp.config, vllm_jetspecpp.types, vllm_jetspecpp.draft_process.loop
import vllm_jetspecpp.draft_process.client, vllm_jetspecpp.draft_process.ray_actor
import vllm_jetspecpp.transport.local, vllm_jetspecpp.transport.shared_memory
assert "vllm_jetspecpp.runtime.draft_engine" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
