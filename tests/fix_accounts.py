"""Factories of the events that the front's accounts add up."""

from __future__ import annotations

from typing import Any

from tests.fix_scheduler import make_model
from tests.fix_scheduler import make_request as make_generate_request
from tierkv.dbfront.accounts.ended_call import CallCost, CallEnd, EndedCall, ModelRequest
from tierkv.dbfront.contracts import PreparedCall, TextAnswer, TextCall
from tierkv.kvcore.errors import RowLevelError
from tierkv.kvcore.request import FinishReason, HitTokens, Usage

USAGE = Usage(100, 7, HitTokens(l1=16, l3=32), 48, blended_tokens=5, recomputed_tokens=2)


def make_answer(text: str = "yes", **changes: Any) -> TextAnswer:
    known: dict[str, Any] = {
        "finish_reason": FinishReason.STOP,
        "usage": USAGE,
        "ttft_s": 0.25,
        "total_s": 1.5,
        "node_id": "n1",
    }
    return TextAnswer(text, **known | changes)


def make_call(*answers: TextAnswer, **changes: Any) -> EndedCall:
    known: dict[str, Any] = {
        "statement": "s1",
        "function": "ai_generate",
        "model": "tiny",
        "end": CallEnd.STOP,
        "cost": CallCost.of(answers),
        "form": 0,
    }
    return EndedCall(**known | changes)


def make_failed_call(message: str = "no", **changes: Any) -> EndedCall:
    known = {"end": CallEnd.FAILED, "error": RowLevelError(message), "is_null": True}
    return make_call(**known | changes)


def make_request(
    request_id: str = "req-1",
    *,
    model: str = "tiny",
    origin: str = "",
    json_schema: str = "",
    **changes: Any,
) -> ModelRequest:
    call = TextCall(tenant="team", origin=origin, json_schema=json_schema)
    request = make_generate_request(request_id, model=model)
    known: dict[str, Any] = {
        "end": CallEnd.STOP,
        "usage": USAGE,
        "ttft_s": 0.25,
        "total_s": 1.5,
        "node_id": "n1",
    }
    return ModelRequest(PreparedCall(call, make_model(model), request), 0.0, **known | changes)
