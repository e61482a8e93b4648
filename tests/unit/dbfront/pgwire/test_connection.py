from __future__ import annotations

import struct

import pytest

from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol.connection import (
    MAX_AUTH_MESSAGE_BYTES,
    ConnectionPhase,
    PgConnection,
)
from tierkv.dbfront.pgwire.protocol.replies import error_fields
from tierkv.kvcore.errors import (
    CancelledByUserError,
    LocalProtocolError,
    OverloadedError,
    RemoteProtocolError,
)
from tierkv.kvcore.limits import MAX_PGWIRE_FRAME_BYTES, MAX_STARTUP_BYTES


def frame(type_byte: bytes, body: bytes = b"") -> bytes:
    return type_byte + struct.pack("!I", len(body) + 4) + body


def startup(code: int, body: bytes = b"") -> bytes:
    return struct.pack("!II", len(body) + 8, code) + body


def ready() -> PgConnection:
    connection = PgConnection()
    connection.accept_startup()
    connection.accept_login()
    return connection


def feed(connection: PgConnection, data: bytes) -> list[object]:
    connection.receive_data(data)
    found = []
    while (message := connection.next_message()) is not None:
        found.append(message)
    return found


def test_login_byte_by_byte() -> None:
    connection = PgConnection()
    assert feed(connection, startup(80877103)) == [m.SslRequest()]
    assert feed(connection, startup(80877104)) == [m.GssEncRequest()]
    data = startup(196608, b"user\0bob\0database\0d\0\0")
    for byte in data[:-1]:
        assert feed(connection, bytes([byte])) == []
    assert feed(connection, data[-1:]) == [m.Startup({"user": "bob", "database": "d"})]
    connection.accept_startup()
    assert feed(connection, frame(b"p", b"secret")) == [m.PasswordData(b"secret")]
    connection.accept_login()
    assert feed(connection, frame(b"Q", b"SELECT 1\0")) == [m.Query("SELECT 1")]


def test_cancel_request_and_newer_minor_version() -> None:
    assert feed(PgConnection(), startup(80877102, struct.pack("!I", 7) + b"abcd")) == [
        m.CancelRequest(7, b"abcd")
    ]
    assert feed(PgConnection(), startup((3 << 16) | 9999, b"\0")) == [m.Startup({}, 9999)]


@pytest.mark.parametrize(
    "data",
    [
        startup(2 << 16, b"\0"),
        struct.pack("!I", 3),
        struct.pack("!I", MAX_STARTUP_BYTES + 1),
        startup(196608, b"user\0bob"),
        startup(196608, b"\0extra"),
        startup(80877103, b"x"),
    ],
)
def test_bad_startup(data: bytes) -> None:
    connection = PgConnection()
    with pytest.raises(RemoteProtocolError):
        feed(connection, data)
    assert connection.phase is ConnectionPhase.CLOSED


@pytest.mark.parametrize(
    "data",
    [
        frame(b"?"),
        b"S\0\0\0\0",
        b"Q" + struct.pack("!I", MAX_PGWIRE_FRAME_BYTES + 1),
        frame(b"Q", b"no end"),
        frame(b"Q", b"ok\0left over"),
        frame(b"D", b"S\xff\xfe\0"),
        frame(b"D", b""),
        frame(b"D", b"X\0"),
        frame(b"B", b"\0\0" + struct.pack("!HHi", 0, 1, 100) + b"abc"),
        frame(b"B", b"\0\0" + struct.pack("!HHi", 0, 1, -7) + b"\0\0"),
        frame(b"B", b"\0\0" + struct.pack("!HHHH", 1, 9, 0, 0)),
        frame(b"p", b"late password"),
    ],
)
def test_malformed_messages_end_the_connection(data: bytes) -> None:
    connection = ready()
    with pytest.raises(RemoteProtocolError):
        feed(connection, data)
    assert connection.phase is ConnectionPhase.CLOSED


def test_nobody_unknown_may_send_much() -> None:
    connection = PgConnection()
    connection.accept_startup()
    with pytest.raises(RemoteProtocolError):
        feed(connection, b"p" + struct.pack("!I", MAX_AUTH_MESSAGE_BYTES + 1))


def test_extended_batch_skips_to_sync_after_an_error() -> None:
    connection = ready()
    parse = frame(b"P", b"\0SELECT\0\0\0")
    assert feed(connection, parse) == [m.Parse("", "SELECT", ())]
    connection.fail_statement()
    skipped = frame(b"B", b"\0\0\0\0\0\0\0\0") + frame(b"E", b"\0\0\0\0\0") + frame(b"Q", b"x\0")
    assert feed(connection, skipped) == []
    assert feed(connection, frame(b"S")) == [m.Sync()]
    assert connection.send_ready("I") == b"Z\0\0\0\x05I"
    assert feed(connection, frame(b"Q", b"x\0")) == [m.Query("x")]


def test_simple_query_error_does_not_skip() -> None:
    connection = ready()
    feed(connection, frame(b"Q", b"x\0"))
    connection.fail_statement()
    connection.send_ready("E")
    assert feed(connection, frame(b"Q", b"y\0")) == [m.Query("y")]


def test_copy_data_counts_only_during_copy() -> None:
    connection = ready()
    feed(connection, frame(b"Q", b"COPY\0"))
    connection.send_copy_in(2)
    assert feed(connection, frame(b"d", b"1") + frame(b"H") + frame(b"S")) == [m.CopyData(b"1")]
    connection.fail_statement()
    connection.send_ready("I")
    assert feed(connection, frame(b"d", b"2") + frame(b"c") + frame(b"f", b"why\0")) == []
    with pytest.raises(RemoteProtocolError):
        connection = ready()
        connection.send_copy_in(1)
        feed(connection, frame(b"Q", b"x\0"))


def test_our_own_mistakes_are_local_errors() -> None:
    with pytest.raises(LocalProtocolError):
        PgConnection().accept_login()
    with pytest.raises(LocalProtocolError):
        PgConnection().send_ready("I")


def test_a_cancelled_statement_says_nothing_of_trying_again() -> None:
    assert error_fields(CancelledByUserError("canceling"))["D"] == ""
    assert error_fields(OverloadedError("full"))["D"].startswith("retry after ")
