"""Just enough SQL lexing for a wire server: where words, strings, parameters and comments are.

COPY statements, ``$n`` parameters, settings and catalog queries are recognised by tokens, never by
searching text, so a string or comment that looks like one is left alone. Parsing SQL is the sql
room's job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"""
      (?P<space>\s+ | --[^\n]*)
    | (?P<comment>/\*)
    | (?P<dollar>\$(?P<tag>[A-Za-z_][A-Za-z_0-9]*)?\$)
    | (?P<param>\$\d+)
    | (?P<string>[eE]'(?:[^'\\]|\\.|'')*' | (?:[xXbBnN])?'(?:[^']|'')*')
    | (?P<ident>"(?:[^"]|"")*")
    | (?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)? | \.\d+(?:[eE][+-]?\d+)?)
    | (?P<word>[^\W\d][\w$]*)
    | (?P<symbol>:: | => | := | [-+*/<>=~!@\#%^&|`?]+ | .)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_MARK: Final = re.compile(r"/\*|\*/")


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of SQL text. ``kind``: word, ident, string, number, param or symbol."""

    kind: str
    text: str
    start: int
    end: int

    @property
    def upper(self) -> str:
        """The keyword, if this is a word; else the text."""
        return self.text.upper() if self.kind == "word" else self.text

    @property
    def name(self) -> str:
        """The name it stands for: unquoted, or folded to lower case."""
        if self.kind == "ident":
            return self.text[1:-1].replace('""', '"')
        return self.text.lower()

    @property
    def value(self) -> str:
        """The value of a string literal (standard_conforming_strings on)."""
        if self.kind != "string":
            return self.text
        if self.text.startswith("$"):
            mark = self.text.index("$", 1) + 1
            return self.text[mark:-mark]
        body = self.text[self.text.index("'") + 1 : -1].replace("''", "'")
        return _unescape(body) if self.text[0] in "eE" else body


_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v"}


def _unescape(body: str) -> str:
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), body, flags=re.DOTALL)


def _comment_end(sql: str, at: int) -> int:
    """Index after a comment; comments nest. An unfinished one runs to the end."""
    depth = 0
    for mark in _COMMENT_MARK.finditer(sql, at):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return mark.end()
    return len(sql)


def tokens(sql: str) -> Iterator[Token]:
    """Yield the tokens of a text, without spaces and comments; never fails."""
    at = 0
    while at < len(sql):
        match = _TOKEN.match(sql, at)
        assert match is not None, "the last alternative matches any character"
        kind, start, at = str(match.lastgroup), at, match.end()
        if kind == "tag":
            kind = "dollar"
        if kind == "comment":
            at = _comment_end(sql, start)
        elif kind == "dollar":
            end = sql.find(match["dollar"], at)
            at = len(sql) if end < 0 else end + len(match["dollar"])
            yield Token("string", sql[start:at], start, at)
        elif kind != "space":
            yield Token(kind, sql[start:at], start, at)


def first_word(sql: str) -> str:
    """The first keyword in upper case, or an empty string."""
    for token in tokens(sql):
        return token.upper if token.kind == "word" else ""
    return ""


def parameter_count(sql: str) -> int:
    """The highest ``n`` of the ``$n`` parameters."""
    return max((int(t.text[1:]) for t in tokens(sql) if t.kind == "param"), default=0)


def replace_parameters(sql: str, casts: dict[int, str]) -> str:
    """Wrap ``$n`` as ``CAST($n AS type)`` for each n in ``casts``."""
    if not casts:
        return sql
    parts: list[str] = []
    at = 0
    for token in tokens(sql):
        number = int(token.text[1:]) if token.kind == "param" else 0
        if number in casts:
            parts += [sql[at : token.start], f"CAST({token.text} AS {casts[number]})"]
            at = token.end
    return "".join(parts) + sql[at:]
