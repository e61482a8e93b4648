"""The ``options`` argument of AI functions, defined by the table of kvcore/call_options.py.

Constant options (checked when the statement is planned) and options computed per row both pass
through ``parse_options``. None means "not given": the session's setting applies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from tierkv.kvcore.call_options import OPTIONS, CallOptions
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.value_kinds import Flag
from tierkv.sql.text.exact_json import exact_argument
from tierkv.sql.text.suggest import did_you_mean


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
            value = _from_json(value)
    if value is None:
        return CallOptions()
    if not isinstance(value, Mapping):
        raise UdfArgumentError(
            f"options must be a JSON object, not {type(value).__name__}",
            hint="Write options => '{\"max_tokens\": 64}'.",
        )
    checked = {key: _check(key, item) for key, item in value.items()}
    return CallOptions(**{_FIELDS[key]: item for key, item in checked.items() if key in _FIELDS})


def _from_json(text: str) -> Any:
    try:
        return exact_argument(text)
    except ValueError as error:
        raise UdfArgumentError(
            f"options is not JSON: {error}", hint="Write options => '{\"max_tokens\": 64}'."
        ) from None


def _check(key: str, value: Any) -> Any:
    check = _CHECKS.get(key)
    if check is None:
        raise UdfArgumentError(f'unknown option "{key}"', hint=did_you_mean(key, _CHECKS))
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
            hint="For samples of their own, make the calls differ: put a key of the row into seed, "
            "such as options => {'temperature': 1, 'seed': id}.",
        )


def _response_format(value: Any) -> None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return
    if kind in ("json_object", "json_schema"):
        raise UdfArgumentError(
            'option "response_format" can\'t ask for JSON, which is another type of result',
            hint="Call ai_generate_json(prompt, schema).",
        )
    raise ValueError('must be {"type": "text"}')


_FIELDS: Final = {option.sql: option.name for option in OPTIONS if option.sql}
_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    option.sql: option.kind.from_json for option in OPTIONS if option.sql and option.kind
} | {"dedup": _dedup, "response_format": _response_format}
"""By key. The last two accept a single value, which is the default behaviour anyway."""

OPTION_NAMES: Final = tuple(_CHECKS)
