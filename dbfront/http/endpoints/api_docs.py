"""GET /docs and GET /openapi.json: the API described by its own models.

FastAPI makes the document; this module adds the bodies, which the endpoints parse themselves. The
page is made from the document and needs neither scripts nor the Internet. Both endpoints ask for a
key wherever the other endpoints do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tierkv.dbfront.http.completion_bodies import ChatBody, CompletionBody
from tierkv.dbfront.http.endpoints.embeddings import EmbeddingBody
from tierkv.dbfront.http.endpoints.kv import KvBody, PinBody
from tierkv.dbfront.http.endpoints.sql import SqlBody
from tierkv.dbfront.http.endpoints.tokens import DetokenizeBody, TokenizeBody
from tierkv.dbfront.http.responses.conversations_router import (
    ConversationBody,
    ConversationChange,
    ItemsBody,
)
from tierkv.dbfront.http.responses.response_body import ResponseBody

_REF: Final = "#/components/schemas/{model}"
_BODIES: Final[Mapping[str, type[BaseModel]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/kv/prefetch": KvBody,
    "/v1/kv/pin": PinBody,
    "/v1/kv/retain": PinBody,
    "/v1/kv/demote": KvBody,
    "/v1/kv/locate": KvBody,
    "/v1/kv/forget": KvBody,
    "/v1/responses": ResponseBody,
    "/v1/conversations": ConversationBody,
    "/v1/conversations/{conversation_id}": ConversationChange,
    "/v1/conversations/{conversation_id}/items": ItemsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/sql": SqlBody,
}
_STYLE: Final = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.2em 1em .2em 0;"
    "vertical-align:top;border-bottom:1px solid #ddd}"
    "pre{background:#f4f4f4;padding:.8em;overflow-x:auto}code{white-space:nowrap}"
)


def docs_router(app: FastAPI) -> APIRouter:
    """Create the endpoints; each request describes the current routes of ``app``."""
    router = APIRouter()

    @router.get("/openapi.json", summary="This API as an OpenAPI document")
    async def openapi() -> Response:
        return JSONResponse(describe(app))

    @router.get("/docs", summary="This API as a page")
    async def docs() -> Response:
        return HTMLResponse(page(describe(app)))

    return router


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an app, including the bodies."""
    document = get_openapi(
        title="TierKV",
        version="1",
        description="LLM inference inside the database, on a KV cache that all machines share.",
        routes=app.routes,
    )
    served = {path: kind for path, kind in _BODIES.items() if path in document["paths"]}
    _, models = models_json_schema(
        [(kind, "validation") for kind in served.values()], ref_template=_REF
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(models.get("$defs", {}))
    for path, kind in served.items():
        content = {"schema": {"$ref": _REF.format(model=kind.__name__)}}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": content},
        }
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def page(document: Mapping[str, Any]) -> str:
    """Write an OpenAPI document as an HTML page."""
    parts = [f"<h1>{escape(document['info']['title'])}</h1>"]
    parts.append(f"<p>{escape(document['info']['description'])}</p>")
    parts.append(
        "<p>Where keys are configured, send <code>Authorization: Bearer KEY</code>. "
        '<a href="openapi.json">openapi.json</a> is this page for programs.</p>'
    )
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in ("get", "post"):
                parts += _operation(document, method.upper(), path, operation)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>TierKV API</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>"
    )


def _operation(
    document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]
) -> list[str]:
    parts = [f"<h2><code>{method} {escape(path)}</code></h2>"]
    parts.append(f"<p>{escape(operation.get('summary', ''))}</p>")
    kind = _BODIES.get(path)
    if kind is None:
        return parts
    schema = document["components"]["schemas"][kind.__name__]
    parts.append("<table><tr><th>field</th><th>type</th><th>meaning</th></tr>")
    for name, field in schema["properties"].items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        parts.append(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
            f"<td>{escape(field.get('description', ''))}{needed}</td></tr>"
        )
    example = json.dumps(schema["examples"][0], indent=2)
    parts.append(
        "</table><pre>curl -s http://HOST:PORT"
        f"{escape(path)} -H 'Content-Type: application/json' -d '{escape(example)}'</pre>"
    )
    return parts


def _type(field: Mapping[str, Any]) -> str:
    """Name the types of a field; null, which marks an optional field, is left out."""
    kinds = [_type(part) for part in field.get("anyOf", ())]
    if kinds:
        return " or ".join(kind for kind in kinds if kind != "null")
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
