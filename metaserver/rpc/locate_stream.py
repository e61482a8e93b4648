"""The stream of locates: its frames, and the client's side.

A faster way to ask what can also be asked over gRPC. Used by metaserver/rpc/grpc_client.py, in one
event loop; metaserver/rpc/locate_door.py is the other side. The stream connects by itself once an
answer over gRPC has offered it. A stream that is missing, lost, silent, full or refuses answers
None, which means: ask over gRPC. The stream therefore never fails a call.

    client                                     server
    HELLO  StreamHello  ------------------->   checks token and id
           <-------------------  REPLY (empty)
    LOCATE LocateRequest  ----------------->
           <-------------------  REPLY LocateReply, or REFUSED (empty): ask over gRPC

The head of a frame is a message of kvwire/v1/meta.proto; there are no payloads. Requests may be
pipelined; replies keep their order.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError, RemoteProtocolError
from tierkv.kvwire.channels import split_address
from tierkv.kvwire.checksums import sealed, unsealed
from tierkv.kvwire.credentials import ClusterToken, TlsFiles, client_context, shown
from tierkv.kvwire.frames import FrameConnection, FrameFormat, FrameHeader
from tierkv.kvwire.v1 import meta_pb2 as pb

log = logging.getLogger(__name__)
SILENT_S: Final = 0.2
"""A stream without an answer for this long is given up. Longer than the longest work of a meta
server between two answers (40 ms, docs/performance.md), shorter than the wait for a locate."""

CONNECT_TIMEOUT_S: Final = 2.0
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Pause before the next attempt to connect; doubles with each failure in a row."""

_Message = TypeVar("_Message", bound=Message)

VERSION: Final = 1
MAX_HELLO_BYTES: Final = 4096
"""Longest first frame, from a peer that has not shown its token yet."""


class LocateFrame(IntEnum):
    """Kind of a request or reply."""

    HELLO = 1
    LOCATE = 2
    LOCATE_MANY = 3
    REPLY = 64
    REFUSED = 65


FRAMES: Final = FrameFormat(
    "locate", b"TKVM", VERSION, LocateFrame, max_head_bytes=limits.MAX_GRPC_MESSAGE_BYTES
)
Header = FrameHeader[LocateFrame]


def head_of(message: Message) -> bytes:
    """Return a message with its checksum, as over gRPC."""
    return sealed(message.SerializeToString())


def message_of(head: bytes, kind: type[_Message]) -> _Message:
    """Return the message of a head; RemoteProtocolError if the bytes are damaged."""
    whole = unsealed(head)
    if whole is not None:
        with suppress(DecodeError):
            return kind.FromString(whole)
    raise RemoteProtocolError("a frame was damaged on its way")


class LocateStream:
    """Asks locates of the meta server at ``address``.

    Attributes:
        _connection: the open stream.
        _connecting: the attempt under way.
        _life: id of the server that the latest attempt meant.
        _pause_s: pause after the next failure; back to the first one with an answer.
        _not_before: time of the event loop before which no attempt is made at ``_life``.
    """

    def __init__(
        self, address: str, *, token: ClusterToken | None, tls: TlsFiles | None = None
    ) -> None:
        self._address = address
        self._tls = tls
        self._token = token
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._life = 0
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0
        self._closed = False

    @property
    def is_open(self) -> bool:
        """True if the next locate goes over the stream."""
        return self._connection is not None

    async def ask(
        self, kind: LocateFrame, question: Message, reply: type[_Message]
    ) -> _Message | None:
        """Ask one question; None if it must be asked over gRPC."""
        connection = self._connection
        if connection is None or connection.is_full:
            return None
        raw = await connection.ask(kind, question, SILENT_S)
        if raw is None:
            return None
        self._pause_s = FIRST_PAUSE_S
        try:
            return message_of(raw, reply)
        except RemoteProtocolError as error:
            connection.broken(error)
            return None

    def offered(self, offer: pb.StreamOffer) -> None:
        """Connect in the background to what an answer over gRPC offered, if it is time to."""
        if self._closed or self._connection is not None or self._connecting is not None:
            return
        if not offer.port or offer.version != VERSION:
            return
        if offer.id != self._life:
            self._life, self._pause_s, self._not_before = offer.id, FIRST_PAUSE_S, 0.0
        loop = asyncio.get_running_loop()
        if loop.time() >= self._not_before:
            self._connecting = loop.create_task(self._connect(offer), name="locate-stream")

    async def settled(self) -> bool:
        """Wait for an attempt to connect that is under way; return True if the stream is open."""
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        return self.is_open

    async def close(self) -> None:
        """Close; further questions are answered None."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    async def _connect(self, offer: pb.StreamOffer) -> None:
        loop = asyncio.get_running_loop()
        connection = _Connection(self._lost)
        try:
            host, _ = split_address(self._address)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(
                    lambda: connection, host, offer.port, **self._tls_arguments(host)
                )
                hello = pb.StreamHello(id=offer.id, token=shown(self._token))
                if await connection.ask(LocateFrame.HELLO, hello, CONNECT_TIMEOUT_S) is None:
                    raise ConnectionError("the HELLO was not accepted")
        except (OSError, ConfigError) as error:
            connection.close()
            self._put_off(f"can't be used ({error})")
        except BaseException:
            connection.close()
            raise
        else:
            self._connection = connection
        finally:
            self._connecting = None

    def _tls_arguments(self, host: str) -> dict[str, Any]:
        if self._tls is None:
            return {}
        context = client_context(self._tls, setting="cluster")
        return {"ssl": context, "server_hostname": self._tls.server_name or host}

    def _lost(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None
            self._put_off("was lost")

    def _put_off(self, reason: str) -> None:
        self._not_before = asyncio.get_running_loop().time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        log.info(
            "the stream of locates to the meta server at %s %s; asking over gRPC",
            self._address,
            reason,
        )


class _Connection(FrameConnection[LocateFrame]):
    """An open stream: questions in flight, by request id."""

    def __init__(self, lost: Callable[[_Connection], None]) -> None:
        super().__init__(FRAMES, most_bytes=limits.MAX_GRPC_MESSAGE_BYTES)
        self._lost = lost
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes | None]] = {}

    async def ask(self, kind: LocateFrame, question: Message, patience_s: float) -> bytes | None:
        """Send a question and wait for the head of its answer; None without an answer in time."""
        if self.transport is None:
            return None
        loop = asyncio.get_running_loop()
        request_id = next(self._ids) & 0xFFFFFFFF
        answer: asyncio.Future[bytes | None] = loop.create_future()
        self._waiting[request_id] = answer
        patience = loop.call_later(patience_s, self.close)
        try:
            self.send(kind, request_id, head_of(question))
            return await answer
        finally:
            patience.cancel()
            self._waiting.pop(request_id, None)

    def frame_received(self, header: Header, head: bytes) -> None:
        answer = self._waiting.get(header.request_id)
        if answer is not None and not answer.done():
            answer.set_result(head if header.type is LocateFrame.REPLY else None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)
        self._lost(self)
