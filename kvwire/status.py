"""The one translator between tierkv.kvcore.errors and gRPC status.

Servers answer errors with ``abort_with`` or inside ``answering``. Clients convert a failed RPC back
to the same leaf class with ``error_from_rpc``. The typed error travels as trailing metadata, so a
peer in another language still reads status and message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tierkv.kvcore import errors
from tierkv.kvcore.errors import AuthenticationError, RetryableError, TierKVError
from tierkv.kvwire.v1 import common_pb2 as pb

ERROR_METADATA_KEY: Final = "tierkv-error-bin"
_MAX_TEXT_CHARS: Final = 1_000
"""Per text field: three fields of 4-byte characters, in base64, stay below 16 KiB of metadata
(kvwire/channels.py allows 64).
"""

_MAX_DETAILS_CHARS: Final = 200
"""Maximum length of the plain status text, for peers without the typed error; the text is
percent-encoded.
"""


def _subclasses(kind: type[TierKVError]) -> Iterator[type[TierKVError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)


_KIND_OF_CODE: Final = {
    kind.code: kind for kind in _subclasses(TierKVError) if kind.__module__ == errors.__name__
}


def error_to_proto(error: TierKVError) -> pb.Error:
    """Convert an error; texts too long for metadata are truncated with an ellipsis."""
    return pb.Error(
        code=error.code,
        message=_shortened(error.message),
        detail=_shortened(error.detail),
        hint=_shortened(error.hint),
        retry_after_ms=getattr(error, "retry_after_ms", 0),
        sqlstate=error.sqlstate if error.sqlstate != type(error).sqlstate else "",
        position=getattr(error, "position", 0),
    )


def error_from_proto(message: pb.Error, *, default: type[TierKVError]) -> TierKVError:
    """Rebuild the error sent by a peer; ``default`` replaces a code unknown to this version."""
    kind = _KIND_OF_CODE.get(message.code, default)
    facts: dict[str, Any] = {"detail": message.detail, "hint": message.hint}
    if issubclass(kind, RetryableError):
        facts["retry_after_ms"] = message.retry_after_ms
    if issubclass(kind, errors.SqlSyntaxError | errors.SqlError):
        facts["position"] = message.position
    if issubclass(kind, errors.SqlError) and message.sqlstate:
        facts["sqlstate"] = message.sqlstate
    return kind(message.message, **facts)


def status_of(error: TierKVError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return grpc.StatusCode[error.grpc_status]


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TierKVError) -> NoReturn:
    """End an RPC with ``error``; never returns."""
    packed = error_to_proto(error).SerializeToString()
    await context.abort(
        status_of(error),
        _shortened(error.message, _MAX_DETAILS_CHARS),
        trailing_metadata=((ERROR_METADATA_KEY, packed),),
    )
    raise AssertionError("abort always raises")


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Answer a TierKVError raised inside with its status; wrap the body of a servicer method."""
    try:
        yield
    except TierKVError as error:
        await abort_with(context, error)


def error_from_rpc(error: grpc.aio.AioRpcError, *, default: type[TierKVError]) -> TierKVError:
    """Rebuild the typed error of a failed RPC.

    Args:
        error: exception raised by the call.
        default: leaf class for failures without a typed error: no connection, a timeout, a crashed
            peer.
    """
    trailing: Any = error.trailing_metadata() or ()
    packed = dict(trailing).get(ERROR_METADATA_KEY)
    if isinstance(packed, bytes):
        with suppress(DecodeError):
            return error_from_proto(pb.Error.FromString(packed), default=default)
    text = f"{error.code().name}: {error.details() or 'no details'}"
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(text)
    return default(text)


def _shortened(text: str, most: int = _MAX_TEXT_CHARS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
