"""Bounds and broken bytes: a statement is refused, the session goes on; a broken stream ends."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_pgwire import RunningServer, running_pgwire
from tierkv.kvcore.limits import MAX_PGWIRE_FRAME_BYTES, MAX_SQL_BYTES, MAX_SQL_TOKENS

pytestmark = pytest.mark.integration

STARTUP = struct.pack("!II", 20, 196608) + b"user\0alice\0\0"
STARTUP = struct.pack("!I", len(STARTUP)) + STARTUP[4:]
HUNDRED_MB = 100 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


@pytest.fixture
def conn(server: RunningServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def wire(server: RunningServer) -> Iterator[Wire]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        wire = Wire(sock)
        sock.sendall(STARTUP)
        wire.until(b"Z")
        yield wire


class Wire:
    """A socket that reads whole messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._data = b""

    def message(self) -> tuple[bytes, bytes] | None:
        """Type and body; None when the server hung up."""
        while len(self._data) < 5 or len(self._data) < 1 + self._size():
            piece = self.sock.recv(65_536)
            if not piece:
                return None
            self._data += piece
        end = 1 + self._size()
        kind, body, self._data = self._data[:1], self._data[5:end], self._data[end:]
        return kind, body

    def _size(self) -> int:
        return int.from_bytes(self._data[1:5], "big")

    def until(self, last: bytes) -> list[tuple[bytes, bytes]]:
        found = []
        while (message := self.message()) is not None:
            found.append(message)
            if message[0] == last:
                return found
        raise AssertionError(f"the server hung up after {found}")

    def send(self, kind: bytes, body: bytes) -> None:
        self.sock.sendall(kind + struct.pack("!I", len(body) + 4) + body)

    def query(self, sql: str) -> list[tuple[bytes, bytes]]:
        self.send(b"Q", sql.encode() + b"\0")
        return self.until(b"Z")

    def head(self, kind: bytes, size: int) -> None:
        self.sock.sendall(kind + struct.pack("!I", size))

    def rest(self, size: int) -> None:
        piece = bytes(1 << 20)
        for at in range(0, size, len(piece)):
            self.sock.sendall(piece[: size - at])


def test_a_100_mb_statement_is_refused_before_it_came(wire: Wire) -> None:
    wire.head(b"Q", HUNDRED_MB)
    (kind, body), ready = wire.until(b"Z")
    assert kind == b"E"
    assert b"C54000\0" in body
    assert ready == (b"Z", b"I")
    wire.rest(HUNDRED_MB - 4)
    assert (b"D", b"\0\1\0\0\0\x011") in wire.query("SELECT 1")


@pytest.mark.parametrize("kind", [b"P", b"B"])
def test_so_are_a_parse_and_a_bind_up_to_sync(wire: Wire, kind: bytes) -> None:
    wire.head(kind, HUNDRED_MB)
    assert b"C54000\0" in wire.until(b"E")[-1][1]
    wire.rest(HUNDRED_MB - 4)
    wire.send(b"P", b"x\0SELECT 1\0\0\0")  # dropped
    wire.send(b"S", b"")
    assert wire.until(b"Z") == [(b"Z", b"I")]
    wire.send(b"D", b"Sx\0")
    wire.send(b"S", b"")
    assert b"C26000\0" in wire.until(b"Z")[0][1]


def test_a_refused_statement_fails_the_transaction(wire: Wire) -> None:
    wire.query("BEGIN; CREATE TABLE lost (a INTEGER)")
    wire.head(b"Q", HUNDRED_MB)
    wire.rest(HUNDRED_MB - 4)
    assert wire.until(b"Z")[-1] == (b"Z", b"E")
    assert wire.query("COMMIT")[0] == (b"C", b"ROLLBACK\0")
    assert b"C42P01\0" in wire.query("SELECT * FROM lost")[0][1]
    assert wire.query("BEGIN; SELECT 'no end")[-1] == (b"Z", b"I")
    wire.query("BEGIN")
    assert wire.query("SELECT 'no end")[-1] == (b"Z", b"E")


def test_too_much_copy_data_fails_the_copy(wire: Wire) -> None:
    wire.query("CREATE OR REPLACE TABLE c (a VARCHAR)")
    wire.send(b"Q", b"COPY c FROM STDIN\0")
    wire.until(b"G")
    wire.send(b"d", b"one\n")
    wire.head(b"d", HUNDRED_MB)
    assert b"C54000\0" in wire.until(b"Z")[0][1]
    wire.rest(HUNDRED_MB - 4)
    wire.send(b"c", b"")
    assert (b"D", b"\0\1\0\0\0\x010") in wire.query("SELECT count(*) FROM c")


def test_a_length_nobody_can_mean_ends_the_connection(wire: Wire) -> None:
    wire.head(b"Q", MAX_PGWIRE_FRAME_BYTES + 1)
    ((kind, body),) = wire.until(b"E")
    assert kind == b"E"
    assert b"C08P01\0" in body
    assert wire.message() is None


