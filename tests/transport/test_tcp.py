"""What is particular to TCP: who is let in, and bytes that no draft process of ours sends."""

import hmac
import os
import secrets
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from threading import Thread

import psutil
import pytest
import torch

from tests.transport.ends import LOOPBACK, attach_here, verified, wait_attached
from vllm_jetspecpp.transport import admission, codec, tcp
from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, VerifiedBatch
from vllm_jetspecpp.transport.tcp import TcpDraftEnd, TcpHandle, TcpWorkerEnd
from vllm_jetspecpp.types import Origin

REPLY = DraftBatch(1, (Draft(0, (5, 6), Origin.HIT),))


@pytest.fixture
def worker():
    end = TcpWorkerEnd()
    yield end
    end.close()


@contextmanager
def raw_peer(end, handle):
    """A peer that knows the secret, and then sends what it likes."""
    with socket.create_connection((handle.host, handle.port)) as peer:
        thread = Thread(target=wait_attached, args=(end,))
        thread.start()
        admission.introduce(peer, bytes.fromhex(handle.secret), "the worker")
        thread.join()
        yield peer


def encoded_reply():
    body = memoryview(bytearray(codec.draft_bytes(REPLY)))
    codec.encode_draft(REPLY, body)
    return struct.pack("!q", len(body)) + bytes(body)


def listening(port):
    return [
        connection
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]


def test_it_listens_on_one_address_until_it_is_attached(worker):
    assert not worker.attached, "not bound yet"
    handle = worker.handle.listen(LOOPBACK)
    assert [c.laddr.ip for c in listening(handle.port)] == [LOOPBACK]
    draft = attach_here("tcp", worker, asdict(handle))
    assert not listening(handle.port)
    with pytest.raises(TransportClosed, match="no worker at"):
        TcpDraftEnd(handle)
    draft.send(REPLY)
    assert worker.receive(1, 20.0) == REPLY
    for end in (worker._stream, draft._stream):
        assert end._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    draft.close()
    draft.close()


def test_foreign_addresses_are_refused(worker):
    for host in ("203.0.113.7", "::1", "nowhere.invalid"):
        with pytest.raises(ValueError, match="must be an IPv4 address of this machine"):
            worker.handle.listen(host)


def test_the_secret_shows_nowhere(worker, monkeypatch):
    """Neither in what is printed of a handle nor on the wire."""
    wire = bytearray()
    handle = worker.handle.listen(LOOPBACK)
    assert len(bytes.fromhex(handle.secret)) == 32
    assert handle.secret not in repr(handle) + repr(worker.handle)
    with socket.create_server((LOOPBACK, 0)) as middle:

        def forward():
            left = middle.accept()[0]
            right = socket.create_connection((handle.host, handle.port))
            for size, source, sink in ((32, right, left), (64, left, right), (32, right, left)):
                data = admission._read_exactly(source, size)
                wire.extend(data)
                sink.sendall(data)

        Thread(target=forward, daemon=True).start()
        attach_here("tcp", worker, asdict(replace(handle, port=middle.getsockname()[1]))).close()
    assert len(wire) == 128 and bytes.fromhex(handle.secret) not in wire and handle.secret.encode() not in wire


def wrong_secret(handle):
    with pytest.raises(TransportClosed, match="did not let us in"):
        TcpDraftEnd(replace(handle, secret=secrets.token_hex(32)))


def garbage(handle):
    with socket.create_connection((handle.host, handle.port)) as peer:
        peer.sendall(secrets.token_bytes(1000))
        assert end_of(peer)


def reflection(handle):
    """The worker's own words back: nonce for nonce, with no proof."""
    with socket.create_connection((handle.host, handle.port)) as peer:
        nonce = admission._read_exactly(peer, 32)
        peer.sendall(nonce + nonce)
        assert end_of(peer)


def other_role(handle):
    """A proof that only the worker may give, from one who knows the secret."""
    with socket.create_connection((handle.host, handle.port)) as peer:
        nonce = admission._read_exactly(peer, 32)
        proof = hmac.digest(bytes.fromhex(handle.secret), admission._WORKER_ROLE + nonce + nonce, "sha256")
        peer.sendall(nonce + proof)
        assert end_of(peer)


def silence(handle):
    with socket.create_connection((handle.host, handle.port)) as peer:
        peer.sendall(b"G")
        assert end_of(peer)


def message_at_once(handle):
    with socket.create_connection((handle.host, handle.port)) as peer:
        peer.sendall(encoded_reply())
        assert end_of(peer)


def end_of(peer):
    """Whether the worker hangs up without a word beyond its nonce."""
    received = b""
    peer.settimeout(30)
    try:
        while part := peer.recv(100):
            received += part
    except ConnectionResetError:
        pass
    return len(received) <= 32


