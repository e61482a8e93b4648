"""The two kinds of schema for ``ai_extract``: fields to ask for, or a JSON Schema.

Fields are a list of names, or an object of names and questions. Anything else is a JSON Schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import UdfArgumentError

_JSON_TYPES: Final = frozenset(
    {"object", "array", "string", "number", "integer", "boolean", "null"}
)


def field_questions(schema: Any) -> dict[str, str] | None:
    """Return the question for each field; None for a JSON Schema.

    An object lists fields if all values are texts, unless ``type`` is a JSON type or a key begins
    with ``$``, for example ``$ref``.
    """
    if isinstance(schema, list):
        return {name: f"Extract the {name}." for name in schema}
    if not isinstance(schema, Mapping) or not all(isinstance(v, str) for v in schema.values()):
        return None
    if schema.get("type") in _JSON_TYPES or any(key.startswith("$") for key in schema):
        return None
    return dict(schema)


def check_fields(schema: Any) -> None:
    """Refuse invalid fields; a JSON Schema is checked where models are.

    Raises:
        UdfArgumentError: no fields, too many, a duplicate, or a field without name or question.
    """
    if isinstance(schema, list):
        _check_names(schema)
    questions = field_questions(schema)
    if questions is None:
        return
    if len(questions) > limits.MAX_EXTRACTED_FIELDS:
        raise UdfArgumentError(
            f"{len(questions)} fields were given, at most {limits.MAX_EXTRACTED_FIELDS} are "
            "allowed",
            hint="Each is a question of its own; a JSON Schema asks for all at once.",
        )
    empty = next((name for name, question in questions.items() if not question.strip()), None)
    if empty is not None:
        raise UdfArgumentError(f'the field "{empty}" has no question')


def _check_names(names: list[Any]) -> None:
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise UdfArgumentError(
            "a list of fields must be a list of names", hint="Write schema => '[\"city\"]'."
        )
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise UdfArgumentError(f'the field "{twice}" is given twice')
