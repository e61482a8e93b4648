"""Client side of the data plane: one connection, and a small pool of them per peer.

Called by dmp/transport/tcp.py. Errors are translated here, once: whatever goes wrong is a
CacheError. Connections are made when needed and again after a failure.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dmp import messages as m
from dmp.frame import HEADER_BYTES, FrameType, pack_header, parse_header
from dmp.socket_io import Buffer, receive, receive_into, send_all, tune
from kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    ChecksumError,
    LeaseExpiredError,
    PoolFullError,
    RemoteProtocolError,
    StaleEpochError,
    TransportError,
)
from kvcore.ids import NodeId

T = TypeVar("T")

_BY_CODE: Final[dict[str, type[CacheError]]] = {
    kind.code: kind
    for kind in (
        BlockNotFoundError,
        ChecksumError,
        LeaseExpiredError,
        PoolFullError,
        StaleEpochError,
    )
}


class RefusedError(TransportError):
    """The peer understood and said no; ``refusal`` is the code of its error."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.refusal = code


class BrokenConnectionError(TransportError):
    """The peer closed or reset the connection; a new one may work."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom to connect to, and how patiently.

    Attributes:
        node_id: who must answer; empty where the caller only knows an address.
        address: ``host:port``.
        token: cluster token.
        connect_timeout_s: for connecting and HELLO.
        op_timeout_s: longest silence inside one operation.
        connections: most idle connections kept.
    """

    node_id: NodeId
    address: str
    token: str = field(default="", repr=False)
    connect_timeout_s: float = 1.0
    op_timeout_s: float = 5.0
    connections: int = 4


class Connection:
    """One connection that has said HELLO; used by one thread at a time."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._request_id = 0
        host, _, port = peer.address.rpartition(":")
        with _translated(peer):
            where = (host.strip("[]"), int(port))
            self._sock = socket.create_connection(where, timeout=peer.connect_timeout_s)
        try:
            with _translated(peer):
                tune(self._sock)
            self.welcome = m.Welcome.unpack(self._call_hello())
            if peer.node_id and self.welcome.node_id != peer.node_id:
                raise TransportError(
                    f"{peer.address} is node {self.welcome.node_id}, not {peer.node_id}"
                )
            self._sock.settimeout(peer.op_timeout_s)
        except RemoteProtocolError as error:
            self._sock.close()
            raise TransportError(f"{peer.address}: {error}") from error
        except BaseException:
            self._sock.close()
            raise

    def _call_hello(self) -> bytearray:
        return self.call(FrameType.HELLO, m.Hello(self._peer.token, "tierkv").pack())

    def call(
        self,
        kind: FrameType,
        head: bytes,
        payload: Buffer = b"",
        *,
        into: Callable[[bytearray], Sequence[memoryview]] | None = None,
    ) -> bytearray:
        """Send one request and return the head of its reply.

        Args:
            kind: what to ask.
            head: its packed message.
            payload: raw bytes that follow.
            into: given the reply's head, says where the reply's payload goes.

        Raises:
            CacheError: as the peer said, or TransportError.
        """
        self._request_id = (self._request_id + 1) & 0xFFFFFFFF
        lead = pack_header(kind, self._request_id, head_bytes=len(head), payload_bytes=len(payload))
        with _translated(self._peer):
            send_all(self._sock, [lead, head, payload])
            reply = parse_header(receive(self._sock, HEADER_BYTES))
            reply_head = receive(self._sock, reply.head_bytes)
            if reply.type is FrameType.ERROR:
                raise _as_error(m.Failure.unpack(reply_head), self._peer)
            if reply.type is not FrameType.REPLY or reply.request_id != self._request_id:
                raise RemoteProtocolError(f"unexpected {reply.type.name} frame")
            views = into(reply_head) if into else ()
            if sum(map(len, views)) != reply.payload_bytes:
                raise RemoteProtocolError(f"{reply.payload_bytes} payload bytes, expected others")
            for view in views:
                receive_into(self._sock, view)
        return reply_head

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class ConnectionPool:
    """Idle connections to one peer; thread-safe."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def run(self, action: Callable[[Connection], T]) -> T:
        """Do something with a connection of one's own.

        An idle connection may have died unseen (the node restarted): then all idle ones are
        dropped and the action is tried again on a new one. Asking twice is harmless: what the
        first time took is bound to the old incarnation or expires.

        Raises:
            CacheError: the action's, or TransportError when there is no connection.
        """
        connection = self._take()
        if connection is not None:
            try:
                return self._use(connection, action)
            except BrokenConnectionError:
                self._drop_idle()
        return self._use(Connection(self.peer), action)

    def close(self) -> None:
        """Close all; later calls raise TransportError."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _use(self, connection: Connection, action: Callable[[Connection], T]) -> T:
        try:
            result = action(connection)
        except TransportError:
            connection.close()
            raise
        except CacheError:
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return result

    def _take(self) -> Connection | None:
        with self._lock:
            if self._closed:
                raise TransportError(f"the connection to {self.peer.node_id} is closed")
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self.peer.connections:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


@contextlib.contextmanager
def _translated(peer: Peer) -> Iterator[None]:
    """Turn socket and protocol errors into cache errors."""
    try:
        yield
    except (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, EOFError) as error:
        raise BrokenConnectionError(f"{peer.node_id} at {peer.address}: {error}") from error
    except (OSError, ValueError) as error:
        raise TransportError(f"{peer.node_id} at {peer.address}: {error}") from error
    except RemoteProtocolError as error:
        raise TransportError(f"{peer.node_id} broke the protocol: {error}") from error


def _as_error(failure: m.Failure, peer: Peer) -> CacheError:
    kind = _BY_CODE.get(failure.code)
    if kind is None:
        text = f"{peer.node_id or peer.address} refused ({failure.code}): {failure.message}"
        return RefusedError(text, code=failure.code)
    return kind(failure.message)
