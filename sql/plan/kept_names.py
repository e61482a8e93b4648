"""Protection of kept names: no user's statement may change names of TierKV or the engine.

Users of a front share one database. ``refuse_kept`` checks every statement of a client before the
engine sees it. The check reads tokens, never the catalogue, and knows no transactions. Protected
are the schemas of the admin views and of PostgreSQL's catalogue, the AI functions, the engine's own
functions and types, and the session variables of the views.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Final

from tierkv.kvcore.errors import SqlError, SqlSyntaxError
from tierkv.sql.calls.functions import AI_FUNCTIONS, ENGINE_PREFIX, PROMPT_TEMPLATE
from tierkv.sql.text.lexer import (
    Token,
    TokenKind,
    closing_index,
    has_codes,
    name_value,
    string_value,
)
from tierkv.sql.text.statement import StatementKind, classify
from tierkv.sql.views import SCHEMA

KEPT_SCHEMAS: Final = frozenset({SCHEMA, f"{SCHEMA}_pg"})
"""The schema of the admin views, and the database with PostgreSQL's catalogue."""

INNER_FUNCTIONS: Final = frozenset(
    {"tierkv_window", "tierkv_simulate", "tierkv_stat_reset", "tierkv_cancel"}
    | {f"{ENGINE_PREFIX}call", f"{ENGINE_PREFIX}call_kept"}
)
"""Functions for rewritten statements and the macros of schema tierkv; clients may not call them."""

_PREFIX: Final = f"{SCHEMA}_"
_FUNCTIONS: Final = frozenset({"MACRO", "FUNCTION"})
_STORES: Final = _FUNCTIONS | {"VIEW", "TABLE"}
_OF_SCHEMAS: Final = frozenset({"SCHEMA", "DATABASE"})
_KINDS: Final = _STORES | _OF_SCHEMAS | {"TYPE", "INDEX", "SEQUENCE"}
_RUNS_TEXT: Final = frozenset({"query", "json_execute_serialized_sql"})
_PATHS: Final = frozenset({"schema", "search_path"})
_NAMES: Final = (TokenKind.WORD, TokenKind.QUOTED)
_PLAIN: Final = (*_NAMES, TokenKind.STRING)
_KEPT_IN_PATH: Final = re.compile(rf"(?<![\w$])(?:{'|'.join(KEPT_SCHEMAS)})(?![\w$])", re.I)


@dataclass(frozen=True, slots=True)
class KeptNames:
    """Protected names of a database, in addition to the names protected in every database.

    Attributes:
        engine_names: functions and types of the engine, in lower case.
        everybodys: schemas, and databases, in the search path of every user.
        others: other users run statements in this database. Then definitions may not run text,
            macros may not have names of the engine's functions, and ATTACH is refused.
    """

    engine_names: frozenset[str]
    everybodys: frozenset[str]
    others: bool = True


def refuse_kept(tokens: list[Token], kept: KeptNames) -> None:
    """Refuse statements that drop, replace, change or hide protected names.

    Raises:
        SqlError: 42501.
    """
    _refuse_inner_calls(tokens)
    for statement in _statements(tokens):
        verb = statement[0].upper
        if verb == "CREATE":
            _check_create(statement, kept)
        elif verb in ("DROP", "ALTER", "COMMENT"):
            _check_schemas(statement, _kind(statement))
            if verb == "ALTER" and kept.others:
                _refuse_running_text(statement)
        elif verb in ("ATTACH", "DETACH") or [t.upper for t in statement[:3]] == _COPY_DATABASE:
            _check_schemas(statement, "DATABASE")
            if verb == "ATTACH" and kept.others:
                raise _attach_refused(statement[0])
        elif verb in ("SET", "RESET", "PRAGMA", "USE"):
            _check_setting(statement)


_COPY_DATABASE: Final = ["COPY", "FROM", "DATABASE"]


def _statements(tokens: list[Token]) -> Iterator[list[Token]]:
    """Cut at semicolons, and skip EXPLAIN and its options: EXPLAIN may run its statement."""
    start = 0
    for at in range(len(tokens) + 1):
        if at < len(tokens) and tokens[at].text != ";":
            continue
        while start < at and tokens[start].upper in ("EXPLAIN", "ANALYZE", "VERBOSE", "("):
            start = (_closing(tokens, start) if tokens[start].text == "(" else start) + 1
        if start < at:
            yield tokens[start:at]
        start = at + 1


def _closing(tokens: list[Token], opening: int) -> int:
    try:
        return closing_index(tokens, opening)
    except SqlSyntaxError:
        return opening  # The engine will report the error.


def _refuse_inner_calls(tokens: list[Token]) -> None:
    for token, following in pairwise(tokens):
        if following.text == "(" and token.kind in _NAMES and name_value(token) in INNER_FUNCTIONS:
            raise _refused(
                token, f"{name_value(token)}() is internal to TierKV; clients may not call it"
            )


