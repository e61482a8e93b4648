"""uvicorn's HTTP/1.1 protocol with time-outs for clients that begin a request and don't end it.

uvicorn has one for idle connections between requests only. Here a client has so long for the head
of a request, the first included, and so long for its body; then the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S: Final = 20.0
BODY_TIMEOUT_S: Final = 120.0
"""A body of 16 MiB, the longest, comes within it at 1.2 Mbit/s."""

IDLE_TIMEOUT_S: Final = 30
"""How long a connection may wait for its next request; clients' pools keep them some seconds."""

# It warns of every malformed request: strangers could fill the log. They are answered 400.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class HttpConnection(H11Protocol):
    """One client's connection.

    Attributes:
        head_timeout_s: from connecting, or the first byte of a request, to the end of its head.
        body_timeout_s: from there to the end of its body.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    body_timeout_s = BODY_TIMEOUT_S
    _awaited: object = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await(h11.IDLE)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await(self.conn.their_state)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def _await(self, state: object) -> None:
        """Let the timer of what the client has to send next run; it starts with the state."""
        awaited = state if state in (h11.IDLE, h11.SEND_BODY) else None
        if awaited is self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaited = awaited
        if awaited is not None:
            wait_s = self.head_timeout_s if awaited is h11.IDLE else self.body_timeout_s
            self._timer = self.loop.call_later(wait_s, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        self.transport.abort()
