"""The services given to the endpoints, and the operations that all endpoints need.

dbfront/http/app.py creates the services once. Endpoints never use globals.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from tierkv.dbfront.contracts import TextGenerator
from tierkv.dbfront.http.config import HttpConfig, RestCaller
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.siblings import Siblings
from tierkv.dbfront.sql_session import SqlServer
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CancelledByUserError, DrainingError, TierKVError, UserError

_FORM: Final = re.compile(r"(list|dict)\[|(constrained-)?(str|int|float|bool)$")
"""The part of an error's path that names a form of a union, not a field."""

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)

ReadinessCheck = Callable[[], Awaitable[str]]
"""Returns an empty string if all is well, else the reason of the failure."""

ErrorBody = Callable[[BaseException], dict[str, Any]]
"""Writes the body of an error inside a stream; the error translator of app.py."""


@dataclass(slots=True)
class Services:
    """The services that an endpoint may use.

    Attributes:
        config: addresses, keys, times.
        generator: from text to text.
        metrics: counters and the registry of /metrics.
        checks: readiness checks of this front, by name.
        sql: the SQL server; None answers 404.
        clock: wall time for ``created``.
        error_body: writes the body of an error inside a stream.
        draining: set when the server is about to stop; readiness is then false, and what is not a
            probe is answered 503.
        ended: set when running requests must end, too.
        siblings: the other workers of the front.
    """

    config: HttpConfig
    generator: TextGenerator
    metrics: Metrics
    checks: Mapping[str, ReadinessCheck]
    sql: SqlServer | None
    clock: Clock
    error_body: ErrorBody
    draining: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    siblings: Siblings = field(default_factory=Siblings)

    def created(self) -> int:
        """Return the seconds since the epoch, by the wall clock."""
        return int(self.clock.wall())


def caller_of(request: Request) -> RestCaller:
    """Return who sent the request; every endpoint's authentication sets it."""
    caller: RestCaller = request.state.caller
    return caller


async def until_disconnect(
    services: Services, request: Request, work: Coroutine[Any, Any, Result]
) -> Result:
    """Run the work, and cancel it if the client disconnects or the front ends first.

    Raises:
        CancelledByUserError: the client disconnected.
        DrainingError: the front ends.
    """
    task = asyncio.ensure_future(work)
    watches = {
        asyncio.ensure_future(client_gone(request)),
        asyncio.ensure_future(services.ended.wait()),
    }
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if services.ended.is_set():
            raise DrainingError
        raise CancelledByUserError("the client went away")
    finally:
        for each in (task, *watches):
            each.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def client_gone(request: Request) -> None:
    """Return when the client has closed its connection (the body has been read before)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class FieldError(Exception):
    """An error caused by one field of the body; the translator shows the field's name."""

    def __init__(self, param: str, error: TierKVError) -> None:
        super().__init__(str(error))
        self.param = param
        self.error = error


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Parse a JSON body; app.py has checked the declared content type.

    Types are strict: ``"max_tokens": true`` or ``"5"`` is an error, not 1 or 5. A number such as
    5.0 is an integer, as in JSON Schema.

    Raises:
        FieldError: malformed JSON, or a field with a wrong type or range.
    """
    raw = await request.body()
    try:
        body = _parsed(raw or b"{}", kind)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(found, key=lambda one: len(one["loc"]))  # Of a union the form that was meant.
        names = [str(part) for part in first["loc"] if not _FORM.match(str(part))]
        param = ".".join(names)
        message = first["msg"] if not param else f"{param}: {first['msg']}"
        raise FieldError(param, UserError(message)) from error
    _refuse_constants(raw)
    return body


def _parsed(raw: bytes, kind: type[Body]) -> Body:
    try:
        return kind.model_validate_json(raw, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        whole = [one["type"] == "int_type" and _is_whole(one["input"]) for one in found]
        if not all(whole):
            raise
    return kind.model_validate_json(raw)


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _refuse_constants(raw: bytes) -> None:
    """Refuse NaN and Infinity in fields of any form, such as schemas: JSON has no such numbers.

    Raises:
        FieldError: names the number.
    """
    if b"NaN" not in raw and b"Infinity" not in raw:
        return

    def refuse(name: str) -> None:
        raise FieldError("", UserError(f"the body has the number {name}, which is not JSON"))

    json.loads(raw, parse_constant=refuse)