@pytest.mark.parametrize("knock", [wrong_secret, garbage, reflection, other_role, silence, message_at_once])
def test_who_does_not_know_the_secret_is_dropped(worker, knock, monkeypatch, caplog):
    """And the right one still gets in."""
    monkeypatch.setattr(admission, "_GUEST_SECONDS", 0.3)
    handle = worker.handle.listen(LOOPBACK)
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(knock, handle)
        while not stranger.done():
            assert not worker.attached
            time.sleep(0.01)
        stranger.result()
    assert worker._door._guests == [] and "dropped a connection from 127.0.0.1" in caplog.text
    draft = attach_here("tcp", worker, asdict(handle))
    draft.send(REPLY)
    assert worker.receive(1, 20.0) == REPLY
    draft.close()


def test_many_strangers_do_not_keep_the_draft_process_out(worker, monkeypatch):
    monkeypatch.setattr(admission, "_GUEST_SECONDS", 0.3)
    monkeypatch.setattr(admission, "MAX_GUESTS", 4)
    handle = worker.handle.listen(LOOPBACK)
    strangers = [socket.create_connection((handle.host, handle.port)) for _ in range(4)]
    attach_here("tcp", worker, asdict(handle)).close()
    for stranger in strangers:
        stranger.close()


def test_a_worker_that_does_not_know_the_secret_is_refused():
    with socket.create_server((LOOPBACK, 0)) as server:
        handle = TcpHandle(LOOPBACK, server.getsockname()[1], secrets.token_hex(32))

        def impostor():
            connection = server.accept()[0]
            connection.sendall(secrets.token_bytes(32))
            proof = admission._read_exactly(connection, 64)
            connection.sendall(proof[32:])  # its own proof back

        Thread(target=impostor, daemon=True).start()
        with pytest.raises(ValueError, match="does not know the secret"):
            TcpDraftEnd(handle)


def test_a_worker_that_says_nothing_is_given_up():
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        pytest.raises(TransportClosed, match="did not let us in"),
    ):
        TcpDraftEnd(TcpHandle(LOOPBACK, server.getsockname()[1], secrets.token_hex(32)), timeout=0.2)


@pytest.mark.parametrize("length", [-1, 0, tcp.MAX_TO_WORKER_BYTES + 1, 1 << 62])
def test_impossible_lengths_are_refused_before_memory_is_asked_for(worker, length):
    with raw_peer(worker, worker.handle.listen(LOOPBACK)) as peer:
        peer.sendall(struct.pack("!q", length))
        with pytest.raises(ValueError, match="allowed are 1 to 1048576"):
            worker.receive(1, 20.0)
        with pytest.raises(TransportClosed):
            worker.receive(1, 20.0)


def test_garbage_in_a_message_is_a_value_error(worker):
    with raw_peer(worker, worker.handle.listen(LOOPBACK)) as peer:
        peer.sendall(struct.pack("!q", 100) + secrets.token_bytes(100))
        with pytest.raises(ValueError, match="not a DraftBatch"):
            worker.receive(1, 20.0)


def test_a_peer_that_dies_amid_a_message(worker):
    with raw_peer(worker, worker.handle.listen(LOOPBACK)) as peer:
        peer.sendall(encoded_reply()[:-3])
        with pytest.raises(TimeoutError):
            worker.receive(1, 0.1)
        peer.close()
        with pytest.raises(TransportClosed, match="amid a message"):
            worker.receive(1, 20.0)


def test_a_message_may_come_in_drops(worker):
    with raw_peer(worker, worker.handle.listen(LOOPBACK)) as peer:
        for byte in encoded_reply()[:-1]:
            peer.sendall(bytes([byte]))
            with pytest.raises(TimeoutError):
                worker.receive(1, 0.001)
        peer.sendall(encoded_reply()[-1:])
        assert worker.receive(1, 20.0) == REPLY


def test_the_worker_may_die_amid_a_message(worker):
    draft = attach_here("tcp", worker, asdict(worker.handle.listen(LOOPBACK)))
    batch = VerifiedBatch(1, (verified(0, [1], torch.ones(1, 8)),))
    frame = memoryview(bytearray(codec.verified_bytes(batch)))
    codec.encode_verified(batch, frame)
    worker._stream._socket.send(struct.pack("!q", len(frame)) + frame[:-1])
    assert draft.receive(0.1) is None
    worker.close()
    with pytest.raises(TransportClosed, match="amid a message"):
        draft.receive(20.0)
    draft.close()


def test_descriptors_are_freed():
    before = len(os.listdir("/proc/self/fd"))
    worker = TcpWorkerEnd()
    handle = worker.handle.listen(LOOPBACK)
    stranger = socket.create_connection((handle.host, handle.port))
    draft = attach_here("tcp", worker, asdict(handle))
    for closing in (worker, draft, stranger):
        closing.close()
    assert len(os.listdir("/proc/self/fd")) == before
