"""Nothing of a private cluster can be reached from another machine."""

import contextlib
import ipaddress
import socket

import psutil

from tests.runtime.test_draft_process import (
    REPLY_TIMEOUT,
    START_TIMEOUT,
    assert_nothing_left,
    cluster_processes,
    draft_of,
    engine_config,
    temp_dir,  # noqa: F401 - a fixture
)
from vllm_jetspecpp.draft_process.client import make_client
from vllm_jetspecpp.draft_process.placement import PlacementConfig


def is_loopback(address):
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def open_sockets(pids):
    """(process, kind, address) of every TCP socket that listens and every UDP socket."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper of Ray that ended meanwhile
            process = psutil.Process(pid)
            for connection in process.net_connections("inet"):
                if connection.type == socket.SOCK_DGRAM or connection.status == psutil.CONN_LISTEN:
                    found.append((process.name(), connection.type.name, connection.laddr.ip))
    return found


def test_a_private_cluster_listens_on_loopback_only(temp_dir):  # noqa: F811
    """Of all processes: keeper, GCS, monitor, raylet, agents and the actor, which serves a worker through TCP here."""
    client = make_client(engine_config(), PlacementConfig(ray_address="local"), "tcp", REPLY_TIMEOUT, START_TIMEOUT)
    try:
        client.wait_started()
        assert client.ready()
        actor, _ = draft_of(client, 1)
        pids = {p.pid for p in psutil.Process().children(recursive=True)} | set(cluster_processes(temp_dir)) | {actor}
        sockets = open_sockets(pids)
        assert {name for name, _, _ in sockets} >= {"gcs_server", "raylet", psutil.Process(actor).name()}, sockets
        assert [s for s in sockets if not is_loopback(s[2])] == []
    finally:
        client.close()
    assert_nothing_left(temp_dir)
