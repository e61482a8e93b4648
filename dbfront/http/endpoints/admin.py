"""``/v1/admin/namespaces``: KV namespaces over REST, as CREATE, ALTER and DROP KV NAMESPACE in SQL.

Every key may read; changes need a key of one of ``front.admins``. Bodies have the options of the
SQL statements, and replies have the columns of the view ``tierkv.namespaces``.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import RootModel
from starlette.responses import JSONResponse, Response

from tierkv.dbfront.http.services import Services, caller_of, read_body
from tierkv.dbfront.views.admin import ClusterSource, cluster_rows
from tierkv.sql.cluster_command import ClusterCommand
from tierkv.sql.command_reader import CommandOption
from tierkv.sql.text.suggest import did_you_mean
from tierkv.sql.views import Row


class OptionsBody(RootModel[dict[str, str | bool | int | float | list[str]]]):
    """PUT /v1/admin/namespaces/{name}: options by name; the options left out stay."""


def admin_router(services: Services, cluster: ClusterSource) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter(prefix="/v1/admin/namespaces")

    async def rows() -> list[Row]:
        return await cluster_rows("namespaces", cluster, now_s=services.clock.wall())

    async def row(name: str) -> Row:
        known = await rows()
        for each in known:
            if each["name"] == name:
                return each
        hint = did_you_mean(name, [each["name"] for each in known]) if known else ""
        raise HTTPException(404, f"there is no namespace {name[:128]!r} {hint}".strip())

    @router.get("", summary="All KV namespaces")
    async def list_namespaces() -> Response:
        return JSONResponse({"namespaces": await rows()})

    @router.get("/{name}", summary="One KV namespace")
    async def get_namespace(name: str) -> Response:
        return JSONResponse(await row(name))

    @router.put("/{name}", summary="Make a KV namespace, or change the given options")
    async def put_namespace(name: str, request: Request) -> Response:
        body = await read_body(request, OptionsBody)
        known = {each["name"] for each in await rows()}
        options = tuple(CommandOption(key, _text(value), 0) for key, value in body.root.items())
        command = ClusterCommand("ALTER" if name in known else "CREATE", name, options)
        await cluster.change_cluster(caller_of(request).tenant, command)
        return JSONResponse(await row(name), 200 if name in known else 201)

    @router.delete("/{name}", summary="Remove a KV namespace")
    async def delete_namespace(name: str, request: Request) -> Response:
        await row(name)
        await cluster.change_cluster(caller_of(request).tenant, ClusterCommand("DROP", name))
        return Response(status_code=204)

    return router


def _text(value: Any) -> str:
    """Return an option's value as in SQL."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, list) else str(value)
