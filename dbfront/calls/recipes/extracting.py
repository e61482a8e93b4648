"""``ai_extract``: named fields of a document, one question each, or JSON of a schema at once."""

from __future__ import annotations

import json
from typing import Any, Final

from tierkv.dbfront.calls.recipes.asking import ask_model
from tierkv.dbfront.calls.recipes.generate import parsed_json
from tierkv.dbfront.calls.recipes.recipe import Ask, Order, Recipe
from tierkv.sql.calls.extract_schema import field_questions

_AS_JSON: Final = "Extract the data as JSON."
_NOTHING: Final = frozenset({"", "none", "null", "unknown", "n/a"})
"""Answers, in lower case and without a last stop, that say there is no value."""


def extract(order: Order) -> Recipe:
    """Return the fields as a JSON object."""
    call = order.call
    schema = json.loads(call.text("schema"))
    instruction = call.text("instruction")
    questions = field_questions(schema)
    if questions is None:
        asked = ask_model(
            order,
            call.text("input"),
            question=instruction or _AS_JSON,
            json_schema=call.text("schema"),
        )
        (answer,) = yield Ask((asked,))
        return parsed_json(answer)
    about = f"{call.text('input')}\n{instruction}" if instruction else call.text("input")
    answers = yield Ask(
        tuple(ask_model(order, about, question=question) for question in questions.values())
    )
    return {name: _value(answer.text) for name, answer in zip(questions, answers, strict=True)}


def _value(text: str) -> Any:
    value = text.strip()
    return None if value.lower().rstrip(".") in _NOTHING else value
