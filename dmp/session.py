"""One client connection of a DMP node: frames in, node calls, frames out.

Run in a thread of its own by dmp/server.py. Requests may be pipelined; they are answered in order.
What the node refuses is an ERROR frame and the connection lives on; a peer that breaks the frame
rules gets one and is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
from collections.abc import Callable
from typing import Final

from dmp import messages as m
from dmp.frame import HEADER_BYTES, FrameHeader, FrameType, pack_header, parse_header
from dmp.node import DmpNode
from dmp.socket_io import Buffer, discard, receive, receive_into, send_all
from dmp.stored import pack_stored
from kvcore import limits
from kvcore.errors import (
    AuthenticationError,
    BlockNotFoundError,
    CacheError,
    RemoteProtocolError,
    TierKVError,
)

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S: Final = 5.0
LEAVE_TIMEOUT_S: Final = 0.2
MAX_LEAVE_BYTES: Final = 1 << 20


class Session:
    """A connection and what its peer may do."""

    def __init__(self, sock: socket.socket, node: DmpNode) -> None:
        self._sock = sock
        self._node = node
        self._trusted = False
        self._handlers: dict[FrameType, Callable[[bytearray], bytes]] = {
            FrameType.HELLO: self._hello,
            FrameType.LOOKUP: self._lookup,
            FrameType.RESERVE: self._reserve,
            FrameType.SEAL: self._seal,
            FrameType.ABORT: self._abort,
            FrameType.HOLD: self._hold,
            FrameType.RELEASE: self._release,
            FrameType.TOUCH: self._touch,
            FrameType.SUSPECT: self._suspect,
            FrameType.STATS: self._stats,
            FrameType.DESCRIBE: self._describe,
        }

    def run(self) -> None:
        """Serve frames until the peer leaves or breaks a rule."""
        try:
            self._sock.settimeout(HELLO_TIMEOUT_S)
            while self._serve_one():
                pass
        except (OSError, EOFError) as error:
            log.debug("dmp %s: connection ended: %s", self._node.node_id, error)
        except (RemoteProtocolError, AuthenticationError) as error:
            log.warning("dmp %s: peer dropped: %s", self._node.node_id, error)
            self._leave()

    def _leave(self) -> None:
        """Let the peer read why: closing over unread bytes would reset the connection first."""
        with contextlib.suppress(OSError, EOFError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(LEAVE_TIMEOUT_S)
            discard(self._sock, MAX_LEAVE_BYTES)

    def _serve_one(self) -> bool:
        raw = self._next_header()
        if raw is None:
            return False
        header = FrameHeader(FrameType.ERROR, 0, 0, 0)
        try:
            header = parse_header(raw, trusted=self._trusted)
            head = receive(self._sock, header.head_bytes)
            self._dispatch(header, head)
        except CacheError as error:
            self._send_error(header, error)
        except (RemoteProtocolError, AuthenticationError) as error:
            with contextlib.suppress(OSError):
                self._send_error(header, error)
            raise
        return True

    def _next_header(self) -> bytearray | None:
        """Wait for the next frame; a silent peer may stay, once it has said HELLO."""
        raw = bytearray(HEADER_BYTES)
        with memoryview(raw) as view:
            while True:
                try:
                    count = self._sock.recv_into(view)
                    break
                except TimeoutError:
                    if not self._trusted:
                        raise
            if count == 0:
                return None
            receive_into(self._sock, view, received=count)
        return raw

    def _dispatch(self, header: FrameHeader, head: bytearray) -> None:
        if header.type is FrameType.WRITE:
            self._write(header, head)
        elif header.payload_bytes:
            raise RemoteProtocolError(f"a {header.type.name} frame carries no payload")
        elif header.type is FrameType.READ:
            self._read(header, head)
        else:
            handler = self._handlers.get(header.type)
            if handler is None:
                raise RemoteProtocolError(f"a client does not send {header.type.name}")
            self._reply(header, handler(head))

    def _reply(self, header: FrameHeader, head: bytes) -> None:
        self._send(FrameType.REPLY, header, head)

    def _send_error(self, header: FrameHeader, error: TierKVError) -> None:
        self._send(FrameType.ERROR, header, m.Failure(error.code, error.message).pack())

    def _send(self, kind: FrameType, header: FrameHeader, head: bytes, *parts: Buffer) -> None:
        payload_bytes = sum(len(part) for part in parts)
        lead = pack_header(
            kind, header.request_id, head_bytes=len(head), payload_bytes=payload_bytes
        )
        send_all(self._sock, [lead, head, *parts])

    # Frames with bytes

    def _write(self, header: FrameHeader, head: bytearray) -> None:
        """Receive one range straight into its slot; swallow it if it may not go there."""
        refs = m.Ranges.unpack(head, self._node.node_id).refs
        if len(refs) != 1:
            raise RemoteProtocolError("a WRITE frame names one range")
        left = header.payload_bytes
        try:
            with self._node.open_write(refs[0].location, refs[0].index) as view:
                if len(view) != left:
                    raise BlockNotFoundError(f"the range has {len(view)} bytes, not {left}")
                left = 0
                receive_into(self._sock, view)
        except CacheError:
            discard(self._sock, left)
            raise
        self._reply(header, b"")

    def _read(self, header: FrameHeader, head: bytearray) -> None:
        """Send ranges straight from their slots."""
        refs = m.Ranges.unpack(head, self._node.node_id).refs
        with self._node.open_read(refs) as items:
            views = [item.view for item in items]
            if sum(map(len, views)) > limits.MAX_FRAME_BYTES:
                raise RemoteProtocolError("more is asked for than fits a frame")
            sums = [m.RangeSum(len(item.view), item.checksum) for item in items]
            self._send(FrameType.REPLY, header, m.ReadReply(sums).pack(), *views)

    # Frames without

    def _hello(self, head: bytearray) -> bytes:
        hello = m.Hello.unpack(head)
        node = self._node
        if not hmac.compare_digest(hello.token.encode(), node.config.token.encode()):
            raise AuthenticationError("wrong cluster token")
        self._trusted = True
        self._sock.settimeout(node.config.frame_timeout_s)
        path = str(node.config.segment_file)
        return m.Welcome(node.node_id, node.host, node.incarnation, path).pack()

    def _lookup(self, head: bytearray) -> bytes:
        return m.MaybeRefs(self._node.lookup(m.Lookup.unpack(head).keys)).pack()

    def _describe(self, head: bytearray) -> bytes:
        return pack_stored(self._node.describe(m.Lookup.unpack(head).keys))

    def _reserve(self, head: bytearray) -> bytes:
        ask = m.Reserve.unpack(head)
        return m.MaybeRefs(self._node.reserve(ask.puts, deadline_s=ask.deadline_s)).pack()

    def _seal(self, head: bytearray) -> bytes:
        ask = m.Seal.unpack(head, self._node.node_id)
        return m.MaybeRefs(self._node.seal(ask.items)).pack()

    def _abort(self, head: bytearray) -> bytes:
        self._node.abort(m.Refs.unpack(head, self._node.node_id).locations)
        return b""

    def _hold(self, head: bytearray) -> bytes:
        ask = m.Refs.unpack(head, self._node.node_id)
        return m.Flags(self._node.hold(ask.locations, ttl_s=ask.number)).pack()

    def _release(self, head: bytearray) -> bytes:
        self._node.release(m.Refs.unpack(head, self._node.node_id).locations)
        return b""

    def _touch(self, head: bytearray) -> bytes:
        ask = m.Refs.unpack(head, self._node.node_id)
        self._node.touch(ask.locations, read_bytes=int(ask.number))
        return b""

    def _suspect(self, head: bytearray) -> bytes:
        ask = m.Ranges.unpack(head, self._node.node_id)
        return m.Flags(self._node.suspect(ask.refs)).pack()

    def _stats(self, head: bytearray) -> bytes:
        if head:
            raise RemoteProtocolError("a STATS frame is empty")
        return m.pack_stats(self._node.stats())
