"""Probes and /metrics: /livez means that the process answers, /readyz that the front can serve.

Probes need no key and never call a model; a front that is not ready is still alive. A failed
component that a front can serve without (the meta server, one node of several) makes the front
degraded, not unready: otherwise one fault would remove all fronts from a load balancer at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from tierkv.dbfront.http.services import ReadinessCheck, Services

CHECK_TIMEOUT_S = 2.0

_ENDPOINTS = (
    ("POST /v1/chat/completions", "chat, as OpenAI's"),
    ("POST /v1/completions", "plain prompts, as OpenAI's"),
    ("GET  /v1/models", "what is served"),
    ("POST /v1/sql", 'one SQL statement; {"sql": "SELECT 1"}'),
    ("GET  /readyz?verbose", "what works and what does not"),
    ("GET  /metrics", "for Prometheus"),
    ("GET  /v1/scale", "for autoscalers: queues, time to first token, free memory"),
    ("GET  /docs", "this, with fields and examples"),
)

PROBES = frozenset({"/", "/livez", "/readyz", "/health", "/metrics", "/v1/scale"})
"""Paths that a front answers until its end."""

NEEDED = frozenset({"models", "draining"})
"""Checks that are necessary to serve requests; failure of any other check means degraded."""


def health_router(services: Services) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()

    @router.head("/")
    @router.get("/", summary="What is where, as text")
    async def welcome() -> Response:
        return PlainTextResponse(_welcome(services))

    @router.head("/livez")
    @router.get("/livez", summary="The process answers")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @router.head("/readyz")
    @router.get("/readyz", summary="200 while requests can be served")
    @router.head("/health")
    @router.get("/health", summary="The same as /readyz")
    async def readyz(request: Request) -> Response:
        results = await _run_checks(services)
        wrong = {name: reason for name, reason in results.items() if reason}
        failing = {name: reason for name, reason in wrong.items() if name in NEEDED}
        degraded = {name: reason for name, reason in wrong.items() if name not in NEEDED}
        status = "not ready" if failing else "degraded" if degraded else "ready"
        body: dict[str, Any] = {"status": status, "failing": failing}
        if "verbose" in request.query_params:
            body["degraded"] = degraded
            body["checks"] = {name: reason or "ok" for name, reason in results.items()}
        return JSONResponse(body, status_code=503 if failing else 200)

    @router.get("/metrics", summary="Counters for Prometheus")
    async def metrics() -> Response:
        services.metrics.register_models(m.name for m in await services.generator.models())
        others = await services.siblings.ask_all("metrics")
        text, content_type = services.metrics.render(others)
        return Response(text, media_type=content_type)

    @router.get("/v1/scale", summary="For autoscalers: queues, time to first token, memory")
    async def scale() -> Response:
        if services.metrics.scale is None:
            return JSONResponse({"models": [], "pool": {}})
        return JSONResponse(asdict(services.metrics.scale()))

    return router


def _welcome(services: Services) -> str:
    told = [pair for pair in _ENDPOINTS if services.sql is not None or "/v1/sql" not in pair[0]]
    lines = ["TierKV answers here:", "", *(f"  {name:27} {what}" for name, what in told)]
    if port := services.config.sql_port:
        lines += ["", f"PostgreSQL clients connect to port {port}."]
    return "\n".join(lines) + "\n"


async def _run_checks(services: Services) -> dict[str, str]:
    checks: dict[str, ReadinessCheck] = {"models": lambda: _models_served(services)}
    checks.update(services.checks)
    reasons = await asyncio.gather(*(_run_check(check) for check in checks.values()))
    results = dict(zip(checks, reasons, strict=True))
    results["draining"] = "the server is stopping" if services.draining else ""
    return results


async def _run_check(check: ReadinessCheck) -> str:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check()
    except TimeoutError:
        return f"no answer within {CHECK_TIMEOUT_S:g} s"


async def _models_served(services: Services) -> str:
    return "" if await services.generator.models() else "no compute node serves a model"
