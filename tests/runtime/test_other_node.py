"""The draft process on another node of a real Ray cluster: drafting starts, breaks, resumes, and ends cleanly."""

import logging
import os
import signal

import psutil
import pytest

from tests.draft_process_tools import freeze
from tests.ray_nodes import FAR, FAR_IP, HEAD_IP
from tests.runtime.scripted_engines import RAISE
from tests.runtime.test_draft_process import (
    REPLY_TIMEOUT,
    START_TIMEOUT,
    assert_replaced,
    batch,
    draft_of,
    ended,
    engine_config,
    wait_for,
)
from vllm_jetspecpp.draft_process import supervisor
from vllm_jetspecpp.draft_process.client import make_client
from vllm_jetspecpp.draft_process.placement import PlacementConfig
from vllm_jetspecpp.draft_process.supervisor import DraftProcessError


@pytest.fixture
def far_client(ray_nodes, monkeypatch):
    """Makes clients whose draft process is to run on the second node."""
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.05)
    for name, value in ray_nodes.environment.items():
        monkeypatch.setenv(name, value)
    clients = []

    def make(**placement):
        resources = {"num_cpus": 1, FAR: 1}
        placement = PlacementConfig(ray_address=ray_nodes.address, **{"draft_resources": resources} | placement)
        clients.append(make_client(engine_config(), placement, "tcp", REPLY_TIMEOUT, START_TIMEOUT))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def node_of(pid):
    """Address of the node whose raylet started a process."""
    (argument,) = [a for a in psutil.Process(pid).parent().cmdline() if a.startswith("--node_ip_address=")]
    return argument.partition("=")[2]


def test_life_on_another_node(ray_nodes, far_client, caplog):
    """It is killed, fails, is stopped, and loses its node with all that runs there."""
    caplog.set_level(logging.WARNING)
    core = (os.cpu_count() or 1) - 1
    client = far_client(any_node=True, draft_cores=[core])
    client.wait_started()
    assert client.ready() and client.generation == 1
    pid, _ = draft_of(client, 1)
    assert node_of(pid) == FAR_IP and ray_nodes.address.startswith(HEAD_IP)
    assert all(os.sched_getaffinity(int(t)) == {core} for t in os.listdir(f"/proc/{pid}/task"))
    (connection,) = [c for c in psutil.Process().net_connections("tcp") if c.raddr and owner_of(c.raddr.port) == pid]
    assert connection.laddr.ip == HEAD_IP and connection.status == psutil.CONN_ESTABLISHED
    assert not [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]

    os.kill(pid, signal.SIGKILL)
    pid = assert_replaced(client, pid, generation=2)

    client.send(batch(20, token=RAISE))
    pid = assert_replaced(client, pid, generation=3)
    assert "scripted failure" in caplog.text

    freeze(pid)
    client.send(batch(30))
    assert client.receive() is None and client.stats.timeouts == 1
    pid = assert_replaced(client, pid, generation=4)
    assert node_of(pid) == FAR_IP

    ray_nodes.lose_far()
    wait_for(lambda: not client.send(batch(40)) or client.receive() is None, 10, "the end of drafting")
    assert ended(pid)
    ray_nodes.start_far()
    wait_for(client.ready, START_TIMEOUT, "drafting on the node that came back")
    pid, _ = draft_of(client, 50)
    client.close()
    wait_for(lambda: ended(pid), 10, "the end of the draft process")
    assert not client.ready() and not client.send(batch(99))
    assert not [p for p in psutil.Process().children() if "vllm_jetspecpp.draft_process.keeper" in p.cmdline()]


def owner_of(port):
    """Id of the process with a TCP connection from ``port`` of this machine; None when there is none."""
    return next((c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port), None)


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ({"any_node": True, "draft_cores": [4095]}, r"on the draft process's node, got \[4095\]"),
        ({"any_node": False}, rf"no place for the draft process.*on node:{HEAD_IP}"),
    ],
)
def test_what_cannot_be_placed_says_why(far_client, placement, reason, monkeypatch):
    if not placement["any_node"]:
        monkeypatch.setattr(supervisor, "TELLING", START_TIMEOUT - 1)  # the resources never come
    client = far_client(**placement)
    with pytest.raises(DraftProcessError, match=reason):
        client.wait_started()


def test_shared_memory_ends_at_this_host():
    with pytest.raises(ValueError, match="needs 'tcp'"):
        make_client(engine_config(), PlacementConfig(any_node=True), "shared_memory", 1.0, 1.0)
