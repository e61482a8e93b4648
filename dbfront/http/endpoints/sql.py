"""POST /v1/sql: one statement in, columns and rows as JSON out, whole or with a line per row.

For scripts with curl and without a database driver; each statement runs in a new session.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.http.services import (
    FieldError,
    Services,
    caller_of,
    read_body,
    until_disconnect,
)
from tierkv.dbfront.http.sse import Framing, open_framed
from tierkv.dbfront.sql_session import SqlServer, SqlSession
from tierkv.dbfront.statement_results import Column, RowStream, StatementResult
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    CancelledByUserError,
    DeadlineError,
    OverloadedError,
    TierKVError,
    UserError,
)
from tierkv.sql.plan.plan import SqlStatement
from tierkv.sql.text.statement import statement_spans

SettingName = Annotated[str, Field(pattern=r"^tierkv\.[a-z_]+$")]


class SqlBody(BaseModel):
    """POST /v1/sql; ``stream`` asks for lines while the statement runs.

    ``settings`` are SET for this statement only.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "sql": "SELECT ai_generate($1) AS answer",
                    "params": ["Mia bought a kettle. Question: What did she buy?"],
                    "settings": {"tierkv.max_tokens": 16},
                }
            ]
        }
    )

    sql: Annotated[str, Field(min_length=1, max_length=limits.MAX_SQL_BYTES)] = Field(
        description="one statement"
    )
    params: list[Any] | dict[str, Any] | None = Field(
        default=None, description="values of $1, $2 ...; an object for $name"
    )
    stream: bool = Field(
        default=False, description="send a line per row while the statement runs (NDJSON)"
    )
    settings: dict[SettingName, str | int | float | bool] = Field(
        default={}, description="tierkv settings of this statement, such as tierkv.max_calls"
    )


class StatementError(FieldError):
    """An error of a SQL statement; the translator also shows the SQLSTATE and the position."""

    def __init__(self, error: TierKVError, param: str = "") -> None:
        super().__init__(param, error)

    def facts(self) -> dict[str, Any]:
        """Return the SQLSTATE, and the position in the text, counted from 1, if known."""
        position = self.error.position if isinstance(self.error, UserError) else 0
        facts: dict[str, Any] = {"sqlstate": self.error.sqlstate}
        return facts | {"position": position} if position else facts


NDJSON: Final = "application/x-ndjson"
_SET: Final = re.compile(r"SET (tierkv\.\w+) = ('[^']*'|[\w.]+)")
ROWS_AT_ONCE: Final = 1_000
"""Rows of a complete result that are written before waiting for the client."""


def sql_router(services: Services, sql: SqlServer) -> APIRouter:
    """Create the endpoint."""
    router = APIRouter()
    bounds = _Bounds(services.config.max_statements, services.config.statement_timeout_s)

    @router.post("/v1/sql", summary="One SQL statement in, columns and rows out")
    async def run_sql(request: Request) -> Response:
        body = await read_body(request, SqlBody)
        caller = caller_of(request)
        client = ClientInfo(user=caller.tenant, application_name="http", key=caller.key)
        if body.stream or NDJSON in request.headers.get("accept", ""):
            return await open_framed(services, _lines(sql, client, body, bounds), LINES)
        result = await until_disconnect(services, request, _run(sql, client, body, bounds))
        return Response(_whole(result), media_type="application/json")

    return router


class _Bounds:
    """Limits of the number of running statements and of the run time of a statement."""

    def __init__(self, most: int, timeout_s: float) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._running = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a statement while it runs.

        Raises:
            OverloadedError: the maximum number of statements is running.
        """
        if self._running >= self._most:
            raise OverloadedError(
                f"{self._most} SQL statements are already running over REST",
                hint="Try again later, or raise front.max_http_statements.",
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @contextmanager
    def timed(self, session: SqlSession) -> Iterator[None]:
        """Cancel the session's statement at the time limit.

        asyncio.timeout is bound to one task, but several tasks fetch the rows of a stream in turn.

        Raises:
            DeadlineError: the statement was cancelled at the time limit.
        """
        cancels: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        timer = None
        if self._timeout_s:
            timer = loop.call_later(
                self._timeout_s, lambda: cancels.append(loop.create_task(session.cancel()))
            )
        try:
            yield
        except CancelledByUserError:
            if not cancels:
                raise
            raise DeadlineError(
                "canceling statement due to statement timeout",
                hint="The limit is front.statement_timeout_s.",
            ) from None
        finally:
            if timer is not None:
                timer.cancel()


async def _run(
    sql: SqlServer, client: ClientInfo, body: SqlBody, bounds: _Bounds
) -> StatementResult:
    with bounds.counted():
        text = SqlStatement(body.sql)
        async with text.read_ahead(), _session(sql, client, body) as session:
            with _statement(session, text) as statement, bounds.timed(session):
                return await session.execute(statement, body.params)


async def _lines(
    sql: SqlServer, client: ClientInfo, body: SqlBody, bounds: _Bounds
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a statement; the first lines are yielded with the first rows.

    A statement that fails at once is therefore answered with an HTTP status, not with a stream.
    """
    with bounds.counted():
        text = SqlStatement(body.sql)
        async with text.read_ahead(), _session(sql, client, body) as session:
            with _statement(session, text) as statement, bounds.timed(session):
                opened = await session.execute_rows(statement, body.params)
                head = _line({"columns": _columns(opened.columns)})
                async with aclosing(_batches(opened)) as batches:
                    async for rows in batches:
                        yield head + b"".join([_line({"row": row}) for row in rows])
                        head = b""
            result = opened if isinstance(opened, StatementResult) else opened.result
            assert result is not None, "the last rows were taken"
            yield head + _line(_ending(result))


