"""The doors that the differential tests speak through, and what they hear there.

A ``DuckDbFront`` serves one embedded database on the wire, over REST and through DB-API, with a
model behind its AI functions or with plain functions. ``WireDoor`` speaks the simple or the
extended protocol with libpq itself, to a front, a relay or a PostgreSQL server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import psycopg
from psycopg import pq

from tests.differential.answers import POSTGRES_FUNCTIONS, DigestGenerator, PlainFunctions, plain
from tests.fix_postgres import attendants, running_postgres, running_relay
from tests.fix_sql import InstantGenerator
from tierkv import dbapi
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.server import HttpServer
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.server import PgWireServer
from tierkv.dbfront.postgres.install import install
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.clock import SystemClock
from tierkv.loop_thread import LoopThread

Spelling = Callable[[str], str]

_ERROR_FIELDS = (
    pq.DiagnosticField.SQLSTATE,
    pq.DiagnosticField.MESSAGE_PRIMARY,
    pq.DiagnosticField.MESSAGE_HINT,
    pq.DiagnosticField.STATEMENT_POSITION,
)

_SET = re.compile(r"SET (tierkv\.\w+) *= *('.*'|\S+)")
_CONSTANT = re.compile(r"(?<=LIMIT )\d+|(?<=OFFSET )\d+|(?<=[<>] )'a[0-9a-f]'")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a door answered to one statement.

    Attributes:
        sqlstate: of the error; empty after success.
        message: of the error, for people; never compared.
        tag: the command tag.
        columns: (name, type) of each column.
        rows: values as that door spells them.
        status: ``I``, ``T`` or ``E``; empty where the door has no transactions.
        hint: of the error, for people.
        position: of the error, from 1; 0 if it has none, -1 if the door tells no positions.
        notices: messages that came with the answer.
    """

    sqlstate: str = ""
    message: str = ""
    tag: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    rows: tuple[Any, ...] = ()
    status: str = ""
    hint: str = ""
    position: int = 0
    notices: tuple[str, ...] = ()


class Door(Protocol):
    """A session with some system."""

    def run(self, sql: str) -> Outcome:
        """Run one statement."""

    def close(self) -> None:
        """End the session."""


def _as_written(sql: str) -> str:
    return sql


class WireDoor:
    """A session over PostgreSQL's protocol.

    ``extended`` sends some constants as parameters without a type.
    """

    def __init__(self, dsn: str, *, spell: Spelling = _as_written, extended: bool = False) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._wire = self._connection.pgconn
        self._spell = spell
        self._extended = extended
        self._notices: list[str] = []
        self._connection.add_notice_handler(
            lambda notice: self._notices.append(notice.message_primary or "")
        )

    def run(self, sql: str) -> Outcome:
        """See Door."""
        self._notices.clear()
        text = self._spell(sql)
        if text.startswith("COPY"):
            return self._copied(text)
        if not self._extended:
            return self._outcome(self._wire.exec_(text.encode()))
        values: list[bytes] = []

        def mark(found: re.Match[str]) -> str:
            values.append(found[0].strip("'").encode())
            return f"${len(values)}"

        text = _CONSTANT.sub(mark, text)
        return self._outcome(self._wire.exec_params(text.encode(), values))

    def _outcome(self, result: Any) -> Outcome:
        status = self._status
        if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
            state, message, hint, position = (
                (result.error_field(field) or b"").decode() for field in _ERROR_FIELDS
            )
            return Outcome(state, message, status=status, hint=hint, position=int(position or 0))
        columns = tuple(
            ((result.fname(at) or b"").decode(), str(result.ftype(at)))
            for at in range(result.nfields)
        )
        rows = tuple(
            tuple(result.get_value(row, at) for at in range(result.nfields))
            for row in range(result.ntuples)
        )
        tag = (result.command_status or b"").decode()
        return Outcome("", "", tag, columns, rows, status, notices=tuple(self._notices))

    def _copied(self, text: str) -> Outcome:
        """Copy out; psycopg waits without holding up a server of this process."""
        try:
            with self._connection.cursor() as cursor:
                with cursor.copy(text.encode()) as copy:
                    rows = tuple(bytes(line) for line in copy)
                return Outcome("", "", cursor.statusmessage or "", (), rows, self._status)
        except psycopg.Error as error:
            return Outcome(error.sqlstate or "?", str(error), status=self._status)

    def copy_in(self, text: str, data: str) -> Outcome:
        """Run COPY FROM STDIN with the data."""
        with self._connection.cursor() as cursor:
            with cursor.copy(text.encode()) as copy:
                copy.write(data)
            return Outcome("", "", cursor.statusmessage or "", (), (), self._status)

    @property
    def _status(self) -> str:
        return {0: "I", 2: "T", 3: "E"}.get(int(self._wire.transaction_status), "?")

    def close(self) -> None:
        """See Door."""
        self._connection.close()


