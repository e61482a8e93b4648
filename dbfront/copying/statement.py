"""``COPY ... TO STDOUT`` and ``COPY ... FROM STDIN``: from SQL text to a frozen description.

Both option styles are read, ``WITH (FORMAT csv, HEADER)`` and the older ``CSV HEADER``. For other
COPY statements (files on the server) ``parse_copy`` returns None, and the engine decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Format of COPY rows; the defaults are the defaults of PostgreSQL's text format."""

    csv: bool = False
    delimiter: str = "\t"
    null: str = "\\N"
    header: bool = False
    quote: str = '"'
    escape: str = '"'
    force_quote: tuple[str, ...] = ()
    force_quote_all: bool = False
    binary: bool = False


@dataclass(frozen=True, slots=True)
class CopyStatement:
    """A COPY through the client.

    Attributes:
        to_client: True for TO STDOUT.
        table: quoted, qualified name; empty when ``query`` is given.
        columns: unquoted names; empty for all columns.
        query: text in the parentheses of ``COPY (query) TO``.
    """

    to_client: bool
    table: str = ""
    columns: tuple[str, ...] = ()
    query: str = ""
    options: CopyOptions = field(default_factory=CopyOptions)

    @property
    def select(self) -> str:
        """Return the query whose rows are copied out, or whose columns are copied in."""
        if self.query:
            return self.query
        names = ", ".join(map(quote_name, self.columns)) or "*"
        return f"SELECT {names} FROM {self.table}"


