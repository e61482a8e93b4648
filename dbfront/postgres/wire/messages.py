"""The relay's own messages to PostgreSQL and to clients, and parsers for the answers.

Bytes in, bytes out, no I/O. SQL text and error messages travel in the connection's client_encoding,
which ``decoded`` and ``encoded`` read from the connection's parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from tierkv.dbfront.pgwire.protocol import messages as frontend
from tierkv.kvcore.errors import FeatureNotSupportedError, RemoteProtocolError

_CODECS: Final = {
    "UTF8": "utf-8",
    "SQL_ASCII": "utf-8",
    "LATIN1": "latin-1",
    "LATIN2": "iso8859-2",
    "LATIN9": "iso8859-15",
    "WIN1250": "cp1250",
    "WIN1251": "cp1251",
    "WIN1252": "cp1252",
    "KOI8R": "koi8-r",
    "EUC_JP": "euc_jp",
    "SJIS": "shift_jis",
    "EUC_KR": "euc_kr",
    "GBK": "gbk",
    "GB18030": "gb18030",
    "BIG5": "big5",
}


def _codec(parameters: Mapping[str, str]) -> str:
    return _CODECS.get(parameters.get("client_encoding", "UTF8").upper(), "")


def decoded(data: bytes, parameters: Mapping[str, str]) -> str:
    """Decode text from the client or PostgreSQL.

    Invalid bytes are preserved, for PostgreSQL to refuse.

    Raises:
        FeatureNotSupportedError: an unsupported encoding.
    """
    codec = _codec(parameters)
    if not codec:
        raise FeatureNotSupportedError(
            f"AI calls don't work with client_encoding {parameters.get('client_encoding')}",
            hint="SET client_encoding = 'UTF8'.",
        )
    return data.decode(codec, "surrogateescape")


def encoded(text: str, parameters: Mapping[str, str]) -> bytes:
    """Encode SQL text in the connection's encoding."""
    return text.encode(_codec(parameters) or "utf-8", "surrogateescape")


def shown(text: str, parameters: Mapping[str, str]) -> bytes:
    """Encode a message for the client; characters outside the encoding become question marks."""
    return text.replace("\0", "").encode(_codec(parameters) or "utf-8", "replace")


_LENGTH: Final = struct.Struct("!I")
_INT32: Final = struct.Struct("!i").pack
_INT16: Final = struct.Struct("!H").pack
_OWN: Final = b"tierkv\0"
"""Name of the relay's own statement and portal, so that the client's unnamed objects survive."""

SYNC: Final = b"S\0\0\0\x04"
FLUSH: Final = b"H\0\0\0\x04"
TERMINATE: Final = b"X\0\0\0\x04"
SSL_REQUEST: Final = struct.pack("!II", 8, frontend.SSL_REQUEST_CODE)
BYTEA: Final = 17
"""Type OID of a parameter in binary format."""

_INT8: Final = 20
_BYTEA_ARRAY: Final = 1001
_INT8_ARRAY: Final = 1016


def framed(kind: bytes, *parts: bytes) -> bytes:
    """Frame one message."""
    body = b"".join(parts)
    return kind + _LENGTH.pack(len(body) + 4) + body


def query(text: bytes) -> bytes:
    """Encode a simple query."""
    return framed(b"Q", text, b"\0")


def parse(name: bytes, text: bytes, oids: Sequence[int] = ()) -> bytes:
    """Encode a Parse; names without the zero byte."""
    types = b"".join(map(_LENGTH.pack, oids))
    return framed(b"P", name, b"\0", text, b"\0", _INT16(len(oids)), types)


def execute(portal: bytes, max_rows: int = 0) -> bytes:
    """Encode an Execute."""
    return framed(b"E", portal, b"\0", _INT32(max_rows))


def close_portal(portal: bytes) -> bytes:
    """Encode a Close of a portal."""
    return framed(b"C", b"P", portal, b"\0")


def own_statement(
    text: str, values: Sequence[bytes | None] = (), oids: Sequence[int] = ()
) -> bytes:
    """Encode the messages to run a statement of the relay itself, without a Sync.

    Args:
        text: ASCII.
        values: parameters in binary format.
        oids: types of the parameters.
    """
    bound = b"".join(_INT32(-1) if v is None else _LENGTH.pack(len(v)) + v for v in values)
    return b"".join(
        (
            # A failed own statement leaves both behind.
            framed(b"C", b"P", _OWN),
            framed(b"C", b"S", _OWN),
            parse(_OWN[:-1], text.encode("ascii"), oids),
            framed(b"B", _OWN, _OWN, _INT16(1), _INT16(1), _INT16(len(values)), bound, _INT16(0)),
            framed(b"E", _OWN, _INT32(0)),
            framed(b"C", b"P", _OWN),
            framed(b"C", b"S", _OWN),
        )
    )


