"""The messages of a PostgreSQL client: one frozen value per frontend message, and the parsers.

connection.py frames the bytes and calls ``parse_message`` or ``parse_startup``; all later code
works with the values. Each read is checked against the end of the message, and each message must be
used up exactly; otherwise the parser raises RemoteProtocolError (08P01).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tierkv.kvcore.errors import RemoteProtocolError

SSL_REQUEST_CODE: Final = 80877103
GSSENC_REQUEST_CODE: Final = 80877104
CANCEL_REQUEST_CODE: Final = 80877102
PROTOCOL_MAJOR: Final = 3


@dataclass(frozen=True, slots=True)
class SslRequest:
    """Asks for TLS; the answer is one byte."""


@dataclass(frozen=True, slots=True)
class GssEncRequest:
    """Asks for GSSAPI encryption; the answer is one byte."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancels the statement of another connection; never answered."""

    pid: int
    secret: bytes

    def details(self) -> dict[str, Any]:
        """Return the request as values of JSON, for another worker of the front."""
        return {"pid": self.pid, "secret": self.secret.hex()}

    @classmethod
    def of_details(cls, details: Mapping[str, Any]) -> CancelRequest:
        """Return the request of ``details``."""
        return cls(details["pid"], bytes.fromhex(details["secret"]))


@dataclass(frozen=True, slots=True)
class Startup:
    """The first message of a session; ``minor`` is the protocol's minor version."""

    parameters: Mapping[str, str]
    minor: int = 0


@dataclass(frozen=True, slots=True)
class PasswordData:
    """Any answer to an authentication request (password, SASL initial or later response)."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Query:
    """Simple query; ``sql`` may hold several statements."""

    sql: str


@dataclass(frozen=True, slots=True)
class Parse:
    """Creates a prepared statement; OID 0 leaves a parameter's type to the server."""

    statement: str
    sql: str
    parameter_oids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bind:
    """Creates a portal from a prepared statement. Formats: zero, one for all, or one each."""

    portal: str
    statement: str
    parameter_formats: tuple[int, ...]
    parameters: tuple[bytes | None, ...]
    result_formats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for the shape of a statement (kind ``S``) or portal (``P``)."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Execute:
    """Runs a portal; ``max_rows`` 0 means all rows."""

    portal: str
    max_rows: int


@dataclass(frozen=True, slots=True)
class Close:
    """Drops a statement (``S``) or portal (``P``)."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Sync:
    """End of an extended-protocol batch."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Asks the server to send its buffered replies."""


@dataclass(frozen=True, slots=True)
class CopyData:
    """Part of the COPY input; parts need not end at line ends."""

    data: bytes


@dataclass(frozen=True, slots=True)
class CopyDone:
    """End of COPY input."""


@dataclass(frozen=True, slots=True)
class CopyFail:
    """The client gives up a COPY."""

    reason: str


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """The obsolete function-call protocol; always refused."""


@dataclass(frozen=True, slots=True)
class TooLong:
    """A message longer than the limit of its type, without the body. Made by connection.py only."""

    type_byte: int
    size: int
    limit: int

    @property
    def simple(self) -> bool:
        """Return True for a Query, which is answered with ReadyForQuery."""
        return self.type_byte == ord("Q")


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ends the connection."""


StartupMessage = SslRequest | GssEncRequest | CancelRequest | Startup
FrontendMessage = (
    PasswordData
    | Query
    | Parse
    | Bind
    | Describe
    | Execute
    | Close
    | Sync
    | Flush
    | CopyData
    | CopyDone
    | CopyFail
    | FunctionCall
    | TooLong
    | Terminate
)


class _BodyReader:
    """A cursor over one message body; every read is bounded by the body."""

    def __init__(self, body: bytes, what: str) -> None:
        self._body = body
        self._at = 0
        self._what = what

    def _broken(self, why: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"malformed {self._what} message: {why}")

    def take(self, size: int) -> bytes:
        if size < 0 or size > len(self._body) - self._at:
            raise self._broken("it ends too early")
        self._at += size
        return self._body[self._at - size : self._at]

    def rest(self) -> bytes:
        return self.take(len(self._body) - self._at)

    def uint16(self) -> int:
        return int.from_bytes(self.take(2), "big")

    def int32(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def text(self) -> str:
        try:
            return self._string().decode()
        except UnicodeDecodeError:
            raise self._broken("a string is not UTF-8") from None

    def sql(self) -> str:
        """Read a statement; the statement's check refuses bytes that are not UTF-8 later."""
        return self._string().decode("utf-8", "surrogateescape")

    def _string(self) -> bytes:
        end = self._body.find(b"\0", self._at)
        if end < 0:
            raise self._broken("a string does not end")
        raw = self.take(end - self._at)
        self._at += 1
        return raw

    def sized(self) -> bytes | None:
        size = self.int32()
        return None if size == -1 else self.take(size)

    def shorts(self) -> tuple[int, ...]:
        count = self.uint16()
        return struct.unpack(f"!{count}H", self.take(2 * count))

    def end(self) -> None:
        if self._at != len(self._body):
            raise self._broken("it has bytes left over")


