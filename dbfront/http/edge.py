"""Around the whole application: request ids, the size limit of bodies, one log line per request.

Plain ASGI, so that streams pass through untouched and even a crash gets its x-request-id.
"""

from __future__ import annotations

import logging
import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import new_request_id

log = logging.getLogger("tierkv.http")

_NAME = re.compile(limits.NAME_PATTERN)


class Edge:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        started_s = self._clock.now()
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            # The application answered 500 already and logged why; the server need not know.
            if not exchange.status:
                raise
        log.info(
            "%s %s %s %.1f ms %s",
            scope["method"],
            scope["path"],
            exchange.status,
            (self._clock.now() - started_s) * 1e3,
            exchange.request_id,
        )


class _Exchange:
    """One request and its response, counted.

    Attributes:
        request_id: the client's x-request-id when it is a name, else a fresh one.
        status: of the response; 0 until it began.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        self.request_id = given if _NAME.fullmatch(given) else new_request_id()
        self.status = 0
        length = headers.get(b"content-length", "0")
        self._declared = int(length) if length.isdecimal() else 0
        self._received = 0
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """Pass the body on, as far as it is allowed to be long.

        Raises:
            HTTPException: 413; the connection is closed, for the rest of the body is not read.
        """
        if self._declared > limits.MAX_HTTP_BODY_BYTES:
            raise _too_long()
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > limits.MAX_HTTP_BODY_BYTES:
                raise _too_long()
        return message

    async def send(self, message: Message) -> None:
        """Name the request in its response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
            ]
        await self._send(message)


def _too_long() -> HTTPException:
    message = f"the body is longer than {limits.MAX_HTTP_BODY_BYTES} bytes"
    return HTTPException(413, message, headers={"connection": "close"})
