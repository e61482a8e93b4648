"""POST /v1/sql as lines: rows while answers are missing, and nothing asked for nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fix_held import HeldGenerator
from tests.fix_sql import answer_text
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.endpoints.sql import NDJSON
from tierkv.dbfront.http.server import HttpServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.errors import RowLevelError

pytestmark = pytest.mark.integration

QUERY = "SELECT i, ai_generate('p' || i) AS a FROM range(200) r(i)"
EXPECTED = [[i, answer_text(f"p{i}")] for i in range(200)]
COLUMNS = [{"name": "i", "type": "BIGINT"}, {"name": "a", "type": "VARCHAR"}]


class Exchange:
    """One request whose answer is read piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.kind = ""
        self._reader, self._writer = reader, writer
        self._body = b""

    async def send(self, body: dict[str, Any], accept: str) -> None:
        sent = json.dumps(body).encode()
        lines = [
            "POST /v1/sql HTTP/1.1",
            "host: 127.0.0.1",
            "content-type: application/json",
            f"accept: {accept}",
        ]
        lines += ["connection: close", f"content-length: {len(sent)}", "", ""]
        self._writer.write("\r\n".join(lines).encode() + sent)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.status = int(head.split()[1])
        self.kind = head.partition("content-type: ")[2].partition("\r\n")[0]
        if "chunked" not in head:
            self._body = await self._reader.read()

    async def piece(self) -> bytes:
        """The next chunk of the body; empty at the end."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def line(self) -> Any:
        while b"\n" not in self._body:
            piece = await self.piece()
            assert piece, "the body ended inside a line"
            self._body += piece
        line, _, self._body = self._body.partition(b"\n")
        return json.loads(line)

    async def rest(self) -> list[Any]:
        while piece := await self.piece():
            self._body += piece
        return [json.loads(line) for line in self._body.splitlines()]

    def json(self) -> Any:
        return json.loads(self._body)


class Door:
    """A server, and how to ask it."""

    def __init__(self, port: int) -> None:
        self._port = port

    @asynccontextmanager
    async def ask(self, sql: str, *, accept: str = NDJSON, **body: Any) -> AsyncIterator[Exchange]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        exchange = Exchange(reader, writer)
        try:
            await exchange.send({"sql": sql, **body}, accept)
            yield exchange
        finally:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
def generator() -> HeldGenerator:
    return HeldGenerator()


@pytest.fixture
async def sql(generator: HeldGenerator) -> AsyncIterator[DuckDbSqlServer]:
    server = DuckDbSqlServer(
        DuckDbConfig(threads=1), generator, session_defaults={"tierkv.max_concurrency": "8"}
    )
    yield server
    await server.close()


@asynccontextmanager
async def open_door(
    generator: HeldGenerator, sql: DuckDbSqlServer, *, first_event_wait_s: float, **bounds: Any
) -> AsyncIterator[Door]:
    config = HttpConfig(
        port=0, keep_alive_interval_s=0.05, first_event_wait_s=first_event_wait_s, **bounds
    )
    server = HttpServer(config, generator, sql=sql)
    yield Door(await server.start())
    await server.stop()


@pytest.fixture
async def door(generator: HeldGenerator, sql: DuckDbSqlServer) -> AsyncIterator[Door]:
    async with open_door(generator, sql, first_event_wait_s=0.1) as door:
        yield door


@pytest.fixture
async def patient_door(generator: HeldGenerator, sql: DuckDbSqlServer) -> AsyncIterator[Door]:
    """A door that has an error's own status however slow the machine is."""
    async with open_door(generator, sql, first_event_wait_s=60) as door:
        yield door


@pytest.mark.parametrize("accept", [NDJSON, "*/*"])
async def test_statements_above_the_limit_are_told_to_wait(
    generator: HeldGenerator, sql: DuckDbSqlServer, accept: str
) -> None:
    async with open_door(generator, sql, first_event_wait_s=60, max_statements=1) as door:
        async with door.ask(QUERY) as running:
            await generator.waiting.wait()
            async with door.ask("SELECT 1", accept=accept) as refused:
                assert (refused.status, refused.json()["error"]["code"]) == (429, "overloaded")
            generator.release.set()
            await running.rest()
        async with door.ask("SELECT 1", accept=accept) as answered:
            assert answered.status == 200


@pytest.mark.parametrize("accept", [NDJSON, "*/*"])
async def test_a_statement_is_stopped_when_its_time_is_over(
    generator: HeldGenerator, sql: DuckDbSqlServer, accept: str
) -> None:
    query = "SELECT count(ai_generate('p' || i)) FROM range(200) r(i)"
    async with (
        open_door(generator, sql, first_event_wait_s=60, statement_timeout_s=0.3) as door,
        door.ask(query, accept=accept) as late,
    ):
        error = late.json()["error"]
    assert (late.status, error["code"], error["sqlstate"]) == (504, "deadline_exceeded", "57014")
    if generator.waiting.is_set():  # On a busy machine the time may be over before a call waits.
        await generator.stopped.wait()