def quote_name(name: str) -> str:
    """Return a name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


class _TokenCursor:
    """A position in a token list."""

    def __init__(self, sql: str) -> None:
        self.sql = sql
        self._tokens = [token for token in tokens(sql) if token.text != ";"]
        self._at = 0

    def peek(self) -> SqlToken | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def next(self) -> SqlToken:
        token = self.peek()
        if token is None:
            raise SqlSyntaxError("syntax error at end of input", position=len(self.sql))
        self._at += 1
        return token

    def skip(self, *words: str) -> bool:
        token = self.peek()
        if token is None or token.upper not in words:
            return False
        self._at += 1
        return True

    def balanced(self) -> str:
        """Return the text from the opening parenthesis just passed to its closing parenthesis."""
        start, depth = self._tokens[self._at - 1].end, 1
        while depth:
            token = self.next()
            depth += {"(": 1, ")": -1}.get(token.text, 0) if token.kind == "symbol" else 0
        return self.sql[start : token.start].strip()

    def names(self) -> tuple[str, ...]:
        """Read names up to the closing parenthesis."""
        names = [_name(self.next())]
        while self.skip(","):
            names.append(_name(self.next()))
        if not self.skip(")"):
            raise _unexpected(self.next())
        return tuple(names)


def _unexpected(token: SqlToken) -> SqlSyntaxError:
    return SqlSyntaxError(f'syntax error at or near "{token.text}"', position=token.start + 1)


def _name(token: SqlToken) -> str:
    if token.kind not in ("word", "ident"):
        raise _unexpected(token)
    return token.name


def parse_copy(sql: str) -> CopyStatement | None:
    """Read a COPY through the client; return None for any other statement.

    Raises:
        SqlSyntaxError, SqlError: a malformed COPY, or a COPY with impossible options.
        FeatureNotSupportedError: an unsupported option, or COPY from or to a program.
    """
    if not sql.lstrip()[:4].upper().startswith(("COPY", "--", "/*")):
        return None
    cursor = _TokenCursor(sql)
    if not cursor.skip("COPY"):
        return None
    if not {"STDIN", "STDOUT"} & {t.upper for t in cursor._tokens}:
        _refuse_programs(cursor._tokens)
        return None
    statement = _target(cursor)
    direction = cursor.next()
    if direction.upper not in ("TO", "FROM"):
        raise _unexpected(direction)
    if not cursor.skip("STDOUT", "STDIN"):
        return None
    to_client = direction.upper == "TO"
    if statement.query and not to_client:
        raise SqlSyntaxError("COPY FROM needs a table, not a query")
    return replace(statement, to_client=to_client, options=_options(cursor))


def _refuse_programs(words: Sequence[SqlToken]) -> None:
    for before, word, after in zip(words, words[1:], words[2:], strict=False):
        if before.upper in ("FROM", "TO") and word.upper == "PROGRAM" and after.kind == "string":
            raise FeatureNotSupportedError(
                "COPY can't run programs on the server",
                hint="Use STDIN, STDOUT or psql's \\copy; front.external_access = on allows files.",
            )


def _target(cursor: _TokenCursor) -> CopyStatement:
    if cursor.skip("("):
        return CopyStatement(to_client=True, query=cursor.balanced())
    parts = [_name(cursor.next())]
    while cursor.skip("."):
        parts.append(_name(cursor.next()))
    columns = cursor.names() if cursor.skip("(") else ()
    return CopyStatement(to_client=True, table=".".join(map(quote_name, parts)), columns=columns)


_FLAGS: Final = ("TRUE", "ON", "1")
_NO_FLAGS: Final = ("FALSE", "OFF", "0")


def _options(cursor: _TokenCursor) -> CopyOptions:
    """Read the options in either style; the defaults depend on the format."""
    cursor.skip("WITH")
    parenthesised = cursor.skip("(")
    raw: dict[str, str | tuple[str, ...]] = {}
    while (token := cursor.peek()) is not None and token.text != ")":
        name = _option_name(cursor)
        if name in raw:
            raise SqlSyntaxError("conflicting or redundant options", position=token.start + 1)
        raw[name] = _option_value(cursor, name)
        if parenthesised:
            cursor.skip(",")
    if parenthesised and not cursor.skip(")"):
        raise SqlSyntaxError("syntax error at end of input", position=len(cursor.sql))
    if (token := cursor.peek()) is not None:
        raise _unexpected(token)
    return _build(raw)


def _option_name(cursor: _TokenCursor) -> str:
    token = cursor.next()
    name = token.upper
    if name == "FORCE":  # the older FORCE QUOTE, FORCE NULL, FORCE NOT NULL
        name = f"FORCE_{cursor.next().upper}"
    if name in ("CSV", "BINARY", "TEXT"):
        return f"FORMAT {name}"
    if name not in ("FORMAT", "DELIMITER", "NULL", "HEADER", "QUOTE", "ESCAPE", "ENCODING"):
        if name in ("FORCE_QUOTE",):
            return name
        raise FeatureNotSupportedError(f"COPY option {token.text} is not supported")
    return name


def _option_value(cursor: _TokenCursor, name: str) -> str | tuple[str, ...]:
    if name.startswith("FORMAT "):
        return name.split()[1].lower()
    if name == "FORCE_QUOTE":
        if cursor.skip("*"):
            return ("*",)
        return cursor.names() if cursor.skip("(") else (_name(cursor.next()),)
    if name == "HEADER":
        return _flag(cursor)
    cursor.skip("AS")
    token = cursor.next()
    if token.kind not in ("string", "word", "ident"):
        raise _unexpected(token)
    return token.value if token.kind == "string" else token.name


def _flag(cursor: _TokenCursor) -> str:
    token = cursor.peek()
    if token is None:
        return "on"
    word = token.value.upper()
    if word == "MATCH":
        raise FeatureNotSupportedError("COPY HEADER MATCH is not supported")
    if word not in _FLAGS + _NO_FLAGS:
        return "on"
    cursor.next()
    return "on" if word in _FLAGS else "off"


def _build(raw: dict[str, str | tuple[str, ...]]) -> CopyOptions:
    formats = [str(v) for k, v in raw.items() if k == "FORMAT" or k.startswith("FORMAT ")]
    kind = formats[0].lower() if formats else "text"
    if kind == "binary":
        return _build_binary(raw)
    if kind not in ("text", "csv"):
        raise SqlError(f'COPY format "{kind}" not recognized', sqlstate="22023")
    csv = kind == "csv"
    quote = str(raw.get("QUOTE", '"'))
    force = tuple(raw.get("FORCE_QUOTE", ()))
    options = CopyOptions(
        csv=csv,
        delimiter=str(raw.get("DELIMITER", "," if csv else "\t")),
        null=str(raw.get("NULL", "" if csv else "\\N")),
        header=raw.get("HEADER", "off") == "on",
        quote=quote,
        escape=str(raw.get("ESCAPE", quote)),
        force_quote=() if force == ("*",) else force,
        force_quote_all=force == ("*",),
    )
    _check(options, raw)
    return options


def _build_binary(raw: Mapping[str, object]) -> CopyOptions:
    textual = {"DELIMITER", "NULL", "HEADER", "QUOTE", "ESCAPE", "FORCE_QUOTE"} & set(raw)
    if textual:
        raise SqlSyntaxError(f"cannot specify {min(textual)} in BINARY mode")
    return CopyOptions(binary=True)


def _check(options: CopyOptions, names: Sequence[str] | dict[str, str | tuple[str, ...]]) -> None:
    if not options.csv and {"QUOTE", "ESCAPE", "FORCE_QUOTE"} & set(names):
        raise SqlError("COPY QUOTE, ESCAPE and FORCE_QUOTE require CSV mode", sqlstate="0A000")
    for what in ("delimiter", "quote", "escape"):
        character = getattr(options, what)
        if len(character) != 1 or character in "\r\n\0":
            raise SqlError(f"COPY {what} must be a single character", sqlstate="22023")
    if options.csv and options.delimiter == options.quote:
        raise SqlError("COPY delimiter and quote must be different", sqlstate="22023")
