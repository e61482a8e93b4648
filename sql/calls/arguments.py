"""Valid argument values of AI functions, and the canonical form used to compare each value.

Constant arguments pass ``checked_value`` when a statement is planned, other arguments when the
engine sends a row. Equal values must have equal forms: each distinct call has one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.sql.calls.extract_schema import check_fields
from tierkv.sql.calls.functions import CONTEXT, DOCUMENTS, SETTINGS, AiFunction, ArgumentKind
from tierkv.sql.calls.options import parse_options
from tierkv.sql.text.exact_json import exact_argument, exact_text

Value = str | tuple[str, ...] | CallOptions | None
"""Text, JSON text, a list of text, or options; None is NULL."""

CATEGORIES: Final = "categories"
SCHEMA: Final = "schema"

_HINTS: Final = {
    SCHEMA: 'Write a JSON Schema such as \'{"type": "object", "properties": '
    '{"city": {"type": "string"}}}\'; ai_extract also takes [\'city\', \'order\'].',
    CONTEXT: "Write context => {'product': name, 'city': city}.",
}


class NotTextError(Exception):
    """A constant that only the engine can convert to the argument's type."""


def checked_value(function: AiFunction, name: str, value: Any) -> Value:
    """Check an argument and return its canonical form.

    Args:
        function: the called function.
        name: the parameter.
        value: value from a literal or from JSON.

    Raises:
        UdfArgumentError: the value can't be used; the message does not name the function.
        NotTextError: text is required, but the value is a number or list.
    """
    kind = function.parameter(name).kind
    if value is None:
        return None
    if kind is ArgumentKind.TEXT:
        return _text(name, value)
    if kind is ArgumentKind.TEXTS:
        return _texts(name, value)
    if name == "options":
        return parse_options(value)
    return _json(function, name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        if name in SETTINGS:
            raise UdfArgumentError(f"{name} must be text")
        raise NotTextError
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        raise NotTextError  # The engine's own text for a list.
    if not isinstance(value, list) or any(isinstance(item, list | dict) for item in value):
        raise UdfArgumentError(
            f"{name} must be a list of text",
            hint=f"Write {name} => ['...', '...'] (PostgreSQL: ARRAY['...']), or name a column "
            "of lists.",
        )
    is_text = all(isinstance(item, str | None) for item in value)
    if name == CATEGORIES and is_text:
        return _categories(value)
    kept = tuple(stripped for item in value if item is not None and (stripped := str(item).strip()))
    if name == DOCUMENTS and len(kept) > limits.MAX_CHUNKS:
        raise UdfArgumentError(
            f"{len(kept)} documents were given, at most {limits.MAX_CHUNKS} are allowed"
        )
    if not is_text:
        raise NotTextError  # Engines write numbers and booleans differently.
    return kept


def _categories(value: list[Any]) -> tuple[str, ...]:
    labels = tuple("" if item is None else str(item).strip() for item in value)
    if not labels:
        raise UdfArgumentError(
            "the list of categories is empty", hint="Give at least two, such as ['spam', 'other']."
        )
    if "" in labels:
        raise UdfArgumentError(
            "a category is NULL or empty", hint="Leave it out, or give it a name such as 'other'."
        )
    twice = next((label for at, label in enumerate(labels) if label in labels[:at]), None)
    if twice is not None:
        raise UdfArgumentError(
            f'the category "{twice}" is given twice', hint="Name each category once."
        )
    if len(labels) > limits.MAX_LABELS:
        raise UdfArgumentError(
            f"{len(labels)} categories were given, at most {limits.MAX_LABELS} are allowed"
        )
    return labels


def _json(function: AiFunction, name: str, value: Any) -> str | None:
    try:
        value = _decoded(value)
        if value is None:
            return None
        if name == SCHEMA:
            _check_schema(function, value)
        return exact_text(_context(value) if name == CONTEXT else value)
    except ValueError as error:
        raise UdfArgumentError(f"{name} is not JSON: {error}", hint=_HINTS[name]) from None


def _decoded(value: Any) -> Any:
    """Decode JSON text, also text inside JSON text from a converted text column."""
    for _ in range(2):
        if isinstance(value, str):
            value = exact_argument(value)
    return value


def _context(value: Any) -> dict[str, str]:
    """Return the fields as text, without NULL fields."""
    if not isinstance(value, Mapping):
        raise UdfArgumentError(
            f"context must be a JSON object, not {type(value).__name__}",
            hint=_HINTS[CONTEXT],
        )
    fields = {
        key: item if isinstance(item, str) else exact_text(item)
        for key, item in value.items()
        if item is not None
    }
    if len(fields) > limits.MAX_CONTEXT_FIELDS:
        raise UdfArgumentError(
            f"{len(fields)} fields were given, at most {limits.MAX_CONTEXT_FIELDS} are allowed",
            hint="Put what belongs together into one field of context.",
        )
    return fields


def _check_schema(function: AiFunction, value: Any) -> None:
    takes_fields = function.canonical == "ai_extract"
    if not value or not isinstance(value, (Mapping, list) if takes_fields else Mapping):
        empty = ", and not empty" * (value in ({}, []))
        raise UdfArgumentError(
            f"schema must be a JSON object{' or a list of names' * takes_fields}{empty}",
            hint=_HINTS[SCHEMA],
        )
    if takes_fields:
        check_fields(value)
    size = len(exact_text(value))
    if size > limits.MAX_SCHEMA_CHARS:
        raise UdfArgumentError(
            f"the schema has {size} characters, at most {limits.MAX_SCHEMA_CHARS} are allowed"
        )
