"""Client side of the data plane: one connection after its HELLO.

Called by dmp/transport/connection_pool.py, and by dmp/client/node_link.py to learn which node
listens at an address. Errors are translated once, here: every failure is a CacheError.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tierkv.dmp.transport.ask import Ask, SingleRead
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import AHEAD, MOVES, FrameHeader, FrameType, parse_header
from tierkv.dmp.wire.range_codec import Ref
from tierkv.dmp.wire.socket_io import TlsWire, Wire
from tierkv.dmp.zone_traffic import OtherZone
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    ChecksumError,
    ConfigError,
    LeaseExpiredError,
    PoolFullError,
    RemoteProtocolError,
    StaleEpochError,
    ThrottledError,
    TransportError,
)
from tierkv.kvcore.ids import NodeId
from tierkv.kvwire.credentials import ClusterToken, TlsFiles, client_context, shown
from tierkv.kvwire.frames import HEADER_BYTES

_BY_CODE: Final[dict[str, type[CacheError]]] = {
    kind.code: kind
    for kind in (
        BlockNotFoundError,
        ChecksumError,
        LeaseExpiredError,
        PoolFullError,
        StaleEpochError,
        ThrottledError,
    )
}
_MOST_REQUESTS: Final = MOVES - 1
_WINDOW: Final = 4
"""Frames in flight. All their requests together (READ: 4 x 10 KiB) fit the smallest socket buffers,
so that sending a request never blocks on replies that wait for this side."""


class RefusedError(TransportError):
    """The peer refused a valid request; ``refusal`` is the code of the peer's error."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.refusal = code


class BrokenConnectionError(TransportError):
    """The peer closed or reset the connection; a new connection may work."""


class SilentPeerError(TransportError):
    """The peer did not answer, or did not accept a connection, in time."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Address of a node, credentials and timeouts.

    Attributes:
        node_id: the node that must answer; empty if the caller only knows an address.
        address: ``host:port``.
        token: cluster token.
        connect_timeout_s: separate timeout for connecting, for TLS and for HELLO.
        op_timeout_s: longest wait for one frame, or for a piece of a long frame.
        promote_timeout_s: longest wait for blocks that come from disk.
        connections: maximum number of idle connections to keep.
        tls: certificate files; None means plain TCP.
        other_zone: the node's zone, if it is not this process's.
        client_id: groups connections: when the last connection of a client closes, the node frees
            the client's reservations and holds. Empty makes each connection pool a client of its
            own.
        moves: the client moves blocks between nodes: its transfers come after all others.
    """

    node_id: NodeId
    address: str
    token: ClusterToken = field(default="", repr=False)
    connect_timeout_s: float = 1.0
    op_timeout_s: float = 5.0
    promote_timeout_s: float = 30.0
    connections: int = 4
    tls: TlsFiles | None = None
    other_zone: OtherZone | None = None
    client_id: str = ""
    moves: bool = False


