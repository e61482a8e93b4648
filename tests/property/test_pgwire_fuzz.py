"""Hostile bytes: the codec gives RemoteProtocolError or messages, the live server lives on."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_pgwire import RunningServer, running_pgwire
from tierkv.dbfront.pgwire.protocol.connection import ConnectionPhase, PgConnection
from tierkv.kvcore.errors import RemoteProtocolError

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
            if connection.phase is ConnectionPhase.STARTUP:
                connection.accept_startup()
            elif connection.phase is ConnectionPhase.AUTH:
                connection.accept_login()


@settings(max_examples=300, deadline=None)
@given(data=streams, step=st.integers(1, 50), skip_login=st.booleans())
def test_codec_only_ever_raises_protocol_errors(data: bytes, step: int, skip_login: bool) -> None:
    connection = PgConnection()
    if skip_login:
        connection.phase = ConnectionPhase.READY
    try:
        drive(connection, data, step)
    except RemoteProtocolError:
        assert connection.phase is ConnectionPhase.CLOSED


@settings(max_examples=100, deadline=None)
@given(data=st.lists(frames, max_size=6).map(b"".join), step=st.integers(1, 7))
def test_how_bytes_are_cut_does_not_matter(data: bytes, step: int) -> None:
    def messages(size: int) -> list[object]:
        connection, found = PgConnection(), []
        connection.phase = ConnectionPhase.READY
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
    with running_pgwire() as running:
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


NAMES = st.sampled_from([b"", b"a", b"b", b"never"])
SQL = st.sampled_from(
    [
        b"SELECT 1", b"SELECT $1", b"SELECT $1::int + 1", b"SELECT * FROM range(5)", b"", b"SEL",
        b"BEGIN", b"COMMIT", b"ROLLBACK", b"SELECT * FROM nowhere", b"SELECT 'open", b"SET a.b = 1",
        b"SAVEPOINT s", b"ROLLBACK TO s", b"RELEASE s", b"DECLARE c CURSOR FOR VALUES (1)",
        b"FETCH c",
        b"CREATE OR REPLACE TABLE fuzzed (n INTEGER)", b"INSERT INTO fuzzed VALUES ($1)",
        b"DEALLOCATE ALL", b"DISCARD ALL", b"CLOSE ALL", b"SHOW ALL", b"SELECT 1; SELECT 2",
    ]
)  # fmt: skip


def bind(portal: bytes, statement: bytes, values: list[bytes | None], binary: bool) -> bytes:
    parts = [
        struct.pack("!i", -1) if value is None else struct.pack("!i", len(value)) + value
        for value in values
    ]
    formats = struct.pack("!HHH", 1, binary, len(values))
    results = struct.pack("!HH", 1, binary)
    return frame(b"B", portal + b"\0" + statement + b"\0" + formats + b"".join(parts) + results)


VALUES = st.lists(st.sampled_from([b"7", b"\0\0\0\7", b"x", b"", b"\xff", None]), max_size=2)
extended = st.one_of(
    st.builds(
        lambda name, sql, oids: frame(
            b"P", name + b"\0" + sql + b"\0" + struct.pack(f"!H{len(oids)}I", len(oids), *oids)
        ),
        NAMES,
        SQL,
        st.lists(st.sampled_from([0, 23, 25, 16, 1186, 99_999]), max_size=2),
    ),
    st.builds(bind, NAMES, NAMES, VALUES, st.booleans()),
    st.builds(
        lambda verb, kind, name: frame(verb, kind + name + b"\0"),
        st.sampled_from([b"D", b"C"]),
        st.sampled_from([b"S", b"P"]),
        NAMES,
    ),
    st.builds(
        lambda name, most: frame(b"E", name + b"\0" + struct.pack("!i", most)),
        NAMES,
        st.integers(-1, 3),
    ),
    st.sampled_from(
        [frame(b"S", b""), frame(b"H", b""), frame(b"Q", b"SELECT 5\0"), frame(b"c", b"")]
    ),
)


def answers(sock: socket.socket, last: bytes) -> list[tuple[bytes, bytes]]:
    """Whole messages up to a row that holds ``last``, and the ReadyForQuery after it."""
    data, found, seen = b"", [], False
    while True:
        while len(data) >= 5 and len(data) > (size := int.from_bytes(data[1:5], "big")):
            found.append((data[:1], data[5 : 1 + size]))
            data = data[1 + size :]
            seen = seen or (found[-1][0] == b"D" and last in found[-1][1])
            if seen and found[-1][0] == b"Z":
                return found
        piece = sock.recv(65_536)
        assert piece, f"the server hung up after {found}"
        data += piece


@pytest.mark.integration
@settings(max_examples=120, deadline=None)
@given(messages=st.lists(extended, max_size=12))
def test_any_order_of_extended_messages_is_answered_in_order(
    real: RunningServer, messages: list[bytes]
) -> None:
    """After an error nothing is answered until Sync; the session is usable at the end."""
    end = frame(b"S", b"") + frame(b"Q", b"ROLLBACK\0") + frame(b"Q", b"SELECT 'the end'\0")
    with socket.create_connection(("127.0.0.1", real.port), timeout=30) as sock:
        sock.sendall(STARTUP + b"".join(messages) + end)
        found = answers(sock, b"the end")
    found = found[1 + next(at for at, (kind, _) in enumerate(found) if kind == b"Z") :]
    for (kind, body), (after, _) in itertools.pairwise(found):
        assert kind in b"123CDEInNsStTZ"
        if kind == b"E":
            assert after in (b"Z", b"S"), "only ReadyForQuery follows an error"
            assert b"CXX000" not in body, "an internal error"
    assert found[-1] == (b"Z", b"I")


@pytest.fixture(scope="module")
def real() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running
