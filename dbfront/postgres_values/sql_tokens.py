"""Tokens of a statement as the wire server reads them, on top of the sql room's lexer.

COPY statements, ``$n`` parameters, settings and catalog queries are recognised by tokens, never by
text search. A string or comment that looks like a statement is therefore left alone. The sql room
parses SQL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tierkv.sql.text.lexer import Token as LexerToken
from tierkv.sql.text.lexer import TokenKind, string_value, tokenize

_KINDS: Final = {
    TokenKind.WORD: "word",
    TokenKind.QUOTED: "ident",
    TokenKind.STRING: "string",
    TokenKind.NUMBER: "number",
    TokenKind.PARAMETER: "param",
    TokenKind.OPERATOR: "symbol",
}

_TYPE_NAMES: Final = {
    "BOOL": "BOOLEAN",
    "BYTEA": "BLOB",
    "FLOAT4": "FLOAT",
    "FLOAT8": "DOUBLE",
    "INT": "INTEGER",
    "INT2": "SMALLINT",
    "INT4": "INTEGER",
    "INT8": "BIGINT",
    "REAL": "FLOAT",
    "TEXT": "VARCHAR",
}


_FIRST_WORD: Final = re.compile(
    r"(?:\s|--[^\n]*(?:\n|$)|/\*(?:[^*/]|\*(?!/)|/(?!\*))*\*/)*([A-Za-z_\x80-\U0010ffff][\w$]*|)(.{0,2})",
    re.DOTALL,
)
_AFTER_ITEM: Final = frozenset({",", "FROM", "AS", ";"})
_ZONED: Final = {"TIMESTAMP": "TIMESTAMP WITH TIME ZONE", "TIME": "TIME WITH TIME ZONE"}


@dataclass(frozen=True, slots=True)
class SqlToken:
    """A token of SQL text. ``kind`` is word, ident, string, number, param or symbol."""

    kind: str
    text: str
    start: int
    end: int
    source: LexerToken

    @property
    def upper(self) -> str:
        """Return the token's text, in upper case if the token is a word."""
        return self.text.upper() if self.kind == "word" else self.text

    @property
    def name(self) -> str:
        """Return the name that the token stands for: unquoted, or folded to lower case."""
        if self.kind == "ident":
            return self.text[1:-1].replace('""', '"')
        return self.text.lower()

    @property
    def value(self) -> str:
        """Return the value of a string literal; the text of any other token."""
        return string_value(self.source) if self.kind == "string" else self.text

    @property
    def parameter(self) -> int:
        """Return ``n`` of a ``$n`` parameter, or 0."""
        return int(self.text[1:]) if self.kind == "param" and self.text[1:].isdecimal() else 0


def tokens(sql: str) -> list[SqlToken]:
    """Return the tokens of a text, without spaces and comments.

    Raises:
        SqlSyntaxError: a string, quoted name or comment is not closed.
    """
    return [SqlToken(_KINDS[t.kind], t.text, t.start, t.end, t) for t in tokenize(sql)]


def first_word(sql: str) -> str:
    """Return the first keyword in upper case, or an empty string; read only the text's start."""
    match = _FIRST_WORD.match(sql)
    assert match is not None, "it matches nothing at least"
    if not match[2].startswith("/*"):
        return match[1].upper()
    found = tokens(sql)  # a comment inside a comment
    return found[0].upper if found and found[0].kind == "word" else ""


def parameter_count(sql: str) -> int:
    """Return the highest ``n`` of the ``$n`` parameters, or 0."""
    if "$" not in sql:
        return 0
    return max((token.parameter for token in tokens(sql)), default=0)


def replace_parameters(sql: str, casts: dict[int, str]) -> str:
    """Write ``$n`` as ``CAST($n AS type)`` for each n in ``casts``."""
    if not casts:
        return sql
    parts: list[str] = []
    at = 0
    for token in tokens(sql):
        if token.parameter in casts:
            parts += [sql[at : token.start], f"CAST({token.text} AS {casts[token.parameter]})"]
            at = token.end
    return "".join(parts) + sql[at:]


def position_without(sql: str, casts: dict[int, str], position: int) -> int:
    """Map a position in ``replace_parameters(sql, casts)`` to ``sql``; both count from 1."""
    shift = 0
    for token in tokens(sql) if casts else ():
        if token.parameter not in casts or token.start + shift + 1 > position:
            continue
        added = len(f"CAST( AS {casts[token.parameter]})")
        if position <= token.end + shift + added:
            return token.start + 1
        shift += added
    return position - shift


def long_casts(sql: str) -> dict[int, str]:
    """Return the parameters that the text casts to an array (``$1::INT[]``) or a type with a zone.

    Only text parameters of these types, for example ``{1,2}``, must be parsed before DuckDB gets
    the value.
    """
    found: dict[int, str] = {}
    words = tokens(sql) if "$" in sql else []
    for index, token in enumerate(words):
        after = [word.upper for word in words[index + 1 : index + 6]]
        if not token.parameter or after[:1] not in (["::"], ["AS"]):
            continue
        if after[2:4] == ["[", "]"]:
            found.setdefault(token.parameter, f"{_TYPE_NAMES.get(after[1], after[1])}[]")
        elif after[2:] == ["WITH", "TIME", "ZONE"] and after[1] in _ZONED:
            found.setdefault(token.parameter, _ZONED[after[1]])
    return found


def selected_parameters(sql: str) -> set[int]:
    """Return the parameters that are whole columns of the select list (``SELECT $1, a``).

    PostgreSQL treats an untyped parameter there as text; DuckDB 1.5 would report an integer.
    """
    found, depth, words = set(), 0, tokens(sql) if "$" in sql else []
    for index, token in enumerate(words):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        before = words[index - 1].upper if index else ""
        after = words[index + 1].upper if index + 1 < len(words) else ";"
        if token.parameter and depth == 0 and before in ("SELECT", ",") and after in _AFTER_ITEM:
            found.add(token.parameter)
    return found
