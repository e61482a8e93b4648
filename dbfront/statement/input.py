"""Checks and normalizes client input for a statement: SQL text and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlError, UserError

_NUL: Final = 'invalid byte sequence for encoding "UTF8": 0x00'


def named_parameters(params: Sequence[Any] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values by name; ``$1`` and the first ``?`` are "1".

    Raises:
        SqlError: 22021, a text value contains a NUL byte, which could not be sent to a client.
    """
    if params is None:
        return {}
    pairs = params.items() if isinstance(params, Mapping) else enumerate(params, 1)
    named = {str(name): value for name, value in pairs}
    for name, value in named.items():
        if _holds_nul(value):
            raise SqlError(f"{_NUL} (parameter ${name})", sqlstate="22021")
    return named


def _holds_nul(value: Any) -> bool:
    """Return True if a text value, or any text inside a container, contains a NUL byte."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if "\0" in one:
                return True
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return False


def check_length(sql: str) -> None:
    """Refuse SQL that is too long or is not valid text.

    Raises:
        UserError: too long.
        SqlError: 22021.
    """
    if len(sql) > limits.MAX_SQL_BYTES:
        raise UserError(
            f"the SQL text has more than {limits.MAX_SQL_BYTES} characters",
            hint="Load data with COPY.",
        )
    if "\0" in sql:
        raise SqlError(_NUL, sqlstate="22021", position=sql.index("\0") + 1)
    try:
        sql.encode()
    except UnicodeEncodeError:
        # Python reads bytes it can't decode as lone surrogates; the engine takes text only.
        raise SqlError("the SQL text is not valid UTF-8", sqlstate="22021") from None
