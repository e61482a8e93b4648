"""The ``tierkv.*`` session settings: names, types, defaults, and statements that change settings.

Pure: a session holds the values (dbfront/statement/settings.py). Settings of calls come from the
table of options (kvcore/call_options.py); settings of sessions and statements are defined here.
PostgreSQL also accepts two-part names in SET, and clients and drivers send these statements
unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.call_options import OPTIONS, OptionSetting, OptionSpec
from tierkv.kvcore.errors import SqlError, SqlSyntaxError, UserError
from tierkv.kvcore.value_kinds import Flag, Number, OneOf, ShareOrOff, Whole
from tierkv.sql.text.lexer import Token, TokenKind, string_value
from tierkv.sql.text.suggest import nearest


class FieldReorder(StrEnum):
    """How the order of the fields of ``context => ...`` in a prompt is chosen.

    The values of ``tierkv.field_reorder``; dbfront/calls/field_order.py does the ordering. OFF
    keeps the order of the call. STATS uses one order for all rows of a call, from statistics of
    these rows.
    """

    OFF = "off"
    STATS = "stats"


_PREFIX: Final = "tierkv."
SettingValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting: default, meaning, and the conversion of text to a value.

    Attributes:
        zero: word that SHOW prints for 0; empty: the number.
    """

    name: str
    default: SettingValue
    description: str
    parse: Callable[[str], SettingValue]
    zero: str = ""

    def shown(self, value: SettingValue) -> str:
        """Return a value the way SHOW prints it."""
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.zero and value == 0:
            return self.zero
        return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class SettingCommand:
    """A SET, SHOW or RESET of a tierkv setting.

    Attributes:
        verb: ``SET``, ``SHOW`` or ``RESET``.
        name: full name, for example ``tierkv.model``; ``all`` for SHOW/RESET of everything.
        value: text of the new value; None in SET means DEFAULT.
        local: SET LOCAL: until the transaction ends.
    """

    verb: str
    name: str
    value: str | None = None
    local: bool = False


def setting_spec(name: str) -> SettingSpec:
    """Look up a setting.

    Raises:
        SqlError: 42704, with the nearest known name if one is near.
    """
    spec = SETTINGS.get(name.lower())
    if spec is None:
        near = nearest(name.lower().removeprefix(_PREFIX), _NAMES)
        raise SqlError(
            f'unrecognized configuration parameter "{name}"',
            sqlstate="42704",
            hint=f"Did you mean {_PREFIX}{near}?" if near else _LISTED,
        )
    return spec


def parse_setting(name: str, text: str) -> SettingValue:
    """Convert the text of a SET to a value.

    Raises:
        SqlError: 42704 for an unknown name.
        UserError: 22023 for an invalid value.
    """
    spec = setting_spec(name)
    try:
        return spec.parse(text)
    except ValueError as error:
        shown = f'invalid value for parameter "{spec.name}": "{text}"'
        raise UserError(f"{shown}; it {error}") from None


def setting_command(tokens: list[Token]) -> SettingCommand | None:
    """Recognise SET, SHOW and RESET of a ``tierkv.`` setting; None for any other statement."""
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
        raise SqlSyntaxError(
            f'SET {name} needs "TO" or "=" and a value', position=tokens[at].start + 1
        )
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
    raise SqlSyntaxError(
        "SET takes one value; quote a value of several words", position=tokens[1].start + 1
    )


def _name(text: str) -> str:
    if text and not re.fullmatch(limits.NAME_PATTERN, text):
        raise ValueError("must be a model name")
    return text


def _tag(text: str) -> str:
    if len(text) > limits.MAX_NAME_CHARS:
        raise ValueError(f"must not have more than {limits.MAX_NAME_CHARS} characters")
    return text


def _of_option(setting: OptionSetting, option: OptionSpec) -> SettingSpec:
    """Return the setting of an option for all calls of a session."""
    assert option.kind is not None, "an option without a kind has no setting"
    read = option.kind.from_text

    def parse(text: str) -> SettingValue:
        value: SettingValue = None if setting.default is None and not text else read(text)
        return value

    name = f"tierkv.{setting.name}"
    zero = "off" if isinstance(option.kind, ShareOrOff) else ""
    return SettingSpec(name, setting.default, setting.doc or option.doc, parse, zero)


_ON_OFF: Final = Flag().from_text
_CALLS: Final = Whole(0, limits.MAX_CALLS_PER_STATEMENT).from_text
_TOKENS: Final = Whole(0, (1 << 63) - 1).from_text
_SETTINGS: Final = (
    SettingSpec(
        "tierkv.model", "", "model of calls that name no model; empty: the default model", _name
    ),
    SettingSpec("tierkv.system_prompt", "", "system prompt of calls that have none", str),
    *(_of_option(option.setting, option) for option in OPTIONS if option.setting),
    SettingSpec(
        "tierkv.on_error",
        "auto",
        "result of a failed call: null, error, or auto (null in reads, error in writes)",
        OneOf(("auto", "null", "error")).from_text,
    ),
    SettingSpec(
        "tierkv.max_calls",
        1000,
        "maximum number of distinct calls of a statement; 0 is no limit",
        _CALLS,
    ),
    SettingSpec(
        "tierkv.notice_calls",
        1000,
        "a statement with more distinct calls sends a NOTICE with an estimate; 0: no notice",
        _CALLS,
    ),
    SettingSpec(
        "tierkv.query_tag", "", "label of the session's statements in the statistics", _tag
    ),
    SettingSpec(
        "tierkv.max_prompt_tokens",
        0,
        "maximum number of prompt tokens of a statement; 0 is no limit",
        _TOKENS,
    ),
    SettingSpec(
        "tierkv.max_completion_tokens",
        0,
        "maximum number of generated tokens of a statement; 0 is no limit",
        _TOKENS,
    ),
    SettingSpec(
        "tierkv.bulk_calls",
        32,
        "a statement with more calls at once is bulk, and interactive calls go first; 0: no "
        "statement is bulk",
        _CALLS,
    ),
    SettingSpec(
        "tierkv.dry_run",
        False,
        "count calls and prompt tokens, send nothing, answer NULL",
        _ON_OFF,
    ),
    SettingSpec("tierkv.prefix_order", True, "run calls in order of shared prefix", _ON_OFF),
    SettingSpec(
        "tierkv.plan",
        True,
        "send each run of calls with a shared prefix to one node, and keep the blocks that pending "
        "calls need",
        _ON_OFF,
    ),
    SettingSpec(
        "tierkv.field_reorder",
        FieldReorder.STATS,
        f"how the fields of context are ordered in a prompt: {', '.join(FieldReorder)}",
        OneOf(tuple(FieldReorder)).from_text,
    ),
    SettingSpec(
        "tierkv.execution",
        "auto",
        "auto; stream: return rows while calls run, or fail; replay: make all calls as one batch",
        OneOf(("auto", "stream", "replay")).from_text,
    ),
    SettingSpec(
        "tierkv.max_concurrency", 64, "maximum number of calls in flight", Whole(1, 4096).from_text
    ),
    SettingSpec(
        "tierkv.max_error_ratio",
        1.0,
        "share of failed calls above which a statement fails even if on_error is null",
        Number(0, 1).from_text,
    ),
)

SETTINGS: Final[dict[str, SettingSpec]] = {spec.name: spec for spec in _SETTINGS}
_LISTED: Final = (
    f"SELECT name, setting FROM tierkv.settings WHERE name LIKE '{_PREFIX}%' lists them."
)
_NAMES: Final = tuple(name.removeprefix(_PREFIX) for name in SETTINGS)