def _parse(reader: _BodyReader) -> Parse:
    statement, sql, count = reader.text(), reader.sql(), reader.uint16()
    return Parse(statement, sql, struct.unpack(f"!{count}I", reader.take(4 * count)))


def _bind(reader: _BodyReader) -> Bind:
    portal, statement, formats = reader.text(), reader.text(), reader.shorts()
    values = tuple(reader.sized() for _ in range(reader.uint16()))
    bind = Bind(portal, statement, formats, values, reader.shorts())
    for code in bind.parameter_formats + bind.result_formats:
        if code > 1:
            raise RemoteProtocolError(f"malformed Bind message: unknown format code {code}")
    if len(formats) > 1 and len(formats) != len(values):
        raise RemoteProtocolError(
            f"bind message has {len(formats)} parameter formats but {len(values)} parameters"
        )
    return bind


def _target(reader: _BodyReader) -> tuple[str, str]:
    kind = reader.take(1)
    if kind not in (b"S", b"P"):
        raise RemoteProtocolError(f"malformed message: unknown target {kind!r}")
    return kind.decode(), reader.text()


def _function_call(reader: _BodyReader) -> FunctionCall:
    reader.rest()
    return FunctionCall()


_PARSERS: Final[dict[int, tuple[str, Callable[[_BodyReader], FrontendMessage]]]] = {
    ord("Q"): ("Query", lambda r: Query(r.sql())),
    ord("P"): ("Parse", _parse),
    ord("B"): ("Bind", _bind),
    ord("D"): ("Describe", lambda r: Describe(*_target(r))),
    ord("E"): ("Execute", lambda r: Execute(r.text(), max(0, r.int32()))),
    ord("C"): ("Close", lambda r: Close(*_target(r))),
    ord("S"): ("Sync", lambda r: Sync()),
    ord("H"): ("Flush", lambda r: Flush()),
    ord("d"): ("CopyData", lambda r: CopyData(r.rest())),
    ord("c"): ("CopyDone", lambda r: CopyDone()),
    ord("f"): ("CopyFail", lambda r: CopyFail(r.text())),
    ord("F"): ("FunctionCall", _function_call),
    ord("X"): ("Terminate", lambda r: Terminate()),
    ord("p"): ("Password", lambda r: PasswordData(r.rest())),
}


def known_type(type_byte: int) -> bool:
    """Return True if a frontend message of the type exists; checked before waiting for the body."""
    return type_byte in _PARSERS


def parse_message(type_byte: int, body: bytes) -> FrontendMessage:
    """Parse one framed message.

    Raises:
        RemoteProtocolError: unknown type, short, overlong or otherwise malformed.
    """
    if type_byte not in _PARSERS:
        raise RemoteProtocolError(f"invalid frontend message type {type_byte}")
    name, parser = _PARSERS[type_byte]
    reader = _BodyReader(body, name)
    message = parser(reader)
    reader.end()
    return message


def parse_startup(body: bytes) -> StartupMessage:
    """Parse the body of a message without a type byte.

    Raises:
        RemoteProtocolError: unknown request code, unsupported major version, malformed.
    """
    reader = _BodyReader(body, "startup")
    code = reader.uint32()
    if code == SSL_REQUEST_CODE:
        message: StartupMessage = SslRequest()
    elif code == GSSENC_REQUEST_CODE:
        message = GssEncRequest()
    elif code == CANCEL_REQUEST_CODE:
        message = CancelRequest(reader.uint32(), reader.rest())
    elif code >> 16 == PROTOCOL_MAJOR:
        message = Startup(_parameters(reader), code & 0xFFFF)
    else:
        raise RemoteProtocolError(
            f"unsupported frontend protocol {code >> 16}.{code & 0xFFFF}: server supports 3.0"
        )
    reader.end()
    return message


def _parameters(reader: _BodyReader) -> dict[str, str]:
    parameters: dict[str, str] = {}
    while name := reader.text():
        parameters[name] = reader.text()
    return parameters


def sasl_initial(data: bytes) -> tuple[str, bytes]:
    """Split a SASLInitialResponse into mechanism and client-first message.

    Raises:
        RemoteProtocolError: malformed.
    """
    reader = _BodyReader(data, "SASLInitialResponse")
    mechanism, first = reader.text(), reader.sized()
    reader.end()
    return mechanism, first or b""
