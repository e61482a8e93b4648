"""The meta server's side of the stream of locates, and the answers to locates over any carrier.

Made by metaserver/rpc/server.py beside the gRPC service, in the same event loop. Clients learn the
port from the answers over gRPC. The door refuses what it can't answer, and the client then asks
over gRPC; only the gRPC service reports errors.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError, RemoteProtocolError, TierKVError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, HostId
from tierkv.kvwire.credentials import LOOK_S, ClusterToken, ServerTls, accepts
from tierkv.kvwire.frames import FrameConnection
from tierkv.kvwire.v1 import meta_pb2 as pb
from tierkv.metaserver.directory.locate_reply import checked_question
from tierkv.metaserver.local import LocalMeta
from tierkv.metaserver.rpc import wire
from tierkv.metaserver.rpc.locate_stream import (
    FRAMES,
    MAX_HELLO_BYTES,
    VERSION,
    Header,
    LocateFrame,
    head_of,
    message_of,
)

log = logging.getLogger(__name__)
NO_STREAM: Final = -1
"""Port of a server without a stream."""

HELLO_TIMEOUT_S: Final = 5.0
MAX_STRANGERS: Final = 64
"""Connections without a HELLO yet; further connections are closed at once."""

MAX_GUESTS: Final = 4_096
_QUESTION_BYTES: Final = limits.MAX_CHAIN_BLOCKS * BLOCK_KEY_BYTES + (64 << 10)
"""Longest question: the keys of one locate, and room for the lengths of its chains and names."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


def answer_locate(meta: LocalMeta, request: pb.LocateRequest) -> pb.LocateReply:
    """Answer a locate of one chain.

    Raises:
        TierKVError: the question is malformed, or the directory can't answer.
    """
    reply = meta.locate_chain(
        wire.checked_chain(request.keys),
        reader=HostId(request.reader) if request.reader else None,
        max_replicas=request.max_replicas,
        reserve_s=request.reserve_s,
    )
    return wire.locate_reply_to_proto(reply)


def answer_locate_many(meta: LocalMeta, request: pb.LocateManyRequest) -> pb.LocateManyReply:
    """Answer a locate of several chains; raises as ``answer_locate``."""
    chains = checked_question(map(wire.checked_chain, request.chains))
    replies = meta.locate_chains(chains, reserve_s=request.reserve_s)
    return pb.LocateManyReply(replies=map(wire.locate_reply_to_proto, replies))


class LocateDoor:
    """Listens for streams of locates.

    Attributes:
        offer: what clients are told; without a port before ``start`` and after ``stop``.
        guests: open connections.
        strangers: those without a HELLO yet.
    """

    def __init__(
        self, meta: LocalMeta, *, token: ClusterToken | None, tls: ServerTls | None = None
    ) -> None:
        self.meta = meta
        self.offer = pb.StreamOffer()
        self.guests: set[_Guest] = set()
        self.strangers: set[_Guest] = set()
        self._token = token
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> None:
        """Bind and accept.

        Args:
            host: address to listen on.
            port: 0 lets the system choose; NO_STREAM does nothing.

        Raises:
            ConfigError: the port can't be bound.
        """
        if port == NO_STREAM:
            return
        try:
            listener = _listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"can't listen on meta.stream_port = {port} of {host}: {error.strerror}",
                hint="Choose another port, 0 for any, or -1 for none.",
            ) from error
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Guest(self),
            sock=listener,
            ssl=None if self._tls is None else self._tls.context,
        )
        self._follow_files()
        self.offer = pb.StreamOffer(
            port=listener.getsockname()[1], version=VERSION, id=secrets.randbits(64)
        )

    def _follow_files(self) -> None:
        """Have the context load replaced files; asyncio asks for the context only once."""
        if self._tls is not None:
            self._tls.follow()
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._follow_files)

    def admits(self, hello: pb.StreamHello) -> bool:
        """Return True for a client of this cluster that means this life of the server."""
        return accepts(self._token, hello.token) and hello.id == self.offer.id

    async def stop(self) -> None:
        """Close the listener and every connection; may be called twice."""
        self.offer = pb.StreamOffer()
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
            for guest in self.guests:
                guest.close()
            await self._server.wait_closed()
            self._server = None


class _Guest(FrameConnection[LocateFrame]):
    """One client's connection."""

    def __init__(self, door: LocateDoor) -> None:
        super().__init__(FRAMES, most_bytes=MAX_HELLO_BYTES)
        self._door = door
        self._trusted = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._door.strangers) >= MAX_STRANGERS or len(self._door.guests) >= MAX_GUESTS:
            self.close()
        for level, option, value in _KEEPALIVE:
            transport.get_extra_info("socket").setsockopt(level, option, value)
        self._door.guests.add(self)
        self._door.strangers.add(self)
        self._deadline = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._door.guests.discard(self)
        self._known()

    def frame_received(self, header: Header, head: bytes) -> None:
        if not self._trusted:
            self._greet(header, head)
            return
        try:
            if header.type is LocateFrame.LOCATE:
                one = answer_locate(self._door.meta, message_of(head, pb.LocateRequest))
                self.send(LocateFrame.REPLY, header.request_id, head_of(one))
            elif header.type is LocateFrame.LOCATE_MANY:
                many = answer_locate_many(self._door.meta, message_of(head, pb.LocateManyRequest))
                self.send(LocateFrame.REPLY, header.request_id, head_of(many))
            else:
                self.send(LocateFrame.REFUSED, header.request_id)
        except TierKVError as error:
            log.debug("a locate was refused, and will be asked over gRPC: %s", error)
            self.send(LocateFrame.REFUSED, header.request_id)

    def broken(self, error: RemoteProtocolError) -> None:
        log.warning("a stream of locates was closed: %s", error)
        super().broken(error)

    def may_take(self) -> bool:
        # Answers to a client that does not read would pile up in memory.
        return not self.is_full

    def resume_writing(self) -> None:
        super().resume_writing()
        asyncio.get_running_loop().call_soon(self.take_frames)

    def _greet(self, header: Header, head: bytes) -> None:
        if header.type is not LocateFrame.HELLO:
            raise RemoteProtocolError("the first frame must be a HELLO")
        if not self._door.admits(message_of(head, pb.StreamHello)):
            raise RemoteProtocolError("a HELLO with another token, or for another server")
        self._trusted = True
        self._known()
        self.most_bytes = _QUESTION_BYTES
        self.send(LocateFrame.REPLY, header.request_id)

    def _known(self) -> None:
        """The peer is no stranger any more, or has gone."""
        self._door.strangers.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _listen(host: str, port: int) -> socket.socket:
    if ":" in host:
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=both)
    return socket.create_server((host, port))