class PeerConnection:
    """A connection to one peer; used by one thread at a time.

    Attributes:
        welcome: identity of the node that answered.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._request_id = 0
        # Nodes of older releases know reads ahead only.
        self._marks = MOVES | AHEAD if peer.moves else 0
        try:
            self._wire = _connect(peer)
        except (OSError, ValueError, ConfigError) as error:
            raise _translated(error, peer) from error
        self._single = SingleRead(self._wire)
        try:
            self.welcome = self._greet()
            self._wire.set_timeout(peer.op_timeout_s)
        except BaseException:
            self._wire.close()
            raise

    def _greet(self) -> m.Welcome:
        peer = self._peer
        head = self.call(FrameType.HELLO, m.Hello(shown(peer.token), peer.client_id).pack())
        try:
            welcome = m.Welcome.unpack(head)
        except RemoteProtocolError as error:
            raise TransportError(f"{peer.address}: {error}") from error
        if peer.node_id and welcome.node_id != peer.node_id:
            raise TransportError(f"{peer.address} is node {welcome.node_id}, not {peer.node_id}")
        return welcome

    def about(self) -> m.About:
        """Ask for the rest of the node's identity; a node of an older release knows no more.

        Such a node ends the connection.

        Raises:
            TransportError: the node does not answer.
        """
        try:
            return m.About.unpack(self.call(FrameType.ABOUT, b""))
        except RefusedError:
            return m.About()
        except RemoteProtocolError as error:
            raise _translated(error, self._peer) from error

    def call(self, kind: FrameType, head: bytes, *, timeout_s: float = 0.0) -> bytearray:
        """Send a request and return the head of the reply.

        Raises:
            CacheError: the peer's refusal, or TransportError.
        """
        ask = Ask(kind, head)
        if not timeout_s:
            self.exchange([ask])
            return ask.reply
        self._wire.set_timeout(timeout_s)
        try:
            self.exchange([ask])
        finally:
            self._wire.set_timeout(self._peer.op_timeout_s)
        return ask.reply

    def exchange(self, asks: Iterable[Ask]) -> None:
        """Send requests, a few in flight at a time, and receive the replies in order.

        After a refusal no more requests are sent. Replies to requests in flight are still received,
        so that the connection stays usable.

        Raises:
            CacheError: the first refusal, or TransportError.
        """
        waiting: deque[tuple[int, Ask]] = deque()
        refused: CacheError | None = None
        try:
            for ask in asks:
                if len(waiting) == _WINDOW:
                    refused = self._receive(*waiting.popleft())
                    if refused is not None:
                        break
                waiting.append((self._send(ask), ask))
            while waiting:
                refused = self._receive(*waiting.popleft()) or refused
        except (OSError, EOFError, ValueError, RemoteProtocolError) as error:
            raise _translated(error, self._peer) from error
        if refused is not None:
            raise refused

    def read_one(self, ref: Ref, view: memoryview, *, ahead: bool = False) -> bool:
        """Read one range into ``view``; False if the bytes do not match the received checksum.

        Args:
            ref: the range.
            view: as long as the range.
            ahead: nobody waits for the bytes yet.

        Raises:
            CacheError: the refusal, or TransportError.
        """
        self._request_id = request_id = (self._request_id + 1) & _MOST_REQUESTS
        request_id |= AHEAD if ahead else self._marks
        single = self._single
        try:
            got = single.read(request_id, ref, view)
            if single.is_answer(request_id, ref[5]):
                return single.finish(view, got)
            refused = self._refusal_in(bytes(single.lead) + view[:got], request_id)
        except (OSError, EOFError, ValueError, RemoteProtocolError) as error:
            raise _translated(error, self._peer) from error
        raise refused

    def _refusal_in(self, raw: bytes, request_id: int) -> CacheError:
        """Receive the rest of an ERROR frame whose first bytes have arrived."""
        header = parse_header(raw)
        missing = HEADER_BYTES + header.head_bytes - len(raw)
        wrong = header.type is not FrameType.ERROR or header.request_id not in (request_id, 0)
        if wrong or missing < 0:
            raise RemoteProtocolError(f"unexpected {header.type.name} frame")
        rest = bytearray(missing)
        self._wire.receive_into(memoryview(rest))
        return self._refused(header, raw[HEADER_BYTES:] + rest)

    @property
    def is_open(self) -> bool:
        """True if no close by the peer is known."""
        return self._wire.is_open

    def close(self) -> None:
        """Close the socket."""
        self._wire.close()

    def _send(self, ask: Ask) -> int:
        self._request_id = (self._request_id + 1) & _MOST_REQUESTS
        request_id = self._request_id | ask.flags | self._marks
        ask.send(self._wire, request_id)
        return request_id

    def _receive(self, request_id: int, ask: Ask) -> CacheError | None:
        raw = bytearray(HEADER_BYTES)
        self._wire.receive_into(memoryview(raw))
        header = parse_header(raw)
        if header.request_id not in (request_id, 0) or header.type not in _ANSWERS:
            raise RemoteProtocolError(f"unexpected {header.type.name} frame")
        if header.type is FrameType.ERROR:
            return self._refusal(header)
        ask.take(self._wire, header)
        return None

    def _refusal(self, header: FrameHeader) -> CacheError:
        head = bytearray(header.head_bytes)
        self._wire.receive_into(memoryview(head))
        return self._refused(header, head)

    def _refused(self, header: FrameHeader, head: bytes | bytearray) -> CacheError:
        error = _as_error(m.ErrorReply.unpack(head), self._peer)
        if header.request_id == 0 or isinstance(error, TransportError):
            raise error
        return error


_UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_ANSWERS: Final = (FrameType.REPLY, FrameType.ERROR)


def _connect(peer: Peer) -> Wire:
    host, _, port = peer.address.rpartition(":")
    host = host.strip("[]")
    sock = socket.create_connection((host, int(port)), timeout=peer.connect_timeout_s)
    try:
        if peer.tls is None:
            return Wire(sock, timeout_s=peer.connect_timeout_s)
        name = peer.tls.server_name or host
        secured = client_context(peer.tls).wrap_socket(sock, server_hostname=name)
        return TlsWire(secured, timeout_s=peer.connect_timeout_s)
    except BaseException:
        sock.close()
        raise


def _translated(error: Exception, peer: Peer) -> TransportError:
    """Turn socket and protocol errors into cache errors."""
    who = f"{peer.node_id} at {peer.address}"
    if isinstance(error, (ConnectionError, EOFError)) and not isinstance(
        error, ConnectionRefusedError
    ):
        return BrokenConnectionError(f"{who}: {error}")
    if isinstance(error, TimeoutError) or getattr(error, "errno", 0) in _UNREACHABLE:
        return SilentPeerError(f"{who}: {error}")
    if isinstance(error, RemoteProtocolError):
        return TransportError(f"{who} broke the protocol: {error}")
    return TransportError(f"{who}: {error}")


def _as_error(failure: m.ErrorReply, peer: Peer) -> CacheError:
    kind = _BY_CODE.get(failure.code)
    if kind is None:
        text = f"{peer.node_id or peer.address} refused ({failure.code}): {failure.message}"
        return RefusedError(text, code=failure.code)
    return kind(failure.message)
