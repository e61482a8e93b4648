"""The messages of the server: functions from values to the bytes of one backend message.

The handlers call the functions, and connection.py checks the order of messages. Rows are the hot
path: ``data_rows`` encodes many rows as one bytes object, with one encoder per column. Only this
module converts TierKV errors to fields of ErrorResponse and NoticeResponse.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.pgwire.protocol.messages import TooLong
from tierkv.dbfront.postgres_values.binary_format import Encoder
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.errors import DrainingError, RetryableError, SqlError, TierKVError

_INT32: Final = struct.Struct("!i").pack
_HEAD: Final = struct.Struct("!ci").pack
_FIELD: Final = struct.Struct("!IhIhih").pack
_ROW_HEAD: Final = struct.Struct("!ciH").pack
_NULL: Final = _INT32(-1)

PARSE_COMPLETE: Final = b"1\0\0\0\x04"
BIND_COMPLETE: Final = b"2\0\0\0\x04"
CLOSE_COMPLETE: Final = b"3\0\0\0\x04"
NO_DATA: Final = b"n\0\0\0\x04"
EMPTY_QUERY: Final = b"I\0\0\0\x04"
PORTAL_SUSPENDED: Final = b"s\0\0\0\x04"
COPY_DONE: Final = b"c\0\0\0\x04"
AUTHENTICATION_OK: Final = b"R\0\0\0\x08\0\0\0\0"


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a RowDescription.

    Attributes:
        format_code: 0 for text and 1 for binary.
        table_oid: OID of the column's table; 0 for other columns, as is ``attnum``.
    """

    name: str
    oid: int
    size: int
    typmod: int
    format_code: int
    table_oid: int = 0
    attnum: int = 0


def message(type_byte: bytes, body: bytes) -> bytes:
    """Frame one message."""
    return _HEAD(type_byte, len(body) + 4) + body


def _text(value: str) -> bytes:
    """Encode a C string without NUL bytes, which would end the string early."""
    return value.replace("\0", "").encode("utf-8", "replace") + b"\0"


def authentication_sasl(mechanisms: Sequence[str]) -> bytes:
    """Offer SASL mechanisms."""
    return message(b"R", _INT32(10) + b"".join(map(_text, mechanisms)) + b"\0")


def authentication_sasl_continue(data: bytes) -> bytes:
    """Encode the server's first SASL message."""
    return message(b"R", _INT32(11) + data)


def authentication_sasl_final(data: bytes) -> bytes:
    """Encode the server's last SASL message."""
    return message(b"R", _INT32(12) + data)


def negotiate_protocol_version(minor: int, options: Sequence[str]) -> bytes:
    """Report the supported minor version and the unsupported ``_pq_`` options."""
    return message(b"v", struct.pack("!ii", minor, len(options)) + b"".join(map(_text, options)))


def parameter_status(name: str, value: str) -> bytes:
    """Report a setting."""
    return message(b"S", _text(name) + _text(value))


def backend_key_data(pid: int, secret: bytes) -> bytes:
    """Encode the key for the client's CancelRequest."""
    return message(b"K", struct.pack("!I", pid) + secret)


def ready_for_query(status: str) -> bytes:
    """Encode ReadyForQuery; the status is I, T or E."""
    return message(b"Z", status.encode())


def row_description(fields: Sequence[Field]) -> bytes:
    """Encode the shape of the following rows."""
    parts = [struct.pack("!H", len(fields))]
    for column in fields:
        parts.append(_text(column.name))
        table, oid = (column.table_oid, column.attnum), column.oid
        parts.append(_FIELD(*table, oid, column.size, column.typmod, column.format_code))
    return message(b"T", b"".join(parts))


def parameter_description(oids: Sequence[int]) -> bytes:
    """Encode the types of a prepared statement's parameters."""
    return message(b"t", struct.pack(f"!H{len(oids)}I", len(oids), *oids))


def data_rows(rows: Iterable[Sequence[Any]], encoders: Sequence[Encoder]) -> bytes:
    """Encode rows as DataRow messages, back to back."""
    pack, row_head, null = _INT32, _ROW_HEAD, _NULL
    count = len(encoders)
    out: list[bytes] = []
    for row in rows:
        cells = [null]  # replaced by the head below
        size = 6
        for value, encode in zip(row, encoders, strict=True):
            if value is None:
                cells.append(null)
                size += 4
            else:
                data = encode(value)
                cells.append(pack(len(data)))
                cells.append(data)
                size += 4 + len(data)
        cells[0] = row_head(b"D", size, count)
        out.extend(cells)
    return b"".join(out)


