"""SQL text to tokens with exact positions, and back by slicing.

Every pass of this room works on these tokens, because what is sent to the engine is the user's own
text with pieces spliced in, never a regenerated tree. Comments and white space are between tokens
and survive; nothing here knows grammar.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Final, NamedTuple

from tierkv.kvcore.errors import SqlError, SqlSyntaxError
from tierkv.kvcore.limits import LONG_SQL_CHARS, MAX_SQL_TOKENS


class TokenKind(StrEnum):
    """What a token is."""

    WORD = "word"
    QUOTED = "quoted"
    STRING = "string"
    NUMBER = "number"
    PARAMETER = "parameter"
    OPERATOR = "operator"


class Token(NamedTuple):
    """One token; ``text[start:end]`` of the statement is ``text``, ``upper`` is its upper case."""

    kind: TokenKind
    text: str
    start: int
    end: int
    upper: str


_TOKEN: Final = re.compile(
    r"""
      (?P<space>[\s\u200b\u2060\ufeff]+|--[^\n\r]*)
    | (?P<comment>/\*)
    | (?P<string>[eE]'(?:[^'\\]++|\\.|'')*+'|'(?:[^']++|'')*+')
    | (?P<dollar>\$(?:[^\W\d]\w*)?\$)
    | (?P<parameter>\$\w+|\?)
    | (?P<quoted>"(?:[^"]++|"")*+")
    | (?P<number>\d[\d_]*(?:\.\d[\d_]*|\.(?!\.))?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)
    | (?P<unterminated>[eE]?'|")
    | (?P<word>[^\W\d][\w$]*)
    | (?P<operator>=>|:=|::|->>|->|<=|>=|<>|!=|\|\||.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|([0-7]{1,3})|(.))", re.S)
_CODES: Final = re.compile(r"\\[xuU0-7]")
_ESCAPED_CHARS: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


_READ: ContextVar[tuple[str, list[Token]] | None] = ContextVar("tokens read ahead", default=None)


@asynccontextmanager
async def read_ahead(text: str) -> AsyncGenerator[None, None]:
    """Cut long text into tokens on a thread; ``tokenize`` gives them again until the block ends.

    A statement's passes each ask for its tokens; a MiB of them would hold up every other client.

    Raises:
        SqlError: 54000, more tokens than a text may have.
        SqlSyntaxError: as ``tokenize``.
    """
    known = _READ.get()
    if len(text) <= LONG_SQL_CHARS or (known is not None and known[0] == text):
        yield
        return
    _READ.set((text, await asyncio.to_thread(tokenize, text, MAX_SQL_TOKENS)))
    try:
        yield
    finally:
        _READ.set(known)


def tokenize(text: str, most: int | None = None) -> list[Token]:
    """Cut SQL text into tokens.

    Args:
        text: any number of statements.
        most: tokens it may have; None: any number.

    Raises:
        SqlSyntaxError: a string, quoted name or comment has no end; with its position.
        SqlError: 54000, more than ``most``.
    """
    known = _READ.get()
    if known is not None and known[0] == text:
        return known[1].copy()
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None, "the last alternative matches any character"
        group = match.lastgroup
        end = match.end()
        if group == "comment":
            end = _comment_end(text, at)
        elif group == "dollar":
            end = _dollar_end(text, at, match.group())
            tokens.append(_token(TokenKind.STRING, text, at, end))
        elif group == "unterminated":
            raise SqlSyntaxError(f"{match.group()} opens text that never ends", position=at + 1)
        elif group != "space" and group is not None:
            tokens.append(_token(TokenKind(group), text, at, end))
            if most is not None and len(tokens) > most:
                raise SqlError(
                    f"the SQL text has more than {most} words, numbers and operators",
                    sqlstate="54000",
                    hint="Load data with COPY, or send it in several statements.",
                )
        at = end
    return tokens


def string_value(token: Token) -> str:
    """Return the text that a STRING token stands for."""
    text = token.text
    if text[0] == "$":
        width = text.index("$", 1) + 1
        return text[width:-width]
    if text[0] in "eE":
        return _ESCAPE.sub(_unescape, text[2:-1].replace("''", "'"))
    return text[1:-1].replace("''", "'")


def has_codes(token: Token) -> bool:
    """Say whether an E'...' gives characters by number, which each engine reads its own way."""
    return token.text[0] in "eE" and _CODES.search(token.text) is not None


def name_value(token: Token) -> str:
    """Return the name a WORD or QUOTED token stands for, in lower case as DuckDB compares it."""
    if token.kind is TokenKind.QUOTED:
        return token.text[1:-1].replace('""', '"').lower()
    return token.text.lower()


def closing_index(tokens: list[Token], opening: int) -> int:
    """Return the index of the bracket that closes the one at ``opening``.

    Raises:
        SqlSyntaxError: it is never closed.
    """
    depth = 0
    for index in range(opening, len(tokens)):
        depth += depth_change(tokens[index])
        if depth == 0:
            return index
    raise SqlSyntaxError(
        f"{tokens[opening].text} is never closed", position=tokens[opening].start + 1
    )


def depth_change(token: Token) -> int:
    """Say whether a token opens (1) or closes (-1) a bracket of any kind."""
    if token.kind is not TokenKind.OPERATOR:
        return 0
    if token.text in "([{":
        return 1
    return -1 if token.text in ")]}" else 0


def _token(kind: TokenKind, text: str, start: int, end: int) -> Token:
    piece = text[start:end]
    return Token(kind, piece, start, end, piece.upper() if kind is TokenKind.WORD else piece)


def _comment_end(text: str, start: int) -> int:
    depth = 0
    for edge in _COMMENT_EDGE.finditer(text, start):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    raise SqlSyntaxError("/* opens a comment that never ends", position=start + 1)


def _dollar_end(text: str, start: int, tag: str) -> int:
    close = text.find(tag, start + len(tag))
    if close < 0:
        raise SqlSyntaxError(f"{tag} opens text that never ends", position=start + 1)
    return close + len(tag)


def _unescape(match: re.Match[str]) -> str:
    hex2, hex4, octal, char = match.groups()
    if hex2 or hex4:
        return chr(int(hex2 or hex4, 16))
    return chr(int(octal, 8)) if octal else _ESCAPED_CHARS.get(char, char)
