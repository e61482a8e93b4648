"""Values read from text, with every digit: JSON, PostgreSQL's arrays, and constants of SQL.

Python's floats hold 17 digits; a DECIMAL of a row may have 38. Two prices that differ only in the
last digit are two questions. ``literal_value`` converts literal tokens to Python values without
asking the engine, and leaves to the engine whatever is not a literal. Drivers send a list as the
text of an array, which ``parse_array`` reads. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from tierkv.sql.text.lexer import Token, TokenKind, has_codes, string_value


class ExactNumber(float):
    """A number with a fraction or exponent, written again exactly as read."""

    text: str

    def __new__(cls, text: str) -> Self:
        """Keep the text with the number."""
        number = super().__new__(cls, text)
        number.text = text
        return number


def exact_value(text: str) -> Any:
    """Read JSON.

    Raises:
        ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_float=ExactNumber)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def exact_argument(text: str) -> Any:
    """Read JSON whose texts will be sent.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or can't be encoded as UTF-8.
    """
    value = exact_value(text)
    if "\\ud" in text.lower():
        try:
            exact_text(value).encode()
        except UnicodeEncodeError:
            raise ValueError("it has an unpaired surrogate, such as \\ud800 alone") from None
    return value


def exact_text(value: Any, *, comma: str = ",", colon: str = ":") -> str:
    """Write JSON, by default in compact form.

    Raises:
        ValueError: the value is nested too deeply.
    """
    try:
        return _written(value, comma, colon)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _written(value: Any, comma: str, colon: str) -> str:
    if isinstance(value, ExactNumber):
        return value.text
    if isinstance(value, Mapping):
        items = (
            f"{_scalar(str(key))}{colon}{_written(item, comma, colon)}"
            for key, item in value.items()
        )
        return f"{{{comma.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{comma.join(_written(item, comma, colon) for item in value)}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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


_MAX_DIMENSIONS: Final = 6
SPACES: Final = " \t\n\r\v\f"
"""PostgreSQL's spaces; str.isspace accepts more."""

Convert = Callable[[str], Any]
"""Converts the text of an array's item that is not NULL."""


def parse_array(text: str, convert: Convert = str) -> list[Any]:
    """Return the items of ``{a,"b c",NULL}``; several dimensions are lists of lists.

    Raises:
        ValueError: the text is not an array, or ``convert`` refuses an item.
    """
    text = text.strip(SPACES)
    items, end = _array_items(text, 0, convert, depth=1)
    if end != len(text):
        raise ValueError("text after the array")
    return items


def _array_items(text: str, at: int, convert: Convert, depth: int) -> tuple[list[Any], int]:
    """Parse ``{...}`` at ``at``; return the items and the index after the closing brace."""
    if text[at : at + 1] != "{" or depth > _MAX_DIMENSIONS:
        raise ValueError("not an array")
    items: list[Any] = []
    at = _skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return items, at + 1
    while True:
        at = _skip_space(text, at)
        if text[at : at + 1] == "{":
            value, at = _array_items(text, at, convert, depth + 1)
        else:
            value, at = _array_item(text, at, convert)
        items.append(value)
        at = _skip_space(text, at)
        mark = text[at : at + 1]
        at += 1
        if mark == "}":
            return items, at
        if mark != ",":
            raise ValueError("array does not end")


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACES:
        at += 1
    return at


def _array_item(text: str, at: int, convert: Convert) -> tuple[Any, int]:
    out: list[str] = []
    quoted = text[at : at + 1] == '"'
    at += quoted
    while at < len(text) and not (text[at] == '"' if quoted else text[at] in ",{}"):
        at += text[at] == "\\"
        out.append(text[at : at + 1])
        at += 1
    if at >= len(text):
        raise ValueError("array does not end")
    word = "".join(out)
    if quoted:
        return convert(word), at + 1
    word = word.rstrip(SPACES)
    if not word:
        raise ValueError("empty array item")
    return (None if word.upper() == "NULL" else convert(word)), at
