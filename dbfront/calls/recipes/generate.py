"""``ai_generate``, ``ai_generate_json`` and ``ai_generate_detail``: one question, one answer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tierkv.dbfront.calls.recipes.asking import ask_model
from tierkv.dbfront.calls.recipes.recipe import Ask, Order, Recipe
from tierkv.dbfront.contracts import TextAnswer
from tierkv.kvcore.errors import RowLevelError, TierKVError
from tierkv.kvcore.request import FinishReason
from tierkv.sql.text.exact_json import exact_value


def generate(order: Order) -> Recipe:
    """Return the answer's text."""
    (answer,) = yield Ask((ask_model(order, order.call.text("prompt")),))
    return answer.text


def generate_json(order: Order) -> Recipe:
    """Return the JSON value of an answer held to a schema."""
    call = order.call
    asked = ask_model(order, call.text("prompt"), json_schema=call.text("schema"))
    (answer,) = yield Ask((asked,))
    return parsed_json(answer)


def generate_detail(order: Order) -> Recipe:
    """Return the answer with what it cost."""
    asked = ask_model(order, order.call.text("prompt"))
    (answer,) = yield Ask((asked,))
    return {
        "value": answer.text,
        "error": None,
        "error_code": None,
        "model": answer.model or asked.model,
        "finish_reason": answer.finish_reason.value,
        "prompt_tokens": answer.usage.prompt_tokens,
        "cached_tokens": answer.usage.hit_tokens.total,
        "completion_tokens": answer.usage.completion_tokens,
        "ttft_ms": 1000 * answer.ttft_s,
        "latency_ms": 1000 * answer.total_s,
    }


def failed_detail(order: Order, error: TierKVError) -> dict[str, Any]:
    """Return what ``ai_generate_detail`` answers for a call that failed."""
    return {
        "value": None,
        "error": error.message,
        "error_code": error.sqlstate,
        "model": order.call.model or order.defaults.model,
        "finish_reason": None,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
        "ttft_ms": None,
        "latency_ms": None,
    }


def parsed_json(answer: TextAnswer) -> Any:
    """Return an answer's JSON value.

    Raises:
        RowLevelError: it was cut before its end.
    """
    cut = answer.finish_reason is FinishReason.LENGTH
    with suppress(ValueError):
        value = exact_value(answer.text)
        # Of a number that was cut, digits may be missing.
        if not cut or isinstance(value, bool) or not isinstance(value, int | float):
            return value
    raise RowLevelError(
        "the JSON answer was cut at max_tokens" if cut else "the answer is not JSON",
        hint="Raise max_tokens, or ask for less." if cut else "",
    )
