"""SQL text to tokens with exact positions, and back by slicing.

Every pass of this room works on these tokens, because the engine receives the user's own text with
pieces spliced in, never a regenerated tree. Comments and white space lie between tokens and
survive; nothing here knows grammar. Text for several rooms is a ``SqlText``, which is tokenized
once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Final, NamedTuple, Self

from tierkv.kvcore.errors import SqlError, SqlSyntaxError
from tierkv.kvcore.limits import LONG_SQL_CHARS, MAX_SQL_TOKENS


class TokenKind(StrEnum):
    """Kind of a token."""

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
    | (?P<operator><=>|<->|<\#>|<\+>|<~>|=>|:=|::|->>|->|<=|>=|<>|!=|\|\||.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|([0-7]{1,3})|(.))", re.S)
_CODES: Final = re.compile(r"\\[xuU0-7]")
_ESCAPED_CHARS: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class SqlText(str):
    """SQL text that keeps its tokens: a later room does not tokenize the text again.

    A SqlText is a ``str`` for code that only reads characters. A slice of a SqlText, or text
    derived from one, is a plain ``str``; ``part`` returns a slice with tokens. Text longer than
    LONG_SQL_CHARS keeps tokens only within ``read_ahead``, because the tokens may take 100 MB.
    """

    __slots__ = ("_tokens",)
    _tokens: list[Token] | None

    def __new__(cls, text: str, tokens: list[Token] | None = None) -> Self:
        """Make a SqlText; ``tokens`` are the tokens of ``text``, if known."""
        self = super().__new__(cls, text)
        self._tokens = tokens
        return self

    @classmethod
    def of(cls, text: str) -> Self:
        """Return ``text`` as a SqlText; a SqlText is returned unchanged."""
        return text if isinstance(text, cls) else cls(text)

    @property
    def is_long(self) -> bool:
        """Return whether the text is too long to keep its tokens outside ``read_ahead``."""
        return len(self) > LONG_SQL_CHARS

    def tokens(self) -> list[Token]:
        """Return a new list of the tokens.

        Raises:
            SqlSyntaxError: as ``tokenize``.
        """
        if self._tokens is not None:
            return self._tokens.copy()
        tokens = _cut(self)
        if not self.is_long:
            self._tokens = tokens.copy()
        return tokens

    def part(self, start: int, end: int) -> Self:
        """Return characters [start, end), which neither begin nor end inside a token."""
        if (start, end) == (0, len(self)):
            return self
        part = type(self)(self[start:end])
        if not part.is_long:
            part._tokens = [
                token._replace(start=token.start - start, end=token.end - start) if start else token
                for token in self.tokens()
                if start <= token.start and token.end <= end
            ]
        return part

    @asynccontextmanager
    async def read_ahead(self) -> AsyncGenerator[None, None]:
        """Tokenize long text in a thread, and keep the tokens until the block ends.

        Each pass of a statement asks for the tokens; tokenizing a MiB of text on the event loop
        would delay every other client.

        Raises:
            SqlError: 54000, more tokens than a text may have.
            SqlSyntaxError: as ``tokenize``.
        """
        if not self.is_long or self._tokens is not None:
            yield
            return
        self._tokens = await asyncio.to_thread(_cut, self, MAX_SQL_TOKENS)
        try:
            yield
        finally:
            self._tokens = None


def tokenize(text: str) -> list[Token]:
    """Cut SQL text into tokens; a ``SqlText`` is cut only the first time.

    Args:
        text: any number of statements.

    Raises:
        SqlSyntaxError: a string, quoted name or comment has no end; with its position.
    """
    return text.tokens() if isinstance(text, SqlText) else _cut(text)


def _cut(text: str, most: int | None = None) -> list[Token]:
    """Cut SQL text into at most ``most`` tokens; None: any number."""
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
            what = "identifier" if match.group() == '"' else "string"
            raise SqlSyntaxError(f"unterminated quoted {what}", position=at + 1)
        elif group != "space" and group is not None:
            tokens.append(_token(TokenKind(group), text, at, end))
            if tokens[-1].upper in _STEERING:
                _join_name(tokens, text)
            if most is not None and len(tokens) > most:
                raise SqlError(
                    f"the SQL text has more than {most} words, numbers and operators",
                    sqlstate="54000",
                    hint="Load data with COPY, or send it in several statements.",
                )
        at = end
    return tokens


_STEERING: Final = frozenset(
    {"WARM", "PIN", "FORGET"}
    | {f"KV_{name}" for name in ("PREFETCH", "PIN", "RETAIN", "DEMOTE", "LOCATE", "FORGET")}
)


def _join_name(tokens: list[Token], text: str) -> None:
    """Make one word of ``tierkv.warm``, the name of a function with a schema."""
    if len(tokens) > 2 and tokens[-2].text == "." and tokens[-3].upper == "TIERKV":
        start, end = tokens[-3].start, tokens[-1].end
        if end - start == len("tierkv.") + len(tokens[-1].text):
            tokens[-3:] = [_token(TokenKind.WORD, text, start, end)]


def string_value(token: Token) -> str:
    """Return the text value of a STRING token."""
    text = token.text
    if text[0] == "$":
        width = text.index("$", 1) + 1
        return text[width:-width]
    if text[0] in "eE":
        return _ESCAPE.sub(_unescape, text[2:-1].replace("''", "'"))
    return text[1:-1].replace("''", "'")


def has_codes(token: Token) -> bool:
    """Return whether an E'...' has characters by number, which each engine reads differently."""
    return token.text[0] in "eE" and _CODES.search(token.text) is not None


def name_value(token: Token) -> str:
    """Return the name of a WORD or QUOTED token, in lower case as DuckDB compares names."""
    if token.kind is TokenKind.QUOTED:
        return token.text[1:-1].replace('""', '"').lower()
    return token.text.lower()


def closing_index(tokens: list[Token], opening: int) -> int:
    """Return the index of the bracket that closes the bracket at ``opening``.

    Raises:
        SqlSyntaxError: the bracket is never closed.
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
    """Return 1 for an opening bracket of any kind, -1 for a closing bracket, otherwise 0."""
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
    raise SqlSyntaxError("unterminated /* comment", position=start + 1)


def _dollar_end(text: str, start: int, tag: str) -> int:
    close = text.find(tag, start + len(tag))
    if close < 0:
        raise SqlSyntaxError(
            f'unterminated dollar-quoted string at or near "{tag}"', position=start + 1
        )
    return close + len(tag)


def _unescape(match: re.Match[str]) -> str:
    hex2, hex4, octal, char = match.groups()
    if hex2 or hex4:
        return chr(int(hex2 or hex4, 16))
    return chr(int(octal, 8)) if octal else _ESCAPED_CHARS.get(char, char)
