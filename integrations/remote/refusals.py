"""Errors for an engine's HTTP status and error text.

Pure. Called by integrations/remote/http.py for refused requests and for errors within a stream.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tierkv.kvcore.errors import (
    ConfigError,
    ContextTooLongError,
    OverloadedError,
    TierKVError,
    TransportError,
    UnknownModelError,
    UserError,
)

_MAX_MESSAGE_CHARS = 500
_CONTEXT = re.compile(
    r"context.?length|context.?window|max_model_len|maximum.?context|too.?long|longer than the"
    r" model",
    re.IGNORECASE,
)
_BUSY = (429, 503)
_KEY_REFUSED = (401, 403)
_TIMED_OUT = (408, 504)
_WRONG_KIND = "see whether --url and --engine are of the same server"


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
        return ConfigError(text, hint="give the engine's key: --api-key-file FILE")
    if status in _TIMED_OUT or status >= 500:
        return TransportError(text)
    if _CONTEXT.search(said) or '"context_length_exceeded"' in body:
        return ContextTooLongError(text, hint="shorten the prompt or lower max_tokens")
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