def command_complete(tag: str) -> bytes:
    """Report the end of a statement."""
    return message(b"C", _text(tag))


def _copy_response(type_byte: bytes, columns: int, *, binary: bool) -> bytes:
    codes = [int(binary)] * columns
    return message(type_byte, struct.pack(f"!BH{columns}H", binary, columns, *codes))


def copy_out_response(columns: int, *, binary: bool = False) -> bytes:
    """Announce COPY data to the client."""
    return _copy_response(b"H", columns, binary=binary)


def copy_in_response(columns: int, *, binary: bool = False) -> bytes:
    """Ask the client for COPY data."""
    return _copy_response(b"G", columns, binary=binary)


def copy_data(data: bytes) -> bytes:
    """Encode one CopyData message."""
    return message(b"d", data)


def _fields(fields: Mapping[str, str]) -> bytes:
    body = b"".join(code.encode() + _text(value) for code, value in fields.items() if value)
    return body + b"\0"


def error_response(fields: Mapping[str, str]) -> bytes:
    """Encode an error; keys are PostgreSQL's one-letter field codes."""
    return message(b"E", _fields(fields))


def notice_response(fields: Mapping[str, str]) -> bytes:
    """Encode a notice or warning."""
    return message(b"N", _fields(fields))


_INTERNAL: Final = "XX000"


class AdminShutdownError(DrainingError):
    """The server is shutting down (57P01); raised in idle connections."""

    code = "admin_shutdown"
    sqlstate = "57P01"


ADMIN_SHUTDOWN: Final = "terminating connection due to administrator command"
"""PostgreSQL's words for AdminShutdownError."""


class TooManyConnectionsError(TierKVError):
    """No room for one more connection (53300)."""

    code = "too_many_connections"
    sqlstate = "53300"


class IdleTimeoutError(TierKVError):
    """The client was idle for too long (57P05, 25P03)."""

    code = "idle_timeout"
    sqlstate = "57P05"

    def __init__(self, *, in_transaction: bool) -> None:
        where = "idle-in-transaction" if in_transaction else "idle-session"
        super().__init__(f"terminating connection due to {where} timeout")
        if in_transaction:
            self.sqlstate = "25P03"  # type: ignore[misc]  # as PostgreSQL's, per instance


def too_long(message: TooLong) -> SqlError:
    """Return the error for a message that is too long."""
    return SqlError(
        f"the message has {message.size} bytes, at most {message.limit} are allowed",
        sqlstate="54000",
        hint="Load data with COPY, or send it in several statements.",
    )


def error_fields(error: BaseException, *, fatal: bool = False) -> dict[str, str]:
    """Return the fields of an ErrorResponse, by PostgreSQL's one-letter codes.

    Only TierKVErrors show their text. Any other exception is an internal error, whose details
    belong in the log.
    """
    severity = "FATAL" if fatal else "ERROR"
    fields = {"S": severity, "V": severity}
    if not isinstance(error, TierKVError):
        return {**fields, "C": _INTERNAL, "M": f"internal error: {type(error).__name__}"}
    fields |= {"C": error.sqlstate, "M": error.message or error.code}
    fields |= {"D": error.detail or _retry_detail(error), "H": error.hint}
    position = getattr(error, "position", 0)
    return {**fields, "P": str(position) if position else ""}


def _retry_detail(error: TierKVError) -> str:
    """Return the detail that tells a client when to retry, as Retry-After does in HTTP."""
    cancelled = error.sqlstate == "57014"  # By the user or by a timeout: not for a retry.
    if cancelled or not isinstance(error, RetryableError) or error.retry_after_ms <= 0:
        return ""
    return f"retry after {error.retry_after_ms} ms"


def notice_fields(notice: Notice) -> dict[str, str]:
    """Return the fields of a NoticeResponse."""
    sqlstate = notice.sqlstate
    if notice.severity == "WARNING" and sqlstate == "00000":
        sqlstate = "01000"
    return {
        "S": notice.severity,
        "V": notice.severity,
        "C": sqlstate,
        "M": notice.message,
        "D": notice.detail,
        "H": notice.hint,
    }
