"""The HTTP application: the endpoints, authentication for all endpoints, and the error translator.

dbfront/http/server.py builds the application. Every error is answered in OpenAI's format; no other
module of the package maps errors to statuses. The Host and Origin checks protect a server without
any protection except loopback. A web page on the same machine can send requests, and by DNS
rebinding read the answers. But a page cannot choose these headers, nor send ``application/json`` to
another site without a preflight.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tierkv.dbfront.contracts import TextGenerator
from tierkv.dbfront.http.config import HttpConfig, KeyRing, RestCaller
from tierkv.dbfront.http.endpoints.admin import admin_router
from tierkv.dbfront.http.endpoints.api_docs import docs_router
from tierkv.dbfront.http.endpoints.embeddings import embeddings_router
from tierkv.dbfront.http.endpoints.health import PROBES, health_router
from tierkv.dbfront.http.endpoints.kv import kv_router
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.http.endpoints.openai import chat_router, completions_router, models_router
from tierkv.dbfront.http.endpoints.sql import StatementError, sql_router
from tierkv.dbfront.http.endpoints.tokens import tokens_router
from tierkv.dbfront.http.messages.messages_router import error_json, messages_router
from tierkv.dbfront.http.responses.background import BackgroundResponses, ResponseQueue
from tierkv.dbfront.http.responses.conversations_router import conversations_router
from tierkv.dbfront.http.responses.responses_router import responses_router
from tierkv.dbfront.http.services import FieldError, ReadinessCheck, Services
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sql_session import SqlServer
from tierkv.dbfront.views.admin import ClusterSource
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import (
    AuthenticationError,
    CancelledByUserError,
    DrainingError,
    RetryableError,
    TierKVError,
    UserError,
)

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health"})
"""The only endpoints without authentication; probes may call them under any host name."""

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def admit(keys: KeyRing, method: str, path: str, headers: Headers) -> RestCaller:
    """Check the headers of a request; return who sent it.

    Raises:
        AuthenticationError: the key is missing or unknown.
        HTTPException: 421 for a host name that this front does not serve, 403 for a page of another
            site, 415 for a body that is not declared as JSON.
    """
    if path in PUBLIC_PATHS:
        return RestCaller()
    config = keys.config
    _check_host(config, headers.get("host", ""))
    if method not in _SAFE_METHODS:
        _check_origin(config, headers)
    caller = keys.caller(key_header(headers))
    if method not in _SAFE_METHODS and method != "DELETE":  # No page may send one unasked.
        _check_content_type(headers.get("content-type", ""))
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise HTTPException(415, f"the body is encoded as {coding[:100]!r} (send it as it is)")
    return caller


def key_header(headers: Headers) -> str | None:
    """Return the header with the key, as ``Bearer KEY``; Anthropic clients send x-api-key."""
    given = headers.get("authorization")
    other = headers.get("x-api-key")
    return f"Bearer {other}" if given is None and other is not None else given


def _check_host(config: HttpConfig, host: str) -> None:
    served = config.served_hosts
    if served and host_name(host) not in served:
        raise HTTPException(
            421,
            f"this front is not called {host_name(host)!r} "
            "(add the name to front.allowed_hosts, or call it by its address)",
        )


def _check_origin(config: HttpConfig, headers: Headers) -> None:
    """Check a request's origin. Browsers name the site of a page; other clients send no Origin."""
    origin = headers.get("origin")
    if origin is None:
        return
    netloc = urlsplit(origin).netloc.lower()
    if netloc and netloc == headers.get("host", "").lower():
        return
    if host_name(netloc) in config.allowed_hosts:
        return
    raise HTTPException(
        403,
        f"pages of {origin[:200]!r} may not send requests here "
        "(add the site's host to front.allowed_hosts)",
    )


def _check_content_type(given: str) -> None:
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise HTTPException(
        415,
        f"the body is declared as {kind[:100] or 'nothing'!r}, not as JSON "
        "(send the header Content-Type: application/json; "
        "curl: -H 'Content-Type: application/json')",
    )


