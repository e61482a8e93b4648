"""A checksum after every message between processes; a damaged message is detected and sent again.

Used for all RPCs: on servers by an interceptor (kvwire/channels.py), on clients by the channel of
their stubs. TCP's own checksum misses one damaged segment in 65,536, and a faulty switch or proxy
recomputes the checksum. A flipped bit in a token id would give a wrong answer; a flipped bit in a
length would raise an error blaming the caller. The checksum follows the message as an additional
field with number 2047, which protobuf skips. A peer without checksums therefore understands the
message; messages from such a peer are not checked.

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
"""Tag of field 2047 (bytes), its length, and four letters; no other message ends with this mark."""

_TRAILER: Final = struct.Struct("<7s Q")


def sealed(message: bytes) -> bytes:
    """Return a serialized message followed by its checksum."""
    return message + _TRAILER.pack(_MARK, xxhash.xxh3_64_intdigest(message))


def unsealed(raw: bytes) -> bytes | None:
    """Return a message without its checksum; None if the message is damaged."""
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
    """Return a received message; raise ``lost`` if the message was damaged in transit."""
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
    """Return a channel for stubs; a call returns None for a damaged answer."""
    return cast(grpc.aio.Channel, _CheckedChannel(channel))


class _CheckedChannel:
    """The methods of a channel used by stubs."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(
        self, method: str, *, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """Return a call with a single answer."""
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

    def stream_stream(
        self, method: str, *, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """Return a call with streams in both directions."""
        return self._channel.stream_stream(
            method,
            request_serializer=_sealing(request_serializer),
            response_deserializer=_unsealing(response_deserializer),
            **options,
        )


def checked_handler(handler: Any) -> Any:
    """Return a server handler that refuses damaged requests and adds checksums to answers.

    A handler of a stream of requests gets None for a damaged request.
    """
    codecs: dict[str, Any] = {
        "request_deserializer": _unsealing(handler.request_deserializer),
        "response_serializer": _sealing(handler.response_serializer),
    }
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(handler.stream_stream, **codecs)
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
