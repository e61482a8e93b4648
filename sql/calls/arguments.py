"""Valid argument values of AI functions, and the canonical form used to compare each value.

Constant arguments pass ``checked_value`` when a statement is planned, other arguments when the
engine sends a row. Equal values must have equal forms: each distinct call has one answer. The keys
of ``options`` are those of the table in kvcore/call_options.py; an option that is not given is
None, and the session's setting applies. The schema of ``ai_extract`` is fields to ask for (a list
of names as JSON or as PostgreSQL's array, or an object of names and questions) or a JSON Schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.call_options import OPTIONS, CallOptions
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.value_kinds import Flag
from tierkv.sql.calls.functions import CONTEXT, DOCUMENTS, SETTINGS, AiFunction, ArgumentKind
from tierkv.sql.text.durations import seconds_of
from tierkv.sql.text.exact_values import exact_argument, exact_text, parse_array
from tierkv.sql.text.suggest import did_you_mean

Value = str | tuple[str, ...] | CallOptions | None
"""Text, JSON text, a list of text, or options; None is NULL."""

CATEGORIES: Final = "categories"
SCHEMA: Final = "schema"
KEEP: Final = "keep"
SESSION: Final = "session"
_NAME: Final = re.compile(limits.NAME_PATTERN)

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
    if name == KEEP:
        return _time(value)
    if name == SESSION:
        return _session(value)
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


def _session(value: Any) -> str:
    name = str(value)
    if not _NAME.fullmatch(name):
        raise UdfArgumentError(
            f"session {name[:140]!r} is not a valid name",
            hint=f"Use 1 to {limits.MAX_NAME_CHARS} letters, digits and _ . : - /, with a letter, "
            "a digit or _ first.",
        )
    return name


def _time(value: Any) -> str:
    seconds = seconds_of(value) if isinstance(value, str) else None
    if seconds is None or seconds > limits.MAX_PIN_S:
        raise UdfArgumentError(
            f"keep must be a time up to a year, not {str(value)[:40]!r}",
            hint="Write '1 hour' or INTERVAL '1 day'; '0 s' ends the pin.",
        )
    return str(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        raise NotTextError  # The engine's own text for a list.
    if not isinstance(value, list) or any(isinstance(item, list | dict) for item in value):
        raise UdfArgumentError(
            f"{name} must be a list of text",
            hint=f"Write {name} => ['...', '...'] (PostgreSQL: ARRAY['...']), or give a column "
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
        value = _decoded(value, _json_or_array if _takes_fields(function, name) else exact_argument)
        if value is None:
            return None
        if name == SCHEMA:
            _check_schema(function, value)
        return exact_text(_context(value) if name == CONTEXT else value)
    except ValueError as error:
        raise UdfArgumentError(f"{name} is not JSON: {error}", hint=_HINTS[name]) from None


def _decoded(value: Any, decode: Callable[[str], Any]) -> Any:
    """Decode JSON text, also text inside JSON text from a converted text column."""
    for _ in range(2):
        if isinstance(value, str):
            value = decode(value)
    return value


def _json_or_array(text: str) -> Any:
    """Decode JSON, or a list of names as drivers send a list to a parameter without a type.

    No text is both, except for ``{}``, which is empty either way.
    """
    try:
        return exact_argument(text)
    except ValueError:
        with suppress(ValueError):
            return parse_array(text)
        raise


def _takes_fields(function: AiFunction, name: str) -> bool:
    return function.parameter(name).kind is ArgumentKind.FIELDS


def _kind(value: Any) -> str:
    """Return the JSON name of a value that is no object, with an article."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list | tuple) else "a number"


def _context(value: Any) -> dict[str, str]:
    """Return the fields as text, without NULL fields."""
    if not isinstance(value, Mapping):
        raise UdfArgumentError(
            f"context must be a JSON object, not {_kind(value)}",
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
            hint="Combine related values into one field of context.",
        )
    return fields


def _check_schema(function: AiFunction, value: Any) -> None:
    takes_fields = _takes_fields(function, SCHEMA)
    if not value or not isinstance(value, (Mapping, list) if takes_fields else Mapping):
        empty = ", and not empty" * (value in ({}, []))
        raise UdfArgumentError(
            f"schema must be a JSON object{' or a list of names' * takes_fields}{empty}",
            hint=_HINTS[SCHEMA],
        )
    if takes_fields:
        _check_fields(value)
    size = len(exact_text(value))
    if size > limits.MAX_SCHEMA_CHARS:
        raise UdfArgumentError(
            f"the schema has {size} characters, at most {limits.MAX_SCHEMA_CHARS} are allowed"
        )


def parse_options(value: Any) -> CallOptions:
    """Check an options object.

    Args:
        value: a mapping, a JSON text of a mapping, or None for no options.

    Raises:
        UdfArgumentError: not a JSON object, an unknown key, or a value out of range.
    """
    if value is None:
        return CallOptions()
    for _ in range(2):  # A text column arrives as JSON of its text.
        if isinstance(value, str):
            value = _options_from_json(value)
    if value is None:
        return CallOptions()
    if not isinstance(value, Mapping):
        raise UdfArgumentError(
            f"options must be a JSON object, not {_kind(value)}",
            hint="Write options => '{\"max_tokens\": 64}'.",
        )
    checked = {key: _checked_option(key, item) for key, item in value.items()}
    return CallOptions(
        **{_OPTION_FIELDS[key]: item for key, item in checked.items() if key in _OPTION_FIELDS}
    )


def _options_from_json(text: str) -> Any:
    try:
        return exact_argument(text)
    except ValueError as error:
        raise UdfArgumentError(
            f"options is not JSON: {error}", hint="Write options => '{\"max_tokens\": 64}'."
        ) from None


def _checked_option(key: str, value: Any) -> Any:
    check = _OPTION_CHECKS.get(key)
    if check is None:
        raise UdfArgumentError(f'unknown option "{key}"', hint=did_you_mean(key, _OPTION_CHECKS))
    if value is None:
        return None
    try:
        return check(value)
    except ValueError as error:
        shown = json.dumps(value, default=str)
        raise UdfArgumentError(f'option "{key}" {error}, got {shown}') from None


def _dedup(value: Any) -> None:
    if not Flag().from_json(value):
        raise UdfArgumentError(
            "equal calls of a statement always have one answer; dedup can't be false",
            hint="To get a separate sample per row, put a key of the row into seed, such as "
            "options => {'temperature': 1, 'seed': id}.",
        )


def _response_format(value: Any) -> None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return
    if kind in ("json_object", "json_schema"):
        raise UdfArgumentError(
            'option "response_format" can\'t request JSON, which is another result type',
            hint="Call ai_generate_json(prompt, schema).",
        )
    raise ValueError('must be {"type": "text"}')


_OPTION_FIELDS: Final = {option.sql: option.name for option in OPTIONS if option.sql}
_OPTION_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    option.sql: option.kind.from_json for option in OPTIONS if option.sql and option.kind
} | {"dedup": _dedup, "response_format": _response_format}
"""By key. The last two accept a single value, which is the default behaviour anyway."""

OPTION_NAMES: Final = tuple(_OPTION_CHECKS)


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


def _check_fields(schema: Any) -> None:
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
            hint="Each field is a separate question; a JSON Schema asks for all fields at once.",
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
