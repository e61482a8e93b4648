"""A checksum behind every message between processes: what is damaged is sent again.

Used for all RPCs: at the server by an interceptor (kvwire/channels.py), at clients by the channel
that their stubs are made from. TCP's own sum misses one damaged segment in 65,536, and a broken
switch or proxy computes it anew; a flipped bit in a token id would be a wrong answer, in a length
an error that names the caller. The checksum stands behind the message as one more field, number
2047, that protobuf skips: peers without checksums understand it, and what they send is not checked.

    [message as protobuf][tag and length, 3 bytes]["xxh3"][XXH3-64 of the message, 8 bytes]
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

import grpc
import grpc.aio
import xxhash
from google.protobuf.message import DecodeError

from tierkv.kvcore.errors import CacheError, TransportError
from tierkv.kvwire.status import abort_with

_Message = TypeVar("_Message")
_Context = grpc.aio.ServicerContext[Any, Any]

_MARK: Final = b"\xfa\x7f\x0cxxh3"
"""Tag of field 2047 (bytes), its length, and four letters that no other message ends with."""

_TRAILER: Final = struct.Struct("<7s Q")


def sealed(message: bytes) -> bytes:
    """Return a serialized message with its checksum behind it."""
    return message + _TRAILER.pack(_MARK, xxhash.xxh3_64_intdigest(message))


def unsealed(raw: bytes) -> bytes | None:
    """Return a message without its checksum; None when it is damaged."""
    message, trailer = raw[: -_TRAILER.size], raw[-_TRAILER.size :]
    if len(trailer) < _TRAILER.size:
        return raw
    mark, checksum = _TRAILER.unpack(trailer)
    marked = mark == _MARK
    matches = checksum == xxhash.xxh3_64_intdigest(message)
    if not marked and not matches:
        return raw  # From a peer without checksums.
    return message if marked and matches else None


def intact(message: _Message | None, *, lost: type[CacheError] = TransportError) -> _Message:
    """Return a received message, or raise ``lost``: it was damaged on its way."""
    if message is None:
        raise lost("a message was damaged on its way (its checksum does not match)")
    return message


def _sealing(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda message: sealed(serialize(message))


def _unsealing(parse: Callable[[bytes], _Message]) -> Callable[[bytes], _Message | None]:
    def parsed(raw: bytes) -> _Message | None:
        message = unsealed(raw)
        try:
            return None if message is None else parse(message)
        except DecodeError:
            return None

    return parsed


def checked(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """Return the channel that a stub is made from; its calls answer None for what is damaged."""
    return cast(grpc.aio.Channel, _CheckedChannel(channel))


class _CheckedChannel:
    """The part of a channel that stubs use."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(
        self, method: str, *, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """Return a call with one answer."""
        return self._channel.unary_unary(
            method,
            request_serializer=_sealing(request_serializer),
            response_deserializer=_unsealing(response_deserializer),
            **options,
        )

    def unary_stream(
        self, method: str, *, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """Return a call with a stream of answers."""
        return self._channel.unary_stream(
            method,
            request_serializer=_sealing(request_serializer),
            response_deserializer=_unsealing(response_deserializer),
            **options,
        )


def checked_handler(handler: Any) -> Any:
    """Return a server's handler that refuses damaged requests and seals its answers."""
    codecs: dict[str, Any] = {
        "request_deserializer": _unsealing(handler.request_deserializer),
        "response_serializer": _sealing(handler.response_serializer),
    }
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream), **codecs)
    return grpc.unary_unary_rpc_method_handler(_answering(handler.unary_unary), **codecs)


def _streaming(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def stream(request: Any, context: _Context) -> AsyncGenerator[Any, None]:
        await _refuse_damaged(request, context)
        async with aclosing(behaviour(request, context)) as answers:
            async for answer in answers:
                yield answer

    return stream


def _answering(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: _Context) -> Any:
        await _refuse_damaged(request, context)
        return await behaviour(request, context)

    return answer


async def _refuse_damaged(request: Any, context: _Context) -> None:
    try:
        intact(request)
    except TransportError as error:
        await abort_with(context, error)
