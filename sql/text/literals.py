"""Constant arguments: literal tokens to Python values, without asking the engine."""

from __future__ import annotations

import re
from typing import Any, Final

from tierkv.sql.text.exact_json import ExactNumber
from tierkv.sql.text.lexer import Token, TokenKind, has_codes, string_value


class NotConstantError(Exception):
    """The tokens are not a literal; the engine has to compute the value."""


_WORDS: Final = {"NULL": None, "TRUE": True, "FALSE": False}


def literal_value(tokens: list[Token]) -> Any:
    """Return the value of a literal.

    Text, numbers, NULL, booleans, ``[..]``, ``ARRAY[..]``, ``{k: v}``, and JSON casts of these.

    Raises:
        NotConstantError: the tokens are not a literal.
    """
    if len(tokens) > 2 and tokens[-2].text == "::" and tokens[-1].upper in _JSON_CASTS:
        tokens = tokens[:-2]
    elif len(tokens) == 2 and tokens[0].upper in _JSON_CASTS:
        tokens = tokens[1:]
    try:
        value, at = _value(tokens, 0)
    except RecursionError:
        raise NotConstantError from None
    if at != len(tokens):
        raise NotConstantError
    return value


_DECIMAL: Final = re.compile(r"-?(?:0|[1-9]\d*)\.\d+")
_JSON_CASTS: Final = ("JSON", "JSONB", "TEXT", "VARCHAR")


def _value(tokens: list[Token], at: int) -> tuple[Any, int]:
    if at >= len(tokens):
        raise NotConstantError
    token = tokens[at]
    if token.kind is TokenKind.STRING and not has_codes(token):
        return string_value(token), at + 1
    if token.kind is TokenKind.NUMBER:
        return _number(token.text), at + 1
    if token.kind is TokenKind.WORD and token.upper in _WORDS:
        return _WORDS[token.upper], at + 1
    if token.text == "-" and at + 1 < len(tokens) and tokens[at + 1].kind is TokenKind.NUMBER:
        return _number(f"-{tokens[at + 1].text}"), at + 2
    if token.text == "[":
        return _items(tokens, at + 1)
    if token.upper == "ARRAY" and at + 1 < len(tokens) and tokens[at + 1].text == "[":
        return _items(tokens, at + 2)
    if token.text == "{":
        return _fields(tokens, at + 1)
    raise NotConstantError


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return ExactNumber(text if _DECIMAL.fullmatch(text) else repr(float(text)))


def _items(tokens: list[Token], at: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while at < len(tokens) and tokens[at].text != "]":
        item, at = _value(tokens, at)
        items.append(item)
        at = _separator(tokens, at, "]")
    return items, at + 1


def _fields(tokens: list[Token], at: int) -> tuple[dict[str, Any], int]:
    fields: dict[str, Any] = {}
    while at + 1 < len(tokens) and tokens[at].text != "}":
        token = tokens[at]
        if token.kind not in (TokenKind.WORD, TokenKind.QUOTED, TokenKind.STRING):
            raise NotConstantError
        if tokens[at + 1].text != ":":
            raise NotConstantError
        fields[_key(token)], at = _value(tokens, at + 2)
        at = _separator(tokens, at, "}")
    return fields, at + 1


def _key(token: Token) -> str:
    """Return a field's name; DuckDB keeps the case of a name, quoted or not."""
    if token.kind is TokenKind.STRING:
        return string_value(token)
    if token.kind is TokenKind.QUOTED:
        return token.text[1:-1].replace('""', '"')
    return token.text


def _separator(tokens: list[Token], at: int, closing: str) -> int:
    if at < len(tokens) and tokens[at].text == ",":
        return at + 1
    if at >= len(tokens) or tokens[at].text != closing:
        raise NotConstantError
    return at
