"""Hostile bytes: the codec gives RemoteProtocolError or messages, the live server lives on."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbfront.pgwire.connection import PgConnection, Phase
from kvcore.errors import RemoteProtocolError
from tests.fix_pgwire import RunningServer, plain_sql, running_pgwire

STARTUP = struct.pack("!II", 20, 196608) + b"user\0alice\0\0"
STARTUP = struct.pack("!I", len(STARTUP)) + STARTUP[4:]


def frame(type_byte: bytes, body: bytes, length: int | None = None) -> bytes:
    return type_byte + struct.pack("!I", len(body) + 4 if length is None else length) + body


frames = st.builds(
    frame,
    st.sampled_from([bytes([c]) for c in b"QPBDESHCdcfFpX?\0"]),
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from(
            [b"\0", b"SELECT 1\0", b"\0SELECT $1\0\0\0", b"S\0", b"P\0", b"\0\0\0\0\0"]
        ),
        st.builds(lambda b: b"\0\0" + b, st.binary(max_size=30)),
    ),
    st.one_of(st.none(), st.none(), st.integers(0, 2**32 - 1)),
)
streams = st.lists(st.one_of(frames, st.binary(max_size=20)), max_size=8).map(b"".join)


def drive(connection: PgConnection, data: bytes, step: int) -> None:
    for at in range(0, len(data), step):
        connection.receive_data(data[at : at + step])
        while connection.next_message() is not None:
            if connection.phase is Phase.STARTUP:
                connection.accept_startup()
            elif connection.phase is Phase.AUTH:
                connection.accept_login()


@settings(max_examples=300, deadline=None)
@given(data=streams, step=st.integers(1, 50), skip_login=st.booleans())
def test_codec_only_ever_raises_protocol_errors(data: bytes, step: int, skip_login: bool) -> None:
    connection = PgConnection()
    if skip_login:
        connection.phase = Phase.READY
    try:
        drive(connection, data, step)
    except RemoteProtocolError:
        assert connection.phase is Phase.CLOSED


@settings(max_examples=100, deadline=None)
@given(data=st.lists(frames, max_size=6).map(b"".join), step=st.integers(1, 7))
def test_how_bytes_are_cut_does_not_matter(data: bytes, step: int) -> None:
    def messages(size: int) -> list[object]:
        connection, found = PgConnection(), []
        connection.phase = Phase.READY
        try:
            for at in range(0, len(data), size):
                connection.receive_data(data[at : at + size])
                while (message := connection.next_message()) is not None:
                    found.append(message)
        except RemoteProtocolError as error:
            found.append(error.message)
        return found

    assert messages(step) == messages(len(data) or 1)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire(plain_sql) as running:
        yield running


@pytest.mark.integration
@settings(max_examples=60, deadline=None)
@given(data=streams, log_in=st.booleans())
def test_live_server_survives(server: RunningServer, data: bytes, log_in: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall((STARTUP if log_in else b"") + data)
        sock.shutdown(socket.SHUT_WR)
        try:
            while sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        assert conn.execute("SELECT 41 + 1").fetchone() == (42,)


@pytest.mark.integration
def test_malformed_frame_is_answered_with_08p01(server: RunningServer) -> None:
    for bad in (
        frame(b"?", b""),
        frame(b"Q", b"no end"),
        frame(b"S", b"", 0),
        frame(b"Q", b"", 2**31),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(STARTUP + bad)
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
        assert b"SFATAL\0" in answer
        assert b"C08P01\0" in answer
