"""Who may speak on a TCP connection: worker and draft process prove to each other that they know a secret.

Whoever connects gets a nonce and must answer with one of its own and an HMAC over both; the worker then proves itself
alike. The secret never crosses the connection, and nothing else is read before.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket
import time

from vllm_jetspecpp.transport.base import TransportClosed

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
MAX_GUESTS = 64

_NONCE_BYTES = 32
_PROOF_BYTES = 32  # of SHA-256
_DRAFT_ROLE, _WORKER_ROLE = b"vllm_jetspecpp draft process", b"vllm_jetspecpp worker"
_GUEST_SECONDS = 5.0


def _proof(secret: bytes, role: bytes, worker_nonce: bytes, draft_nonce: bytes) -> bytes:
    """What only one who knows the secret can say; the role keeps an end from being answered with its own words."""
    return hmac.digest(secret, role + worker_nonce + draft_nonce, "sha256")


def introduce(connection: socket.socket, secret: bytes, where: str) -> None:
    """The draft process's half of the handshake.

    Args:
        connection: to the worker.
        secret: what both are to know.
        where: address of the worker, for messages.

    Raises:
        TransportClosed: the worker is gone, or does not take us for its draft process.
        ValueError: who listens there does not know the secret.
    """
    try:
        worker_nonce = _read_exactly(connection, _NONCE_BYTES)
        draft_nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(draft_nonce + _proof(secret, _DRAFT_ROLE, worker_nonce, draft_nonce))
        answer = _read_exactly(connection, _PROOF_BYTES)
    except OSError as error:
        raise TransportClosed(f"the worker at {where} did not let us in ({error})") from error
    if not hmac.compare_digest(answer, _proof(secret, _WORKER_ROLE, worker_nonce, draft_nonce)):
        raise ValueError(f"who listens at {where} does not know the secret of this connection")


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


class Door:
    """The worker's listening socket, and those who connected and have not proved themselves yet."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._guests: list[_Guest] = []

    @property
    def fd(self) -> int:
        """Descriptor of the listening socket."""
        return self._socket.fileno()

    def look(self) -> socket.socket | None:
        """The connection of the first who proved itself, if there is one by now; never waits."""
        self._accept()
        for guest in list(self._guests):
            try:
                proved = guest.proved(self._secret)
            except OSError as error:
                logger.warning("transport tcp: dropped a connection from %s: %s", guest.address, error)
                self._guests.remove(guest)
                guest.connection.close()
                continue
            if proved:
                self._guests.remove(guest)
                return guest.connection
        return None

    def _accept(self) -> None:
        while len(self._guests) < MAX_GUESTS:
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EINVAL:  # the keeper has not bound it yet
                    return
                if error.errno == errno.ECONNABORTED:
                    continue
                raise
            self._guests.append(_Guest(connection, f"{address[0]}:{address[1]}"))

    def close(self) -> None:
        """Close the listening socket and drop who waits."""
        for guest in self._guests:
            guest.connection.close()
        self._guests.clear()
        self._socket.close()


class _Guest:
    """One who connected: it was sent a nonce and owes a nonce of its own and a proof."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._answer = b""
        self._greeted = False
        self._deadline = time.monotonic() + _GUEST_SECONDS
        connection.setblocking(False)

    def proved(self, secret: bytes) -> bool:
        """Whether it proved itself; False as long as its answer is not complete.

        Raises:
            OSError: it is of no use: gone, wrong or late.
        """
        if not self._greeted:
            self.connection.send(self._nonce)  # the buffer of a new connection has room for it
            self._greeted = True
        size = _NONCE_BYTES + _PROOF_BYTES
        try:
            part = self.connection.recv(size - len(self._answer))
        except BlockingIOError:
            if time.monotonic() > self._deadline:
                raise TimeoutError("it did not prove itself in time") from None
            return False
        if not part:
            raise ConnectionError("it left before it proved itself")
        self._answer += part
        if len(self._answer) < size:
            return False
        nonce, proof = self._answer[:_NONCE_BYTES], self._answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, _DRAFT_ROLE, self._nonce, nonce)):
            raise PermissionError("it does not know the secret")
        self.connection.send(_proof(secret, _WORKER_ROLE, self._nonce, nonce))
        return True
