"""What the endpoints are given: rooms behind the door, and the two things all of them do.

Made once by dbfront/http/app.py. Endpoints never reach for globals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request

from tierkv.dbfront.contracts import TextGenerator
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.sql_session import SqlServer
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CancelledByUserError

Result = TypeVar("Result")

ReadinessCheck = Callable[[], Awaitable[str]]
"""Answers an empty string when all is well, else what is wrong."""

ErrorBody = Callable[[BaseException], dict[str, Any]]
"""The one translator's view of an error, for the inside of a stream."""


@dataclass(slots=True)
class Services:
    """Everything an endpoint may use.

    Attributes:
        config: addresses, keys, times.
        generator: from text to text.
        metrics: counters and the registry of /metrics.
        checks: what must hold for this front to be whole, by name.
        sql: the SQL door; None answers 404.
        clock: wall time for ``created``.
        error_body: how an error looks inside a stream.
        draining: set when the server is stopping; readiness is then false.
    """

    config: HttpConfig
    generator: TextGenerator
    metrics: Metrics
    checks: Mapping[str, ReadinessCheck]
    sql: SqlServer | None
    clock: Clock
    error_body: ErrorBody
    draining: bool = False

    def created(self) -> int:
        """Seconds since the epoch, for people."""
        return int(self.clock.wall())


def tenant_of(request: Request) -> str:
    """Whom the request is accounted to; set by the authentication of every endpoint."""
    tenant: str = request.state.tenant
    return tenant


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work unless the client goes away first; then cancel it.

    Raises:
        CancelledByUserError: nobody is left to answer.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(client_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise CancelledByUserError("the client went away")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def client_gone(request: Request) -> None:
    """Return when the client closed its connection (the body was read before)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
