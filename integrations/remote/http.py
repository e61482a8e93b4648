"""HTTP to one engine: JSON in and out, and streams of events. Failures become TierKVErrors.

Used by the doors of all kinds of engines. Belongs to one event loop. Proxies from the environment
are ignored, because an engine is nearby. ``EventDecoder`` splits a stream into server-sent events.
Only line feeds end a line: JSON texts may contain other characters that count as line ends
elsewhere. ``refusal`` gives the error for an HTTP status and error text, of a refused request or
within a stream; that part is pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    ConfigError,
    ContextTooLongError,
    OverloadedError,
    RemoteProtocolError,
    TierKVError,
    TransportError,
    UnknownModelError,
    UserError,
)


class EventDecoder:
    """Splits a stream of bytes into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def push(self, received: bytes) -> list[str]:
        """Append received bytes; return the data of each complete event.

        Raises:
            RemoteProtocolError: an event is longer than the limit, or is not UTF-8.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        self._check(len(self._rest) + self._size)
        return [data for line in lines if (data := self._take(line.rstrip(b"\r"))) is not None]

    def _take(self, line: bytes) -> str | None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(value)
                self._check(self._size)
            return None
        if not self._data:
            return None
        data, self._data, self._size = b"\n".join(self._data), [], 0
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"an engine's event is not UTF-8: {error}") from error

    def _check(self, size: int) -> None:
        if size > limits.MAX_ENGINE_REPLY_BYTES:
            raise RemoteProtocolError(
                f"an engine's event exceeds {limits.MAX_ENGINE_REPLY_BYTES} bytes"
            )


_DONE: Final = "[DONE]"
_KEPT_S: Final = 2.0
"""Idle connections are closed before the engine closes them (uvicorn after 5 s): a request on a
connection just closed would look like a dead engine."""

_QUICK_TIMEOUT_S: Final = 5.0
"""For questions about the engine itself, which need no computation."""


class EngineHttp:
    """One engine's HTTP server.

    Attributes:
        where: the engine's address, for people.
    """

    def __init__(
        self, url: str, *, api_key: str, connect_timeout_s: float, idle_timeout_s: float
    ) -> None:
        """Create a client, which connects at the first call.

        Raises:
            ConfigError: the URL is not usable.
        """
        self.where = f"engine at {url}"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(idle_timeout_s, connect=connect_timeout_s, pool=None)
        unbounded = httpx.Limits(max_keepalive_connections=64, keepalive_expiry=_KEPT_S)
        try:
            parsed = httpx.URL(url)
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise httpx.InvalidURL("it needs http:// or https:// and a host")
            if parsed.userinfo:
                raise ConfigError(
                    "engine.url contains a name or password, but URLs are shown in logs and views",
                    hint="Give the engine's key with --api-key-file FILE.",
                )
            self._client = httpx.AsyncClient(
                base_url=parsed, headers=headers, timeout=timeout, limits=unbounded, trust_env=False
            )
        except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
            raise ConfigError(
                f"engine.url {url!r} can't be used: {error}",
                hint="Write it as http://127.0.0.1:8000.",
            ) from error

    async def get_json(self, path: str) -> dict[str, Any]:
        """GET a JSON object."""
        return _object(await self.get_text(path), self.where)

    async def get_text(self, path: str) -> str:
        """GET a text."""
        asked = self._client.stream("GET", path, timeout=_QUICK_TIMEOUT_S)
        async with self._failing_well(), asked as response:
            text = await self._text(response)
            self._check(response, text)
            return text

    async def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST a JSON object, return another."""
        async with self._failing_well(), self._client.stream("POST", path, json=body) as response:
            text = await self._text(response)
            self._check(response, text)
            return _object(text, self.where)

    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """POST a JSON object; yield the events of the reply. Closing the iterator disconnects.

        Raises:
            TransportError: the engine is gone, also mid-stream, or the stream has no end mark.
        """
        async with self._failing_well(), self._client.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                self._check(response, await self._text(response))
            decoder = EventDecoder()
            async for received in response.aiter_bytes():
                for data in decoder.push(received):
                    if data.strip() == _DONE:
                        return
                    yield self._event(data)
        raise TransportError(f"{self.where}: the stream ended early")

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def _event(self, data: str) -> dict[str, Any]:
        event = _object(data, self.where)
        error = stream_error(event, where=self.where)
        if error is not None:
            raise error
        return event

    @asynccontextmanager
    async def _failing_well(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise TransportError(f"{self.where}: {said}") from error

    async def _text(self, response: httpx.Response) -> str:
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_bytes():
            size += len(part)
            if size > limits.MAX_ENGINE_REPLY_BYTES:
                raise RemoteProtocolError(
                    f"{self.where}: a reply exceeds {limits.MAX_ENGINE_REPLY_BYTES} bytes"
                )
            parts.append(part)
        return b"".join(parts).decode(errors="replace")

    def _check(self, response: httpx.Response, text: str) -> None:
        if response.status_code >= 400:
            raise refusal(
                response.status_code,
                text,
                where=self.where,
                retry_after_s=_seconds(response.headers.get("retry-after")),
            )


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{where}: a reply is not JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"{where}: a reply is not a JSON object: {text[:80]!r}")
    return value


def _seconds(text: str | None) -> float | None:
    """Parse a Retry-After header in seconds; dates are not supported."""
    return float(text) if text is not None and text.isdecimal() else None


_MAX_MESSAGE_CHARS = 500
_CONTEXT = re.compile(
    r"context.?length|context.?window|max_model_len|maximum.?context|too.?long|longer than the"
    r" model",
    re.IGNORECASE,
)
_BUSY = (429, 503)
_KEY_REFUSED = (401, 403)
_TIMED_OUT = (408, 504)
_WRONG_KIND = "Check that --engine names the kind of server at --url."


def refusal(
    status: int, body: str, *, where: str, retry_after_s: float | None = None
) -> TierKVError:
    """Return the error that an HTTP status and body stand for.

    Args:
        status: the HTTP status; for an error within a stream, the status from its ``code``.
        body: JSON in one of the usual forms, or any text.
        where: the engine's address, for people.
        retry_after_s: the reply's delay before a retry.
    """
    said = _message(body) or f"HTTP {status}"
    text = f"{where}: {said[:_MAX_MESSAGE_CHARS]}"
    if status in _BUSY:
        wait_ms = 1_000 if retry_after_s is None else int(1_000 * min(retry_after_s, 60.0))
        return OverloadedError(text, retry_after_ms=max(wait_ms, 1))
    if status in _KEY_REFUSED:
        return ConfigError(text, hint="Give the engine's key with --api-key-file FILE.")
    if status in _TIMED_OUT or status >= 500:
        return TransportError(text)
    if _CONTEXT.search(said) or '"context_length_exceeded"' in body:
        return ContextTooLongError(text, hint="Shorten the prompt or lower max_tokens.")
    if status != 404:
        return UserError(text)
    # A server that lacks the model names the model; a server of another kind lacks the path.
    return UnknownModelError(text, hint="" if "model" in said.lower() else _WRONG_KIND)


def stream_error(event: dict[str, Any], *, where: str) -> TierKVError | None:
    """Return the error in a stream's event; None for other events."""
    error = event.get("error")
    if error is None:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return refusal(status, json.dumps(event), where=where)


def _message(body: str) -> str:
    """Return the message for people in an error body."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body.strip()
    if isinstance(value, dict):
        found = value.get("error", value)
        if isinstance(found, dict):
            found = found.get("message") or found.get("detail") or found
        return found if isinstance(found, str) else json.dumps(found)
    return str(value)