async def _batches(
    opened: StatementResult | RowStream,
) -> AsyncGenerator[Sequence[tuple[Any, ...]], None]:
    if isinstance(opened, StatementResult):
        for at in range(0, len(opened.rows), ROWS_AT_ONCE):
            yield opened.rows[at : at + ROWS_AT_ONCE]
        return
    try:
        while rows := await opened.next_rows():
            yield rows
    finally:
        await opened.close()


@asynccontextmanager
async def _session(
    sql: SqlServer, client: ClientInfo, body: SqlBody
) -> AsyncGenerator[SqlSession, None]:
    """Open a session for one request; leaving stops running calls, at the models too."""
    session = await sql.open_session(client)
    try:
        for name, value in body.settings.items():
            await _set(session, name, value)
        yield session
    finally:
        await session.close()


async def _set(session: SqlSession, name: str, value: str | float | bool) -> None:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    quoted = text.replace("'", "''")
    try:
        await session.execute(f"SET {name} = '{quoted}'")
    except UserError as error:
        error.position = 0  # The text of the SET is not the client's.
        raise StatementError(error, f"settings.{name}") from error


@contextmanager
def _statement(session: SqlSession, text: SqlStatement) -> Iterator[str]:
    """Yield the only statement of the body; error positions count from the start of ``sql``."""
    try:
        statements = session.split(text)
        if len(statements) != 1:
            raise FieldError("sql", UserError(f"send one statement, not {len(statements)}"))
        with _placed(text):
            yield statements[0]
    except TierKVError as error:
        error.hint = in_body(error.hint)
        raise StatementError(error) from error


def in_body(hint: str) -> str:
    """Rewrite a hint to SET something as a field of the body: sessions end with their request."""

    def as_field(found: re.Match[str]) -> str:
        value = found[2] if found[2].isdigit() else '"' + found[2].strip("'") + '"'
        verb = "Put" if found.start() == 0 else "put"
        return f'{verb} "settings": {{"{found[1]}": {value}}} into the body'

    return _SET.sub(as_field, hint)


@contextmanager
def _placed(sql: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if error.position:
            error.position += statement_spans(sql)[0][0]
        raise


def _line(value: Mapping[str, Any]) -> bytes:
    return _to_json(value) + b"\n"


LINES: Final[Framing[bytes]] = Framing(
    media_type=NDJSON,
    chunk=bytes,
    error=_line,
    # White space before the next object: an empty line would break simple readers.
    keep_alive=b" ",
    done=b"",
)


def _whole(result: StatementResult) -> bytes:
    columns = _columns(result.columns)
    return _to_json(
        {
            "command_tag": result.command_tag,
            "columns": columns,
            "rows": result.rows,
            "notices": _notices(result),
        }
    )


def _ending(result: StatementResult) -> dict[str, Any]:
    return {"command_tag": result.command_tag, "notices": _notices(result)}


def _columns(columns: Sequence[Column] | None) -> list[dict[str, str]]:
    return [{"name": c.name, "type": c.type_name} for c in columns or ()]


def _notices(result: StatementResult) -> list[dict[str, str]]:
    return [
        {"severity": n.severity, "message": n.message, "sqlstate": n.sqlstate}
        for n in result.notices
    ]


def _to_json(value: Mapping[str, Any]) -> bytes:
    return to_json(value, bytes_mode="base64", inf_nan_mode="strings", fallback=str)