def own_arrays(text: str, numbers: Sequence[int], *texts: Sequence[bytes | None]) -> bytes:
    """Encode an own statement with a bigint array ``$1`` and bytea arrays ``$2`` ..."""
    values = [_array(_INT8, [struct.pack("!q", number) for number in numbers])]
    values += [_array(BYTEA, column) for column in texts]
    return own_statement(text, values, [_INT8_ARRAY, *[_BYTEA_ARRAY] * len(texts)])


def _array(oid: int, items: Sequence[bytes | None]) -> bytes:
    """Encode a one-dimensional array in PostgreSQL's binary format."""
    head = struct.pack("!iiI", 1 if items else 0, 1, oid)
    head += struct.pack("!ii", len(items), 1) if items else b""
    return head + b"".join(
        _INT32(-1) if item is None else _LENGTH.pack(len(item)) + item for item in items
    )


def fields(frame: bytes) -> dict[str, bytes]:
    """Parse the fields of an ErrorResponse or NoticeResponse frame."""
    return {chr(part[0]): part[1:] for part in frame[5:].split(b"\0") if part}


def with_fields(kind: bytes, values: dict[str, bytes]) -> bytes:
    """Encode an ErrorResponse or NoticeResponse."""
    return framed(kind, *(c.encode() + v + b"\0" for c, v in values.items()), b"\0")


def first_of(kind: bytes, frames: bytes) -> bytes:
    """Return the body of the first frame of a kind; the frame must exist."""
    at = 0
    while frames[at : at + 1] != kind:
        at += 1 + int.from_bytes(frames[at + 1 : at + 5], "big")
    return frames[at + 5 : at + 1 + int.from_bytes(frames[at + 1 : at + 5], "big")]


def row_values(frame: bytes) -> list[bytes | None]:
    """Parse the values of a DataRow frame."""
    values: list[bytes | None] = []
    at = 7
    for _ in range(int.from_bytes(frame[5:7], "big")):
        size = int.from_bytes(frame[at : at + 4], "big", signed=True)
        at += 4
        values.append(None if size < 0 else frame[at : at + size])
        at += max(size, 0)
    return values


def data_row(values: Sequence[bytes]) -> bytes:
    """Encode a DataRow."""
    cells = b"".join(_LENGTH.pack(len(value)) + value for value in values)
    return framed(b"D", _INT16(len(values)), cells)


def startup(parameters: dict[str, str], *, minor: int = 0) -> bytes:
    """Encode a StartupMessage."""
    body = b"".join(
        name.encode() + b"\0" + value.encode() + b"\0" for name, value in parameters.items()
    )
    packet = _LENGTH.pack(frontend.PROTOCOL_MAJOR << 16 | minor) + body + b"\0"
    return _LENGTH.pack(len(packet) + 4) + packet


def cancel_request(pid: int, secret: bytes) -> bytes:
    """Encode a CancelRequest."""
    body = struct.pack("!II", frontend.CANCEL_REQUEST_CODE, pid) + secret
    return _LENGTH.pack(len(body) + 4) + body


def names(frame: bytes) -> tuple[bytes, bytes]:
    """Return the first two strings of a message: both names of a Bind, or name and text of a Parse.

    Raises:
        RemoteProtocolError: a string is not terminated.
    """
    strings = frame[5:].split(b"\0", 2)
    if len(strings) < 3:
        raise RemoteProtocolError("malformed message: unterminated string")
    return strings[0], strings[1]


def bind_again(frame: bytes, portal: bytes, statement: bytes) -> bytes:
    """Encode a Bind with the values of another Bind; results come as text."""
    body = frame[5:].split(b"\0", 2)[2]
    at = 2 + 2 * int.from_bytes(body[:2], "big")
    count = int.from_bytes(body[at : at + 2], "big")
    at += 2
    for _ in range(count):
        at += 4 + max(0, int.from_bytes(body[at : at + 4], "big", signed=True))
    return framed(b"B", portal, b"\0", statement, b"\0", body[:at], _INT16(0))


def bind_to(frame: bytes, statement: bytes) -> bytes:
    """Encode a Bind of another statement to the same portal, with the same values."""
    portal, _, body = frame[5:].split(b"\0", 2)
    return framed(b"B", portal, b"\0", statement, b"\0", body)


def mechanisms(frame: bytes) -> list[str] | None:
    """Return the mechanisms that an AuthenticationSASL frame offers; None for any other frame."""
    if frame[:1] != b"R" or frame[5:9] != _INT32(10):
        return None
    return [name.decode("ascii", "replace") for name in frame[9:].split(b"\0") if name]
