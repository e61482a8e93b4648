"""The ``options`` argument of AI functions: which keys there are and what they may hold.

Both constant options (checked when the statement is planned) and options computed per row come
through ``parse_options``. None means "not given": the session's setting applies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.request import BlendSelector
from tierkv.sql.text.exact_json import exact_argument
from tierkv.sql.text.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; None leaves a value to the session's settings.

    Attributes:
        temperature: 0.0 to 2.0; 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        max_tokens: most completion tokens.
        stop: strings that end the answer.
        seed: makes sampling repeatable.
        cache: False neither reads nor publishes KV.
        timeout_ms: time for this call; 0 is no limit.
        priority: lower runs earlier.
        retries: tries after the first of a call that may pass when tried again.
        blend: False answers exactly although the namespace blends documents; True asks for it.
        recompute_ratio: share of reused document tokens computed again, at least.
        selector: which of them.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    cache: bool | None = None
    timeout_ms: int | None = None
    priority: int | None = None
    retries: int | None = None
    blend: bool | None = None
    recompute_ratio: float | None = None
    selector: BlendSelector | None = None


def parse_options(value: Any) -> CallOptions:
    """Check an options object.

    Args:
        value: a mapping, JSON text of one, or None for no options.

    Raises:
        UdfArgumentError: not a JSON object, an unknown key, or a value out of range.
    """
    if value is None:
        return CallOptions()
    for _ in range(2):  # A column of text comes as JSON of its text.
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
    return CallOptions(**{key: item for key, item in checked.items() if key not in _ONLY_CHECKED})


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


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("must be a number")
        if not low <= value <= high or (open_low and value == low):
            raise ValueError(f"must be in {'(' if open_low else '['}{low:g}, {high:g}]")
        return float(value)

    return check


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("must be a whole number")
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _dedup(value: Any) -> None:
    if not _flag(value):
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


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError("must be a string or a list of strings, none empty")
    if len(strings) > limits.MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {limits.MAX_STOP_STRINGS} strings")
    if any(len(item) > limits.MAX_STOP_STRING_CHARS for item in strings):
        raise ValueError(f"must have strings of at most {limits.MAX_STOP_STRING_CHARS} characters")
    return tuple(strings)


def _selector(value: Any) -> BlendSelector:
    if value not in tuple(BlendSelector):
        raise ValueError(f"must be one of {', '.join(BlendSelector)}")
    return BlendSelector(value)


_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, open_low=True),
    "max_tokens": _integer(1, limits.MAX_COMPLETION_TOKENS),
    "stop": _stop_strings,
    "seed": _integer(-(1 << 63), (1 << 63) - 1),
    "cache": _flag,
    "timeout_ms": _integer(0, 86_400_000),
    "priority": _integer(-limits.MAX_PRIORITY, limits.MAX_PRIORITY),
    "retries": _integer(0, limits.MAX_RETRIES),
    "dedup": _dedup,
    "response_format": _response_format,
    "blend": _flag,
    "recompute_ratio": _number(0, 1, open_low=True),
    "selector": _selector,
}
OPTION_NAMES: Final = tuple(_CHECKS)

_ONLY_CHECKED: Final = frozenset({"dedup", "response_format"})
"""Options with one value that works, which is what happens anyway."""
