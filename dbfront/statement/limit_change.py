"""A change of the limits of AI calls: only of the values named by the user.

Pure. Used by tierkv/parts/front_source.py for ALTER ... SET AI LIMIT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tierkv.dbfront.statement.namespace_change import read_options
from tierkv.kvcore.call_limits import CallLimits, CallRate, rate
from tierkv.kvcore.value_kinds import Flag, Whole
from tierkv.sql.command_reader import CommandOption

NO_LIMIT: Final = "none"
_MOST: Final = 1_000_000


def changed_limits(old: CallLimits, options: Sequence[CommandOption]) -> CallLimits:
    """Return limits with the named options changed.

    Raises:
        SqlSyntaxError: an unknown option.
        UserError: a value that the option can't have; the position is the option's.
    """
    return replace(old, **read_options(options, OPTIONS))


def _rate(text: str) -> CallRate | None:
    return None if text.lower() == NO_LIMIT else rate(text)


def _count(text: str) -> int:
    return 0 if text.lower() == NO_LIMIT else Whole(0, _MOST).from_text(text)


def _priority(text: str) -> int | None:
    return None if text.lower() == NO_LIMIT else Whole(-100, 100).from_text(text)


def _weight(text: str) -> int:
    return 0 if text.lower() == NO_LIMIT else Whole(1, 1_000).from_text(text)


OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "requests": _rate,
    "prompt_tokens": _rate,
    "completion_tokens": _rate,
    "burst": _count,
    "max_priority": _priority,
    "max_in_flight": _count,
    "smooth": Flag().from_text,
    "weight": _weight,
}
"""By name in SQL and on the command line: how to read the text."""