@pytest.mark.parametrize(
    "broken",
    [
        b"Q" + struct.pack("!I", 13) + b"SELECT\x001\0",  # a NUL inside
        b"D" + struct.pack("!I", 7) + b"S\xff\0",
        b"B" + struct.pack("!I", 12) + b"\0\0\0\1\0\7\0\0",
        b"!" + struct.pack("!I", 4),
        b"S" + struct.pack("!I", 3),
        b"p" + struct.pack("!I", 5) + b"\0",
    ],
)
def test_broken_messages_end_the_connection_cleanly(wire: Wire, broken: bytes) -> None:
    wire.sock.sendall(broken)
    (_, body) = wire.until(b"E")[-1]
    assert b"SFATAL\0" in body
    assert b"C08P01\0" in body
    assert wire.message() is None


def test_bytes_that_are_no_text_cost_a_statement(wire: Wire) -> None:
    wire.send(b"Q", b"BEGIN\0")
    wire.until(b"Z")
    wire.send(b"Q", b"SELECT '\xff'\0")
    (kind, body), ready = wire.until(b"Z")
    assert kind == b"E"
    assert b"C22021\0" in body
    assert b"P9\0" in body
    assert b"H" in body
    assert ready == (b"Z", b"E")
    wire.send(b"P", b"x\0SELECT '\xff'\0\0\0")
    wire.send(b"S", b"")
    assert b"C22021\0" in wire.until(b"Z")[0][1]
    wire.query("ROLLBACK")
    assert (b"D", b"\0\1\0\0\0\x011") in wire.query("SELECT 1")


@pytest.mark.parametrize(
    "before", ["", "  ", "/* SELECT 1, nope */ ", "SELECT 1, 'nope'; -- SELECT 1, nope\n"]
)
def test_positions_count_from_the_start_of_the_whole_text(
    conn: psycopg.Connection, before: str
) -> None:
    sql = f"{before}SELECT 1, nope"
    ways = [lambda: conn.pgconn.exec_(sql.encode())]
    if ";" not in before:
        ways.append(lambda: conn.pgconn.exec_params(sql.encode(), []))
    for way in ways:
        position = way().error_field(psycopg.pq.DiagnosticField.STATEMENT_POSITION)
        assert position is not None
        assert int(position) == sql.rindex("nope") + 1


def test_sql_beyond_the_bound_through_a_driver(conn: psycopg.Connection) -> None:
    for sql in (f"SELECT '{'x' * MAX_SQL_BYTES}'", f"SELECT '{'x' * (MAX_SQL_BYTES * 2)}'"):
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            conn.execute(sql)
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            conn.execute(sql + " AS x, %s", [1])
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_ten_thousand_columns(conn: psycopg.Connection) -> None:
    names = ", ".join(f"{at} AS c{at}" for at in range(10_000))
    for options in ({}, {"binary": True}):
        row = conn.execute(f"SELECT {names}", **options).fetchone()
        assert row == tuple(range(10_000))


def test_more_columns_than_a_client_can_count(conn: psycopg.Connection) -> None:
    names = ", ".join(f"{at}" for at in range(33_000))
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(f"SELECT {names}")
    assert caught.value.sqlstate == "54011"
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_errors_say_where_behind_parameters(conn: psycopg.Connection) -> None:
    sql = "SELECT $1, $2::int[], current_user, nope FROM pg_class WHERE oid = $3"
    for oids in ((23, 1007, 26), (0, 0, 0)):
        result = conn.pgconn.exec_params(sql.encode(), [b"1", b"{1}", b"3"], param_types=oids)
        position = result.error_field(psycopg.pq.DiagnosticField.STATEMENT_POSITION)
        assert position is not None
        assert int(position) == sql.index("nope") + 1


@pytest.mark.parametrize(
    ("sql", "state", "near"),
    [
        ("SELECT 1, nope FROM range(3)", "42703", "nope"),
        ("SELECT * FROM nowhere", "42P01", "nowhere"),
        ("SELECT nofunction(1)", "42883", "nofunction"),
        ("SELECT 'ü', 1 +* 2 FROM", "42601", ""),
        ("SELECT 'Ä', nope FROM pg_class", "42703", "nope"),
        ("SELECT 1 WHERE 'a'::regclass = nope", "42703", "nope"),
        ("SELECT 'no end", "42601", "'no end"),
    ],
)
def test_errors_say_where(conn: psycopg.Connection, sql: str, state: str, near: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(sql)
    assert caught.value.sqlstate == state
    position = caught.value.diag.statement_position
    assert position is not None
    if near:
        assert sql[int(position) - 1 :].startswith(near)
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_more_words_than_a_text_may_have(conn: psycopg.Connection) -> None:
    for sql in ("SELECT 1" + ";" * MAX_SQL_TOKENS, "SELECT 1" + ",1" * MAX_SQL_TOKENS):
        with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="more than 300000 words"):
            conn.execute(sql)
    assert conn.execute("SELECT 1").fetchone() == (1,)
