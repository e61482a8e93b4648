"""What a client sends with a statement, checked and in one form: its text and its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcore import limits
from kvcore.errors import SqlError, UserError


def named_parameters(params: Sequence[Any] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values by name; ``$1`` and the first ``?`` are "1"."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return {str(name): value for name, value in params.items()}
    return {str(number): value for number, value in enumerate(params, 1)}


def check_length(sql: str) -> None:
    """Refuse text that is too long, or not text.

    Raises:
        UserError: too long.
        SqlError: 22021.
    """
    if len(sql) > limits.MAX_SQL_BYTES:
        raise UserError(
            f"the SQL text has more than {limits.MAX_SQL_BYTES} characters",
            hint="Load data with COPY.",
        )
    try:
        sql.encode()
    except UnicodeEncodeError:
        # Python reads bytes it can't decode as lone surrogates; the engine takes text only.
        raise SqlError("the SQL text is not valid UTF-8", sqlstate="22021") from None
