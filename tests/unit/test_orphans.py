"""The watch over a server that may be killed: who the engine core is, and that its end is asked for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("setproctitle")

from vllm_jetspecpp.vllm_plugin.orphans import find_engine_core, parent_of

CORE = """
import os, signal, sys, time
import setproctitle
from vllm_jetspecpp.vllm_plugin import orphans
setproctitle.setproctitle("VLLM::EngineCore")
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), os._exit(0)))
orphans.watch_server()
print(os.getpid(), orphans.find_engine_core(os.getpid()), orphans.parent_of(os.getpid()), flush=True)
time.sleep(60)
"""
SERVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CORE!r}])"


def test_a_killed_server_ends_its_engine_core() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    core, found, parent = map(int, server.stdout.readline().split())
    assert (found, parent) == (core, server.pid) == (core, parent_of(core))
    server.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert server.stdout.readline() == "asked to end\n"
    assert time.monotonic() - began < 10
    server.wait()


def test_an_engine_in_the_users_process_is_left_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    assert find_engine_core(child.pid) is None
    child.kill()
    child.wait()
    assert parent_of(child.pid) == 0