class RestDoor:
    """POST /v1/sql; every statement has a session of its own, with the settings of earlier ones."""

    def __init__(self, port: int, *, spell: Spelling = _as_written, lines: bool = False) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._spell = spell
        self._lines = lines
        self._settings: dict[str, str] = {}

    def run(self, sql: str) -> Outcome:
        """See Door."""
        body = {"sql": self._spell(sql), "stream": self._lines, "settings": self._settings}
        answer = self._client.post("/v1/sql", json=body)
        if answer.status_code == 200 and (found := _SET.fullmatch(sql)):
            self._settings[found[1]] = found[2].strip("'")
        if answer.status_code != 200:
            return _rest_error(answer.json()["error"])
        if self._lines:
            return self._of_lines([_json(line) for line in answer.text.splitlines() if line])
        return _of_json(answer.json())

    @staticmethod
    def _of_lines(lines: list[dict[str, Any]]) -> Outcome:
        if "error" in lines[-1]:
            return _rest_error(lines[-1]["error"])
        body = lines[0] | lines[-1] | {"rows": [line["row"] for line in lines if "row" in line]}
        return _of_json(body)

    def close(self) -> None:
        """See Door."""
        self._client.close()


def _json(line: str) -> dict[str, Any]:
    value: dict[str, Any] = httpx.Response(200, text=line).json()
    return value


def _rest_error(error: dict[str, Any]) -> Outcome:
    """Read an error; its hint is the end of its message."""
    state = str(error.get("sqlstate") or error.get("code"))
    return Outcome(state, error["message"], position=error.get("position") or 0)


def _of_json(body: dict[str, Any]) -> Outcome:
    columns = tuple((column["name"], column["type"]) for column in body["columns"])
    rows = tuple(tuple(row) for row in body["rows"])
    notices = tuple(notice["message"] for notice in body["notices"])
    return Outcome("", "", body["command_tag"], columns, rows, notices=notices)


class DbApiDoor:
    """A DB-API cursor, as ``tierkv.connect()`` gives it, over a front that is there already."""

    def __init__(self, front: DuckDbFront, *, spell: Spelling = _as_written) -> None:
        session = front.loop.run(front.sql.open_session(ClientInfo(user="alice")))
        self._cursor = dbapi.Cursor(front.loop, session)
        self._spell = spell

    def run(self, sql: str) -> Outcome:
        """See Door."""
        cursor = self._cursor
        try:
            cursor.execute(self._spell(sql))
        except dbapi.Error as error:
            return Outcome(error.sqlstate, str(error), hint=error.hint, position=-1)
        columns = tuple((column.name, column.type_name) for column in cursor.columns)
        rows = tuple(cursor.fetchall()) if columns else ()
        notices = tuple(notice.message for notice in cursor.notices)
        return Outcome("", "", cursor.command_tag, columns, rows, notices=notices)

    def close(self) -> None:
        """See Door."""
        self._cursor.close()


class DuckDbFront:
    """The embedded database behind all its doors.

    Attributes:
        generator: the model; it remembers what it was asked.
        functions: the plain functions, in a front that has them.
    """

    def __init__(self, generator: InstantGenerator | None = None) -> None:
        self.loop = LoopThread("differential")
        self.generator = generator or DigestGenerator()
        self.functions = PlainFunctions()
        self.sql: DialectServer = self.loop.run(self._open())

    async def _open(self) -> DialectServer:
        database = DuckDbSqlServer(DuckDbConfig(threads=1), self.generator)
        self.functions.register(database._engine._root)
        sql = DialectServer(database)
        self._wire = PgWireServer(PgWireConfig(port=0), sql, SystemClock())
        self._rest = HttpServer(HttpConfig(port=0), self.generator, sql=sql)
        self.wire_port = await self._wire.start()
        self.rest_port = await self._rest.start()
        return sql

    @property
    def dsn(self) -> str:
        """Where the wire door is."""
        return f"host=127.0.0.1 port={self.wire_port} user=alice dbname=main"

    def wire(self, *, plainly: bool = False, extended: bool = False) -> WireDoor:
        """Open a session on the wire."""
        return WireDoor(self.dsn, spell=plain if plainly else _as_written, extended=extended)

    def rest(self, *, plainly: bool = False, lines: bool = False) -> RestDoor:
        """Open the REST door."""
        return RestDoor(self.rest_port, spell=plain if plainly else _as_written, lines=lines)

    def dbapi(self, *, plainly: bool = False) -> DbApiDoor:
        """Open a DB-API cursor."""
        return DbApiDoor(self, spell=plain if plainly else _as_written)

    def close(self) -> None:
        """Stop everything."""

        async def stop() -> None:
            await self._rest.stop()
            await self._wire.stop()
            await self.sql.close()

        self.loop.run(stop())
        self.loop.stop()


@contextmanager
def running_fronts() -> Iterator[tuple[DuckDbFront, DuckDbFront]]:
    """Run a front with a model, and one whose plain functions are compared with it."""
    with ExitStack() as stack:
        pair = (DuckDbFront(), DuckDbFront())
        for front in pair:
            stack.callback(front.close)
        yield pair


@contextmanager
def running_postgres_pair() -> Iterator[tuple[str, str, DigestGenerator]]:
    """Run a PostgreSQL server and a relay.

    Yields:
        oracle_dsn: a database whose plain functions have the names of ours.
        relay_dsn: the relay in front of another one.
        generator: what answers the relay's AI calls.
    """
    generator = DigestGenerator()
    with running_postgres() as server:
        with psycopg.connect(server.dsn, autocommit=True) as direct:
            direct.execute("CREATE DATABASE oracle")
        oracle = server.dsn.replace("dbname=app", "dbname=oracle")
        with psycopg.connect(oracle, autocommit=True) as direct:
            direct.execute(POSTGRES_FUNCTIONS)
        asyncio.run(install(server.dsn))
        with running_relay(server.dsn, attendants(generator)) as relay:
            yield oracle, relay.dsn, generator
