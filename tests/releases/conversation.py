"""A client's talk with a pool node, as bytes: recorded once per release, and played back later.

The same steps run when a release's formats are frozen (tests/releases/freeze.py) and when they are
checked, so that a recorded reply answers the same question.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.fix_dmp import block_key, fetch, make_put, make_range, store
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvwire.frames import HEADER, HEADER_BYTES

NODE = NodeId("frozen")
CLIENT_ID = "c1" * 16
STRANGE_TYPE = 250
"""A frame type that no release knows: how a node refuses it tells how it refuses new ones."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it went over the wire."""

    header: bytes
    head: bytes
    payload: bytes

    @property
    def type(self) -> int:
        """The number of the frame's type."""
        return int(HEADER.unpack(self.header)[2])

    @property
    def bytes(self) -> bytes:
        """The whole frame."""
        return self.header + self.head + self.payload


def read_frame(sock: socket.socket) -> Frame | None:
    """Receive a frame; None at the end of the stream."""
    header = _exactly(sock, HEADER_BYTES)
    if header is None:
        return None
    head_bytes, payload_bytes = HEADER.unpack(header)[5:7]
    return Frame(header, _exactly(sock, head_bytes) or b"", _exactly(sock, payload_bytes) or b"")


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        piece = sock.recv(size - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)


def talk(address: str) -> None:
    """Do everything a client does, over one connection, and check every answer."""
    peer = Peer(NODE, address, "", 5.0, 5.0, connections=1, client_id=CLIENT_ID)
    pool = TcpPoolNode(peer, host=HostId("elsewhere"), clock=ManualClock())
    try:
        a, b = store(pool, "a"), store(pool, "b", "a")
        known = {"session": "s-1", "depth": 3, "tail": True, "expected_in_s": 2.5}
        data = memoryview(make_range("c", 0) + make_range("c", 1))
        (c,) = pool.put([make_put("c", "b", **known)], [data])
        assert c is not None
        keys = [block_key(name) for name in "abcd"]
        assert pool.lookup(keys) == [a, b, c, None]
        assert pool.promote(keys[3:]) == [None]
        assert fetch(pool, a) == [make_range("a", 0), make_range("a", 1)]
        assert fetch(pool, c, [1]) == [make_range("c", 1)]
        described = pool.describe(keys)
        assert [block is not None for block in described] == [True, True, True, False]
        assert pool.hold([a, b], ttl_s=9.0) == [True, True]
        pool.release([a, b])
        pool.touch([a], read_bytes=48_000)
        (grant,) = pool.reserve([make_put("d")])
        assert grant is not None
        pool.abort([grant])
        assert pool.stats().memory.blocks_used == 3
    finally:
        pool.close()


class Recorder:
    """Stands before a node and notes each request with its reply."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._node = (host, int(port))
        self.exchanges: list[tuple[Frame, Frame]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._node) as node:
            while (asked := read_frame(client)) is not None:
                node.sendall(asked.bytes)
                answer = read_frame(node)
                assert answer is not None
                self.exchanges.append((asked, answer))
                client.sendall(answer.bytes)

    def close(self) -> None:
        """Wait for the end of the talk."""
        self._thread.join(10)
        self._listener.close()


class FrozenNode:
    """A node of an earlier release: it says what that release's node said, byte for byte.

    Attributes:
        unknown: types of the frames that it refused.
    """

    def __init__(self, exchanges: Sequence[tuple[Frame, Frame]], refusal: bytes) -> None:
        self._replies: Mapping[tuple[int, bytes, bytes], Frame] = {
            (asked.type, asked.head, asked.payload): reply for asked, reply in exchanges
        }
        self._types = {asked.type for asked, _ in exchanges}
        self._refusal = refusal
        self.unknown: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            while (asked := read_frame(client)) is not None:
                reply = self._replies.get((asked.type, asked.head, asked.payload))
                if reply is None:
                    self.unknown.append(asked.type)
                    client.sendall(self._refusal)
                    return
                fields = list(HEADER.unpack(reply.header))
                fields[4] = HEADER.unpack(asked.header)[4]  # The request's own number.
                client.sendall(HEADER.pack(*fields) + reply.head + reply.payload)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
