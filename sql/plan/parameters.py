"""Parameter types known from the text alone: casts, LIMIT, and AI arguments."""

from __future__ import annotations

from typing import Final

from tierkv.kvcore.errors import UserError
from tierkv.sql.calls.calls import find_calls
from tierkv.sql.calls.functions import ArgumentKind
from tierkv.sql.plan.rewrite import parameter_names
from tierkv.sql.text.lexer import Token, TokenKind, tokenize

_TYPES: Final[dict[str, str]] = {
    "INT": "INTEGER",
    "INT2": "SMALLINT",
    "INT4": "INTEGER",
    "INT8": "BIGINT",
    "FLOAT4": "FLOAT",
    "FLOAT8": "DOUBLE",
    "REAL": "FLOAT",
    "BOOL": "BOOLEAN",
    "TEXT": "VARCHAR",
    "BYTEA": "BLOB",
    "TIMESTAMPTZ": "TIMESTAMP WITH TIME ZONE",
    "JSONB": "JSON",
    "NUMERIC": "DECIMAL(18,3)",
    "DECIMAL": "DECIMAL(18,3)",
}
_UNKNOWN: Final = "VARCHAR"


def parameter_types(text: str) -> tuple[str, ...]:
    """Return the DuckDB type of ``$1``, ``$2`` ...; VARCHAR if the text gives no type."""
    tokens = tokenize(text)
    found: dict[int, str] = {}
    names = parameter_names(tokens)
    lists = _lists(tokens) if names else set()
    for index, name in names.items():
        if name.isdigit():
            number = int(name)
            known = "VARCHAR[]" if index in lists else _type_at(tokens, index)
            if found.get(number, _UNKNOWN) == _UNKNOWN:
                found[number] = known
    return tuple(found.get(number, _UNKNOWN) for number in range(1, max(found, default=0) + 1))


def _lists(tokens: list[Token]) -> set[int]:
    """Find single-token arguments of AI functions that take lists of text."""
    try:
        calls = find_calls(tokens)
    except UserError:  # Running the statement will report the error.
        return set()
    return {
        argument.first
        for call in calls
        for name, argument in call.arguments.items()
        if call.function.parameter(name).kind is ArgumentKind.TEXTS
        and argument.last == argument.first + 1
    }


def _type_at(tokens: list[Token], index: int) -> str:
    before = tokens[index - 1].upper if index else ""
    after = [token.upper for token in tokens[index + 1 : index + 3]]
    if before in ("LIMIT", "OFFSET"):
        return "BIGINT"
    if len(after) == 2 and (
        after[0] == "::"
        or (after[0] == "AS" and before == "(" and tokens[index - 2].upper == "CAST")
    ):
        if tokens[index + 2].kind is not TokenKind.WORD:
            return _UNKNOWN
        is_list = [token.text for token in tokens[index + 3 : index + 5]] == ["[", "]"]
        return _TYPES.get(after[1], after[1]) + "[]" * is_list
    return _UNKNOWN