@pytest.mark.parametrize("how", [{"accept": NDJSON}, {"accept": "*/*", "stream": True}])
async def test_rows_come_while_answers_are_missing(
    door: Door, generator: HeldGenerator, how: dict[str, Any]
) -> None:
    async with door.ask(QUERY, **how) as exchange:
        assert (exchange.status, exchange.kind) == (200, NDJSON)
        assert await exchange.line() == {"columns": COLUMNS}
        rows = [(await exchange.line())["row"] for _ in range(8)]
        assert len(generator.prompts) < 100
        generator.release.set()
        *more, ending = await exchange.rest()
    assert rows + [line["row"] for line in more] == EXPECTED
    assert ending == {"command_tag": "SELECT 200", "notices": []}
    assert len(generator.prompts) == 200


async def test_a_client_that_goes_away_stops_the_calls(
    door: Door, generator: HeldGenerator, sql: DuckDbSqlServer
) -> None:
    async with door.ask(QUERY) as exchange:
        await exchange.line()
        await generator.waiting.wait()
    await generator.stopped.wait()
    asked = len(generator.prompts)
    assert asked < 200
    session = await sql.open_session(ClientInfo(user="ann"))
    view = "SELECT count(*) FROM tierkv.stat_activity WHERE application_name = 'http'"
    while (await session.execute(view)).rows != [(0,)]:  # its session ends with it
        pass
    assert len(generator.prompts) == asked


async def test_a_replayed_statement_of_a_client_that_goes_away_is_stopped(
    door: Door, generator: HeldGenerator
) -> None:
    async with door.ask("SELECT count(ai_generate('p' || i)) FROM range(200) r(i)") as exchange:
        assert await exchange.piece() == b" "  # a sign of life
        await generator.waiting.wait()
    await generator.stopped.wait()
    assert len(generator.prompts) < 200


async def test_an_error_after_rows_is_the_last_line(door: Door, generator: HeldGenerator) -> None:
    generator.release.set()
    async with door.ask(QUERY.replace("200", "2000")) as exchange:
        head, *rows, ending = await exchange.rest()
    assert head == {"columns": COLUMNS}
    assert [line["row"] for line in rows[:200]] == EXPECTED
    assert len(generator.prompts) == len(rows) <= 1000
    error = ending["error"]
    assert (error["sqlstate"], error["code"]) == ("53400", "sql_error")
    assert "max_calls" in error["message"]
    assert 'Put "settings": {"tierkv.max_calls": 0} into the body' in error["message"]
    assert "SET " not in error["message"]


async def test_failed_calls_are_told_with_the_ending(door: Door, generator: HeldGenerator) -> None:
    generator.failing["p50"] = RowLevelError("no such luck")
    async with door.ask(QUERY.replace("200", "60")) as exchange:
        *rows, ending = await exchange.rest()
    assert rows[51] == {"row": [50, None]}
    (notice,) = ending["notices"]
    assert notice["message"].startswith("1 of 60 AI calls failed")


async def test_an_error_before_rows_has_its_status(
    patient_door: Door, generator: HeldGenerator
) -> None:
    door = patient_door
    async with door.ask("  SELECT ai_generate(body) FROM nowhere") as exchange:
        error = exchange.json()["error"]
        assert (exchange.status, error["code"], error["sqlstate"]) == (400, "sql_error", "42P01")
        assert error["position"] == 33
    async with door.ask("SELECT 1; SELECT 2") as exchange:
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, "sql")
    assert generator.prompts == []


@pytest.mark.parametrize(
    ("text", "params"),
    [
        (QUERY, None),
        ("SELECT $1::INT AS n, DATE '2024-01-02' AS d, 'a\nb' AS t, [1.5, 'inf'::FLOAT] AS l", [7]),
        ("SELECT i FROM range(2500) r(i)", None),
        ("SELECT 1 AS one WHERE false", None),
        ("SELECT ai_generate('p' || i) AS a FROM range(9) r(i) WHERE i > 10", None),
        ("CREATE OR REPLACE TABLE t (n INTEGER)", None),
    ],
)
async def test_lines_hold_what_the_whole_form_holds(
    door: Door, generator: HeldGenerator, text: str, params: list[int] | None
) -> None:
    generator.release.set()
    async with door.ask(text, params=params) as lines:
        head, *rows, ending = await lines.rest()
    async with door.ask(text, accept="*/*", params=params) as exchange:
        whole = exchange.json()
    assert head == {"columns": whole.pop("columns")}
    assert [line["row"] for line in rows] == whole.pop("rows")
    assert ending == whole


async def test_signs_of_life_are_white_space_before_a_line(
    door: Door, generator: HeldGenerator
) -> None:
    async with door.ask("SELECT ai_generate('held back') AS a") as exchange:
        assert await exchange.piece() == b" "
        assert await exchange.piece() == b" "
        generator.release.set()
        lines = await exchange.rest()
    assert lines[1] == {"row": [answer_text("held back")]}