def _check_create(statement: list[Token], kept: KeptNames) -> None:
    ends = (at for at, token in enumerate(statement) if token.text == "(" or token.upper == "AS")
    head = statement[: next(ends, len(statement))]
    kind = _kind(head)
    _check_schemas(head, kind)
    if kind in _FUNCTIONS or kind == "TYPE":
        _check_made(head, kept)
    stores = kind in _STORES and classify(statement) is not StatementKind.CREATE_TABLE_AS
    if stores and kept.others:
        _refuse_running_text(statement[len(head) :])


def _kind(head: list[Token]) -> str:
    return next((token.upper for token in head[1:] if token.upper in _KINDS), "")


def _check_schemas(tokens: list[Token], kind: str) -> None:
    """Refuse protected schemas, as a qualifier or as the name of a schema or database itself."""
    for at, token in enumerate(tokens):
        if token.kind is TokenKind.STRING and tokens[0].upper == "ATTACH":
            hides = PurePath(string_value(token)).stem.lower() in KEPT_SCHEMAS
        elif token.kind in _NAMES and name_value(token) in KEPT_SCHEMAS:
            after = tokens[at + 1].text if at + 1 < len(tokens) else ""
            hides = after == "." or kind in _OF_SCHEMAS or tokens[at - 1].upper == "SCHEMA"
        else:
            continue
        if hides:
            raise _refused(token, f"schema {SCHEMA} and its contents are reserved for TierKV")


def _check_made(head: list[Token], kept: KeptNames) -> None:
    """Refuse a macro or type that would take over a protected name for other users too."""
    last = head[-1]
    name = name_value(last)
    if name in AI_FUNCTIONS or name == PROMPT_TEMPLATE or name.startswith(_PREFIX):
        raise _refused(last, f"the name {name} is reserved for TierKV")
    inside = name_value(head[-3]) if len(head) > 3 and head[-2].text == "." else ""
    temporary = inside == "temp" or any(token.upper in ("TEMP", "TEMPORARY") for token in head)
    shared = not temporary and (not inside or inside in kept.everybodys)
    if kept.others and shared and name in kept.engine_names:
        raise SqlError(
            f"{name} is built in: replacing it would affect the statements of all users",
            sqlstate="42501",
            position=last.start + 1,
            hint=f"Use another name, your own schema (CREATE MACRO mine.{name} ...), or CREATE "
            "TEMP MACRO, which only your session sees.",
        )


def _refuse_running_text(tokens: list[Token]) -> None:
    """Refuse definitions that run text: the text would run in statements of other users."""
    for at, token in enumerate(tokens[:-1]):
        if token.kind not in _NAMES or tokens[at + 1].text != "(":
            continue
        if name_value(token) in _RUNS_TEXT and not _names_query(tokens, at):
            raise SqlError(
                f"{name_value(token)}() can't be used in a view, macro or table: it would run "
                "text in the statements of other users",
                sqlstate="42501",
                position=token.start + 1,
                hint="Call it directly in a statement; query_table() is allowed here.",
            )


def _names_query(tokens: list[Token], at: int) -> bool:
    """Return whether a name with brackets is the head of a query of a WITH."""
    close = _closing(tokens, at + 1)
    follows = tokens[close + 1].upper if close + 1 < len(tokens) else ""
    return follows == "AS" and tokens[at - 1].upper in ("WITH", "RECURSIVE", ",")


def _check_setting(statement: list[Token]) -> None:
    words = [token for token in statement[1:] if token.upper not in ("SESSION", "GLOBAL", "LOCAL")]
    if statement[0].upper == "USE":
        _check_path(words)
    elif words and words[0].upper == "VARIABLE" and len(words) > 1:
        if name_value(words[1]).startswith(_PREFIX):
            raise _refused(words[1], f"variables named {_PREFIX}... are reserved for TierKV")
    elif words and words[0].kind in _NAMES and name_value(words[0]) in _PATHS:
        _check_path(words[2:])


def _check_path(value: list[Token]) -> None:
    """Refuse a search path with a protected schema: bare names would resolve in the schema."""
    for token in value:
        coded = token.kind is TokenKind.STRING and has_codes(token)
        if coded or (token.kind not in _PLAIN and token.text not in (",", ".")):
            raise SqlError(
                "the schema must be a name or a text constant",
                sqlstate="42501",
                position=token.start + 1,
            )
        text = string_value(token) if token.kind is TokenKind.STRING else name_value(token)
        # The engine reads ``tier""kv`` in a path as ``tierkv``.
        if _KEPT_IN_PATH.search(text) or _KEPT_IN_PATH.search(text.replace('"', "")):
            raise SqlError(
                f"schema {token.text} can't be in the search path",
                sqlstate="42501",
                position=token.start + 1,
                hint=f"Write the schema before the name: {SCHEMA}.nodes.",
            )


def _attach_refused(token: Token) -> SqlError:
    """ATTACH in memory is refused too: all users see the database, and schemas of the name hide."""
    return SqlError(
        "ATTACH is not allowed, because the database would be attached for all users",
        sqlstate="42501",
        position=token.start + 1,
        hint="The setting front.external_access = on allows it. CREATE SCHEMA and TEMP tables work "
        "without.",
    )


def _refused(token: Token, what: str) -> SqlError:
    return SqlError(what, sqlstate="42501", position=token.start + 1, hint="Use another name.")