def host_name(host: str) -> str:
    """Remove the port from a Host header or a URL's host and port, and the brackets of IPv6."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, _ = host.partition(":")
    return name.rstrip(".")


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
    keys: KeyRing,
    conversations: Conversations,
    queue: ResponseQueue,
    cluster: ClusterSource | None = None,
) -> tuple[FastAPI, Services, BackgroundResponses]:
    """Build the application, the services of its endpoints, and its background responses."""
    services = Services(config, generator, metrics, checks, sql, clock, error_body)
    background = BackgroundResponses(services, conversations, keys, queue)

    async def authenticate(request: Request) -> None:
        path, headers = request.scope["path"], request.headers
        if services.draining and path not in PROBES:
            raise DrainingError
        try:
            request.state.caller = admit(keys, request.method, path, headers)
        except AuthenticationError:
            if key_header(headers) is not None:
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
    for router in (
        *(chat_router, completions_router, embeddings_router, tokens_router),
        messages_router,
        *(models_router, health_router),
    ):
        app.include_router(router(services))
    app.include_router(responses_router(services, conversations, background))
    for kept in (conversations_router, kv_router):
        app.include_router(kept(services, conversations))
    if sql is not None:
        app.include_router(sql_router(services, sql))
    if cluster is not None:
        app.include_router(admin_router(services, cluster))
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
    return app, services, background


async def _answer_error(request: Request, error: Exception) -> Response:
    """Translate every error to a response; no other function does."""
    status, headers = _status(error)
    cause = error.error if isinstance(error, FieldError) else error
    if status >= 500 and not isinstance(cause, TierKVError):
        log.error("%s %s broke", request.method, request.url.path, exc_info=error)
    body = error_body(error, request.url.path)
    if request.url.path.startswith("/v1/messages"):
        body = error_json(body, status)
    return JSONResponse(body, status_code=status, headers=headers)


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
    if isinstance(cause, DrainingError):
        headers["connection"] = "close"  # The next request should meet another front.
    if isinstance(cause, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return cause.http_status, headers


_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "/v1/chat/completions": {"json_schema": "response_format"},
    "/v1/completions": {"json_schema": "response_format", "messages": "prompt"},
    "/v1/embeddings": {"prompt": "input", "messages": "input"},
    "/v1/responses": {"json_schema": "text.format", "messages": "input"},
    "/v1/messages": {"json_schema": "output_config.format", "stop": "stop_sequences"},
}
"""Names of fields in the bodies of endpoints, where a call has other ones."""


def error_body(error: BaseException, path: str = "") -> dict[str, Any]:
    """Write an error in OpenAI's format; ``path`` is the endpoint, inside a stream empty."""
    status, _ = _status(error)
    param = error.param or None if isinstance(error, FieldError) else None
    cause = error.error if isinstance(error, FieldError) else error
    if isinstance(error, UserError) and path in _FIELDS and error.field:
        param = _FIELDS[path].get(error.field, error.field)
    if isinstance(cause, HTTPException):
        cause = _routing_error(cause)
    if isinstance(cause, RequestValidationError):
        first = cause.errors()[0]
        param = ".".join(map(str, first["loc"][1:]))  # Behind "query" or "path".
        cause = UserError(f"{param}: {first['msg']}")
    if isinstance(cause, TierKVError):
        message = f"{cause.message}. {cause.hint}" if cause.hint else cause.message
        code = cause.code
    else:
        message, code = "internal error; the log of the front has it under x-request-id", "internal"
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    more = error.facts() if isinstance(error, StatementError) else {}
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def _routing_error(error: HTTPException) -> UserError:
    if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
        return UserError("there is no such endpoint", hint="See docs/http.md.")
    if error.status_code == 405:
        return UserError("this endpoint does not allow that method", hint="See docs/http.md.")
    return UserError(str(error.detail))
