"""Responses that are sent while the content is made, as server-sent events or another ``Framing``.

A stream that breaks after the headers must report the error inside the stream: clients take a cut
stream for a short answer. Closing the connection closes the stream of the request. Events have the
format of OpenAI clients: chunks, keep-alive comments, errors, ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tierkv.dbfront.http.services import FieldError, Services, client_gone
from tierkv.kvcore.errors import DrainingError, TierKVError

log = logging.getLogger("tierkv.http")

DONE = b"data: [DONE]\n\n"
_LINE_ENDS: Final = "\x85\u2028\u2029"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Chunk = TypeVar("Chunk")
Chunks = AsyncGenerator[Mapping[str, Any], None]


@dataclass(frozen=True, slots=True)
class Framing(Generic[Chunk]):
    """The encoding of a stream's parts as bytes.

    Attributes:
        media_type: media type of the response.
        chunk: encodes one part.
        error: encodes the error that broke the stream, as the error translator writes it.
        keep_alive: bytes sent while no part is ready; readers must be able to skip the bytes.
        done: bytes at the end of the stream.
    """

    media_type: str
    chunk: Callable[[Chunk], bytes]
    error: Callable[[Mapping[str, Any]], bytes]
    keep_alive: bytes
    done: bytes


def encode_event(chunk: Mapping[str, Any]) -> bytes:
    """Encode one event."""
    return b"data: " + encode_line(chunk) + b"\n\n"


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Encode JSON as a line also for readers that take all of Unicode's line ends for one."""
    text = json.dumps(value, ensure_ascii=False)
    for end in _LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode()


EVENTS: Final[Framing[Mapping[str, Any]]] = Framing(
    media_type="text/event-stream",
    chunk=encode_event,
    error=encode_event,
    keep_alive=KEEP_ALIVE,
    done=DONE,
)


async def open_stream(services: Services, chunks: Chunks) -> FramedStream[Mapping[str, Any]]:
    """Begin a stream of events, unless the stream fails at once; see ``open_framed``."""
    return await open_framed(services, chunks, EVENTS)


async def open_framed(
    services: Services, chunks: AsyncGenerator[Chunk, None], framing: Framing[Chunk]
) -> FramedStream[Chunk]:
    """Begin a stream, unless the stream fails at once.

    The function waits a little for the first chunk. An overloaded cluster then answers 429, not a
    stream with an error inside. A stream without chunks is served as one.

    Raises:
        TierKVError: the stream failed before its first chunk.
    """
    first = asyncio.ensure_future(anext(chunks))
    try:
        await asyncio.wait({first}, timeout=services.config.first_event_wait_s)
        if first.done() and not isinstance(first.exception(), StopAsyncIteration | None):
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await chunks.aclose()
        raise
    return FramedStream(services, chunks, first, framing)


class FramedStream(Response, Generic[Chunk]):
    """A response that sends chunks when they are ready, and keep-alive bytes in between."""

    def __init__(
        self,
        services: Services,
        chunks: AsyncGenerator[Chunk, None],
        first: asyncio.Future[Chunk],
        framing: Framing[Chunk],
    ) -> None:
        """Take over a stream and the future of its first chunk."""
        super().__init__(headers=HEADERS, media_type=framing.media_type)
        del self.headers["content-length"]
        self._services = services
        self._chunks = chunks
        self._next = first
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends or the client disconnects."""
        pump = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(client_gone(Request(scope, receive)))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pump.cancel()
            gone.cancel()
            self._next.cancel()
            await asyncio.gather(pump, gone, self._next, return_exceptions=True)
            await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._services.ended.wait())
        try:
            await self._send_chunks(send, ended)
        except OSError:
            return  # the client has disconnected
        except Exception as error:
            if not isinstance(error, TierKVError | FieldError):
                log.exception("a stream broke")
            await _send_part(send, self._framing.error(self._services.error_body(error)))
        finally:
            ended.cancel()
        await _send_part(send, self._framing.done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send, ended: asyncio.Future[Any]) -> None:
        interval_s = self._services.config.keep_alive_interval_s
        while True:
            await asyncio.wait(
                {self._next, ended}, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not self._next.done():
                if ended.done():
                    raise DrainingError
                await _send_part(send, self._framing.keep_alive)
                continue
            try:
                chunk = self._next.result()
            except StopAsyncIteration:
                return
            await _send_part(send, self._framing.chunk(chunk))
            self._next = asyncio.ensure_future(anext(self._chunks))


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
