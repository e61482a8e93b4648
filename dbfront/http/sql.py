"""POST /v1/sql: one statement in, columns and rows as JSON out.

For scripts that have curl and no database driver; the statement runs in a session of its own.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from dbfront.contracts import ClientInfo, SqlServer, StatementResult
from dbfront.http.schema import FieldError, SqlBody, read_body
from dbfront.http.services import Services, tenant_of, until_disconnect
from kvcore.errors import UserError


def sql_router(services: Services, sql: SqlServer) -> APIRouter:
    """Make the endpoint."""
    router = APIRouter()

    @router.post("/v1/sql")
    async def run_sql(request: Request) -> Response:
        body = await read_body(request, SqlBody)
        client = ClientInfo(user=tenant_of(request), application_name="http")
        result = await until_disconnect(request, _run(sql, client, body))
        return Response(_to_json(result), media_type="application/json")

    return router


async def _run(sql: SqlServer, client: ClientInfo, body: SqlBody) -> StatementResult:
    session = await sql.open_session(client)
    try:
        statements = session.split(body.sql)
        if len(statements) != 1:
            raise FieldError("sql", UserError(f"send one statement, not {len(statements)}"))
        return await session.execute(statements[0], body.params)
    finally:
        await session.close()


def _to_json(result: StatementResult) -> bytes:
    columns = [{"name": c.name, "type": c.type_name} for c in result.columns or ()]
    notices = [
        {"severity": n.severity, "message": n.message, "sqlstate": n.sqlstate}
        for n in result.notices
    ]
    body = {
        "command_tag": result.command_tag,
        "columns": columns,
        "rows": result.rows,
        "notices": notices,
    }
    return to_json(body, bytes_mode="base64", inf_nan_mode="strings", fallback=str)
