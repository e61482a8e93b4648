"""GET /v1/models and /v1/models/{id}: what live nodes serve.

``max_model_len`` is vLLM's addition, which gateways read.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from tierkv.dbfront.http.services import Services
from tierkv.kvcore.errors import UnknownModelError
from tierkv.kvcore.node import ModelInfo


def models_router(services: Services) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter()

    @router.get("/v1/models", summary="Served models")
    async def list_models() -> dict[str, Any]:
        models = await services.generator.models()
        return {"object": "list", "data": [_model_json(services, model) for model in models]}

    @router.get("/v1/models/{model_id:path}", summary="One served model")
    async def get_model(model_id: str) -> dict[str, Any]:
        models = await services.generator.models()
        for model in models:
            if model.name == model_id:
                return _model_json(services, model)
        names = ", ".join(model.name for model in models)
        raise UnknownModelError(
            f"no model {model_id[:140]!r} is served here", hint=f"served models: {names}"
        )

    return router


def _model_json(services: Services, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": services.created(),
        "owned_by": "tierkv",
        "max_model_len": model.context_tokens,
    }
