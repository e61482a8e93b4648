"""The ``tierkv.*`` session settings: names, types, defaults, and the statements that change them.

Pure: a session holds the values (dbfront/statement/settings.py), this file knows what they may
be. PostgreSQL accepts two-part names in SET itself, so clients and drivers send these
statements unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlError, SqlSyntaxError, UserError
from tierkv.kvcore.request import BlendSelector
from tierkv.sql.calls.field_reorder import FieldReorder
from tierkv.sql.text.lexer import Token, TokenKind, string_value
from tierkv.sql.text.suggest import did_you_mean

SettingValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting: its default, what it means, and how text becomes a value."""

    name: str
    default: SettingValue
    description: str
    parse: Callable[[str], SettingValue]


@dataclass(frozen=True, slots=True)
class SettingCommand:
    """A SET, SHOW or RESET of a tierkv setting.

    Attributes:
        verb: ``SET``, ``SHOW`` or ``RESET``.
        name: full name such as ``tierkv.model``; ``all`` for SHOW/RESET of everything.
        value: text of the new value; None in SET means DEFAULT.
        local: SET LOCAL: until the transaction ends.
    """

    verb: str
    name: str
    value: str | None = None
    local: bool = False


def show_value(value: SettingValue) -> str:
    """Return a setting's value the way SHOW prints it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else str(value)


def setting_spec(name: str) -> SettingSpec:
    """Look a setting up.

    Raises:
        SqlError: 42704, with the nearest known name.
    """
    spec = SETTINGS.get(name.lower())
    if spec is None:
        raise SqlError(
            f'unrecognized configuration parameter "{name}"',
            sqlstate="42704",
            hint=did_you_mean(name, SETTINGS),
        )
    return spec


def parse_setting(name: str, text: str) -> SettingValue:
    """Turn the text of a SET into a value.

    Raises:
        SqlError: 42704 for an unknown name.
        UserError: 22023 for a value that can't be used.
    """
    spec = setting_spec(name)
    try:
        return spec.parse(text)
    except ValueError as error:
        shown = f'invalid value for parameter "{spec.name}": "{text}"'
        raise UserError(f"{shown}; it {error}") from None


def setting_command(tokens: list[Token]) -> SettingCommand | None:
    """Recognise SET, SHOW and RESET of a ``tierkv.`` setting; None for anything else."""
    words = [token.upper for token in tokens]
    verb = words[0] if words else ""
    if verb not in ("SET", "SHOW", "RESET"):
        return None
    at = 2 if verb == "SET" and words[1:2] and words[1] in ("SESSION", "LOCAL", "GLOBAL") else 1
    if words[at : at + 2] != ["TIERKV", "."] or len(tokens) < at + 3:
        return None
    name = f"tierkv.{tokens[at + 2].text.lower()}"
    if verb != "SET":
        if len(tokens) > at + 3:
            raise SqlSyntaxError(f"{verb} takes one name", position=tokens[at + 3].start + 1)
        return SettingCommand(verb, name)
    value = tokens[at + 4 :]
    if words[at + 3 : at + 4] not in (["="], ["TO"]) or not value:
        raise SqlSyntaxError(f"write SET {name} = value", position=tokens[at].start + 1)
    return SettingCommand(verb, name, _set_value(value), words[1] == "LOCAL")


def _set_value(tokens: list[Token]) -> str | None:
    if len(tokens) == 1:
        if tokens[0].kind is TokenKind.STRING:
            return string_value(tokens[0])
        if tokens[0].upper == "DEFAULT":
            return None
        return tokens[0].text.strip('"')
    if len(tokens) == 2 and tokens[0].text == "-" and tokens[1].kind is TokenKind.NUMBER:
        return f"-{tokens[1].text}"
    raise SqlSyntaxError("SET takes one value; quote it", position=tokens[1].start + 1)


def _text(text: str) -> str:
    return text


def _name(text: str) -> str:
    if text and not re.fullmatch(limits.NAME_PATTERN, text):
        raise ValueError("must be a model name")
    return text


def _tag(text: str) -> str:
    if len(text) > limits.MAX_NAME_CHARS:
        raise ValueError(f"must not have more than {limits.MAX_NAME_CHARS} characters")
    return text


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(filter(None, choices))}")
        return text.lower()

    return parse


def _on_off(text: str) -> bool:
    value = _ON_OFF.get(text.lower())
    if value is None:
        raise ValueError("must be on or off")
    return value


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}")
        return number

    return parse


def _seed(text: str) -> int | None:
    return None if text == "" else _whole(-(1 << 63), (1 << 63) - 1)(text)


def _real(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low:g} and {high:g}")
        return number

    return parse


def _ratio(text: str) -> float | None:
    if text == "":
        return None
    try:
        number = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not 0 < number <= 1:
        raise ValueError("must be above 0, up to 1")
    return number


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a duration such as 500ms, 30s or 2min (0 is no limit)")
    return float(match[1]) * _DURATION_UNIT_S[match[2] or "ms"]


_ON_OFF: Final = {"on": True, "true": True, "1": True, "yes": True} | {
    "off": False,
    "false": False,
    "0": False,
    "no": False,
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h)?")
_MOST_TOKENS: Final = (1 << 63) - 1
_DURATION_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}

SETTINGS: Final[dict[str, SettingSpec]] = {
    spec.name: spec
    for spec in (
        SettingSpec("tierkv.model", "", "model of calls that name none; empty: default", _name),
        SettingSpec("tierkv.system_prompt", "", "system prompt of calls that have none", _text),
        SettingSpec("tierkv.temperature", 0.0, "sampling temperature; 0 is greedy", _real(0, 2)),
        SettingSpec(
            "tierkv.max_tokens",
            512,
            "most tokens of an answer",
            _whole(1, limits.MAX_COMPLETION_TOKENS),
        ),
        SettingSpec("tierkv.seed", None, "sampling seed; empty draws one", _seed),
        SettingSpec(
            "tierkv.on_error",
            "auto",
            "a failed call: null, error, or auto (null in reads, error in writes)",
            _choice("auto", "null", "error"),
        ),
        SettingSpec(
            "tierkv.max_calls",
            1000,
            "most distinct calls of a statement; 0 is no limit",
            _whole(0, limits.MAX_CALLS_PER_STATEMENT),
        ),
        SettingSpec(
            "tierkv.notice_calls",
            1000,
            "a statement with more distinct calls says so, with an estimate; 0: none does",
            _whole(0, limits.MAX_CALLS_PER_STATEMENT),
        ),
        SettingSpec(
            "tierkv.request_timeout", 0.0, "time for one call, such as 30s; 0: none", _seconds
        ),
        SettingSpec(
            "tierkv.query_tag", "", "shown with the session's statements in the statistics", _tag
        ),
        SettingSpec(
            "tierkv.max_retries",
            0,
            "tries after the first of a call whose time ran out or whose node was lost",
            _whole(0, limits.MAX_RETRIES),
        ),
        SettingSpec(
            "tierkv.max_prompt_tokens",
            0,
            "most prompt tokens a statement may send; 0 is no limit",
            _whole(0, _MOST_TOKENS),
        ),
        SettingSpec(
            "tierkv.max_completion_tokens",
            0,
            "most tokens a statement may have generated; 0 is no limit",
            _whole(0, _MOST_TOKENS),
        ),
        SettingSpec(
            "tierkv.priority",
            0,
            "of calls that have none; lower runs earlier",
            _whole(-limits.MAX_PRIORITY, limits.MAX_PRIORITY),
        ),
        SettingSpec(
            "tierkv.bulk_calls",
            32,
            "a statement that asks more at once lets others go first; 0: none does",
            _whole(0, limits.MAX_CALLS_PER_STATEMENT),
        ),
        SettingSpec(
            "tierkv.dry_run",
            False,
            "count calls and prompt tokens, send nothing, answer NULL",
            _on_off,
        ),
        SettingSpec("tierkv.prefix_order", True, "run calls in order of shared prefix", _on_off),
        SettingSpec(
            "tierkv.plan",
            True,
            "with it: runs of shared prefix go to one node each; what pending calls need is kept",
            _on_off,
        ),
        SettingSpec(
            "tierkv.field_reorder",
            FieldReorder.STATS.value,
            f"how the fields of context are ordered in a prompt: {', '.join(FieldReorder)}",
            _choice(*FieldReorder),
        ),
        SettingSpec(
            "tierkv.execution",
            "auto",
            "auto; stream: rows as they come, or an error; replay: all calls as one batch",
            _choice("auto", "stream", "replay"),
        ),
        SettingSpec("tierkv.max_concurrency", 64, "calls in flight at once", _whole(1, 4096)),
        SettingSpec(
            "tierkv.max_error_ratio",
            1.0,
            "share of failed calls above which a statement fails although on_error is null",
            _real(0, 1),
        ),
        SettingSpec("tierkv.cache", True, "read and publish KV; off for comparison", _on_off),
        SettingSpec(
            "tierkv.blend",
            True,
            "reuse documents at any position where the namespace allows it; off: exact answers",
            _on_off,
        ),
        SettingSpec(
            "tierkv.recompute_ratio",
            None,
            "least share of reused document tokens computed again; empty: the namespace's",
            _ratio,
        ),
        SettingSpec(
            "tierkv.selector",
            "",
            f"which of them: {', '.join(BlendSelector)}; empty: the namespace's",
            _choice("", *BlendSelector),
        ),
        SettingSpec(
            "tierkv.chunk_separator",
            "",
            "what stands between two of these in a prompt is a document; empty: nothing",
            _text,
        ),
    )
}
