"""The HTTP application: endpoints, one authentication for all of them, one error translator.

Built by dbfront/http/server.py. Every error leaves in OpenAI's shape; nothing else in this room
maps errors to statuses.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tierkv.dbfront.contracts import SqlServer, TextGenerator
from tierkv.dbfront.http.access import admit
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.endpoints.api_docs import docs_router
from tierkv.dbfront.http.endpoints.chat import chat_router
from tierkv.dbfront.http.endpoints.completions import completions_router
from tierkv.dbfront.http.endpoints.health import health_router
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.http.endpoints.models import models_router
from tierkv.dbfront.http.endpoints.sql import sql_router
from tierkv.dbfront.http.schema import FieldError, StatementError
from tierkv.dbfront.http.services import ReadinessCheck, Services
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import (
    AuthenticationError,
    CancelledByUserError,
    RetryableError,
    TierKVError,
    UserError,
)

log = logging.getLogger("tierkv.http")

MAX_RETRY_AFTER_MS = 119_000
"""openai-python ignores hints of two minutes and more."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def make_app(
    config: HttpConfig,
    generator: TextGenerator,
    *,
    metrics: Metrics,
    checks: Mapping[str, ReadinessCheck],
    sql: SqlServer | None,
    clock: Clock,
) -> tuple[FastAPI, Services]:
    """Put the endpoints together."""
    services = Services(config, generator, metrics, checks, sql, clock, error_body)

    async def authenticate(request: Request) -> None:
        path, headers = request.scope["path"], request.headers
        try:
            request.state.tenant = admit(config, request.method, path, headers)
        except AuthenticationError:
            if "authorization" in headers:
                await asyncio.sleep(config.failed_login_delay_s)
            raise

    app = FastAPI(
        title="TierKV",
        dependencies=[Depends(authenticate)],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    for router in (chat_router, completions_router, models_router, health_router):
        app.include_router(router(services))
    if sql is not None:
        app.include_router(sql_router(services, sql))
    app.include_router(docs_router(app))
    for kind in (
        TierKVError,
        FieldError,
        HTTPException,
        RequestValidationError,
        ClientDisconnect,
        Exception,
    ):
        app.add_exception_handler(kind, _answer_error)
    return app, services


async def _answer_error(request: Request, error: Exception) -> Response:
    """The one error translator."""
    status, headers = _status(error)
    cause = error.error if isinstance(error, FieldError) else error
    if status >= 500 and not isinstance(cause, TierKVError):
        log.error("%s %s broke", request.method, request.url.path, exc_info=error)
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def _status(error: BaseException) -> tuple[int, dict[str, str]]:
    cause = error.error if isinstance(error, FieldError) else error
    if isinstance(cause, ClientDisconnect):
        return CancelledByUserError.http_status, {}
    if isinstance(cause, HTTPException):
        return cause.status_code, dict(cause.headers or {})
    if isinstance(cause, RequestValidationError):
        return 400, {}
    if not isinstance(cause, TierKVError):
        return 500, {"x-should-retry": "false"}
    headers = {}
    if isinstance(cause, RetryableError):
        wait_ms = min(max(cause.retry_after_ms, 1), MAX_RETRY_AFTER_MS)
        headers["retry-after-ms"] = str(wait_ms)
        headers["retry-after"] = str(math.ceil(wait_ms / 1_000))
    if isinstance(cause, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return cause.http_status, headers


def error_body(error: BaseException) -> dict[str, Any]:
    """Write an error in OpenAI's shape."""
    status, _ = _status(error)
    param = error.param or None if isinstance(error, FieldError) else None
    cause = error.error if isinstance(error, FieldError) else error
    if isinstance(cause, HTTPException):
        cause = _routing_error(cause)
    if isinstance(cause, RequestValidationError):
        cause = UserError(str(cause.errors()[:1]))
    if isinstance(cause, TierKVError):
        message = f"{cause.message} ({cause.hint})" if cause.hint else cause.message
        code = cause.code
    else:
        message, code = "internal error; the log of the front has it under x-request-id", "internal"
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    more = error.facts() if isinstance(error, StatementError) else {}
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def _routing_error(error: HTTPException) -> UserError:
    if error.status_code == 404:
        return UserError("there is no such endpoint", hint="see docs/http.md")
    if error.status_code == 405:
        return UserError("this endpoint does not take that method", hint="see docs/http.md")
    return UserError(str(error.detail))
