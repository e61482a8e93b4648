"""Views over other users' tables: readable as long as the owner of the view may read the tables.

Pure. As in PostgreSQL, readers of a view read what the view's owner may read, at the time of the
read. The owner is the owner of the view's schema. Views in ``main`` and temporary views have no
owner, and may not name another user's table directly (dbfront/databases/schema_owners.py). Macros
count as views, because macros may name views of the maker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from tierkv.kvcore.errors import RightMissingError, SqlError
from tierkv.sql.schema_rights import NAME_KINDS, TableUse, foreign_tables, has_word, reads_names
from tierkv.sql.text.lexer import Token, TokenKind, name_value, string_value, tokenize

_SHARED: Final = "main"
_CHANGES: Final = frozenset({"DROP", "ALTER", "COMMENT", "GRANT", "REVOKE"})
_WORD: Final = re.compile(r"[\w$]+")
_MADE: Final = frozenset({"VIEW", "MACRO", "FUNCTION"})

_TEMPORARY: Final = frozenset({"TEMP", "TEMPORARY"})

ViewName = tuple[str, str]
"""Schema and name, in lower case."""


@dataclass(frozen=True, slots=True)
class ViewReads:
    """What a view or macro reads outside its schema.

    Attributes:
        tables: schema and name, of users' schemas other than the view's own.
        views: other views and macros that the text names.
    """

    tables: frozenset[ViewName]
    views: frozenset[ViewName]


@dataclass(frozen=True, slots=True)
class UserNames:
    """Names of a database that the check of rights needs, in lower case.

    Attributes:
        schemas: of users and roles.
        readers: views and macros with computed names of tables.
        views: views and macros that read other users' tables.
    """

    schemas: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    views: Mapping[ViewName, ViewReads] = field(default_factory=dict)


def view_reads(
    definitions: Iterable[tuple[str, str, str]], schemas: Set[str]
) -> dict[ViewName, ViewReads]:
    """Return the views and macros with tables of other users, also through other views.

    Args:
        definitions: name, schema and text of each view and macro, names in lower case.
        schemas: of users and roles, in lower case.
    """
    texts = {(schema, name): text for name, schema, text in definitions}
    by_name: dict[str, list[ViewName]] = {}
    for view in texts:
        by_name.setdefault(view[1], []).append(view)
    found: dict[ViewName, ViewReads] = {}
    for view, text in texts.items():
        tokens = tokenize(text)
        words = _words(tokens)
        near = {view[0], _SHARED, *words}
        named = {other for word in words for other in by_name.get(word, ()) if other[0] in near}
        uses = _uses(text, tokens, schemas - {view[0]})
        tables = frozenset((use.schema, use.table) for use in uses)
        found[view] = ViewReads(tables, frozenset(named - {view}))
    reading = {view for view, reads in found.items() if reads.tables}
    while more := {view for view in found.keys() - reading if found[view].views & reading}:
        reading |= more
    return {view: found[view] for view in reading}


def closed_views(
    reads: Mapping[ViewName, ViewReads], may_read: Callable[[str, ViewName], bool]
) -> frozenset[ViewName]:
    """Return the views with a table that is closed to the view's owner by now.

    Args:
        reads: what views read.
        may_read: whether the owner of a schema may read a table.
    """
    closed = {
        view
        for view, each in reads.items()
        if view[0] != _SHARED and not all(may_read(view[0], table) for table in each.tables)
    }
    while more := {view for view in reads.keys() - closed if reads[view].views & closed}:
        closed |= more
    return frozenset(closed)


def named_view(
    text: str, tokens: list[Token], views: Set[ViewName], foreign: Set[str]
) -> tuple[Token, ViewName] | None:
    """Return the first use of some views in a statement; DROP and new definitions use none.

    Args:
        text: one statement.
        tokens: its tokens.
        views: the views in question.
        foreign: schemas of other users; a statement needs the full names of views there.
    """
    made = tokens[0].upper == "CREATE" and not _MADE.isdisjoint(t.upper for t in tokens[:5])
    if tokens[0].upper in _CHANGES or made:
        return None
    bare = {name: (schema, name) for schema, name in views if schema not in foreign}
    maybe: list[tuple[Token, ViewName]] = []
    reads = reads_names(tokens)
    for at, token in enumerate(tokens):
        if reads and token.kind is TokenKind.STRING:
            for view in views:
                if has_word(string_value(token), view[1]):
                    return token, view
        if token.kind not in NAME_KINDS:
            continue
        name = name_value(token)
        if at > 1 and tokens[at - 1].text == ".":
            view = name_value(tokens[at - 2]), name
            if tokens[at - 2].kind in NAME_KINDS and view in views:
                return token, view
        elif name in bare:
            maybe.append((token, bare[name]))
    names = _tables(text) if maybe else None
    return next((each for each in maybe if names is None or each[1][1] in names), None)


def made_view(tokens: list[Token]) -> tuple[str, bool] | None:
    """Return the schema in CREATE VIEW, empty without one, and whether the view is temporary.

    None for any other statement.
    """
    words = [token.upper for token in tokens[:6]]
    if words[:1] != ["CREATE"] or "VIEW" not in words:
        return None
    at = words.index("VIEW") + 1
    if [token.upper for token in tokens[at : at + 3]] == ["IF", "NOT", "EXISTS"]:
        at += 3
    path = [at]
    while path[-1] + 2 < len(tokens) and tokens[path[-1] + 1].text == ".":
        path.append(path[-1] + 2)
    schema = name_value(tokens[path[-2]]) if len(path) > 1 else ""
    return schema, not _TEMPORARY.isdisjoint(words)


def made_temporary(tokens: list[Token]) -> tuple[str, frozenset[str]] | None:
    """Return name and words of a new temporary view or macro, or of a prepared statement.

    None for any other statement. The catalogue of other sessions does not show these objects.
    """
    if tokens[0].upper not in ("CREATE", "PREPARE"):
        return None
    words = [token.upper for token in tokens[:6]]
    ends = (at for at, token in enumerate(tokens) if token.text == "(" or token.upper == "AS")
    head = tokens[: next(ends, len(tokens))]
    names = [name_value(token) for token in head if token.kind in NAME_KINDS]
    made = not _MADE.isdisjoint(words) and not _TEMPORARY.isdisjoint(map(str.upper, names))
    if len(names) < 2 or not (made or words[0] == "PREPARE"):
        return None
    return names[-1], _words(tokens[len(head) :])


def closed_temporary(made: Mapping[str, Set[str]], closed: Set[ViewName]) -> Iterator[ViewName]:
    """Yield the temporary objects of a session with names of closed views, also indirectly."""
    names = {name for _, name in closed}
    while more := {name for name in made.keys() - names if made[name] & names}:
        names |= more
    for name in made.keys() & names:
        yield from ((schema, name) for schema in (_SHARED, "temp"))


def refuse_trigger(tokens: list[Token], *, is_admin: bool) -> None:
    """Refuse CREATE TRIGGER of a user.

    The engine runs a trigger in the session of the user behind a change, where bare names mean the
    user's tables: a trigger could copy these tables to the trigger's maker.

    Raises:
        RightMissingError: the statement makes a trigger, and the user is no administrator.
    """
    makes = tokens and tokens[0].upper in ("CREATE", "EXPLAIN", "PREPARE")
    for at, token in enumerate(tokens if makes and not is_admin else ()):
        if token.upper == "CREATE" and "TRIGGER" in [each.upper for each in tokens[at : at + 5]]:
            raise RightMissingError(
                "permission denied to create a trigger",
                position=token.start + 1,
                hint="A trigger would run with the rights of everybody who changes the table: an "
                "administrator may make it.",
            )


def _uses(text: str, tokens: list[Token], foreign: Set[str]) -> list[TableUse]:
    try:
        return foreign_tables(text, tokens, foreign)
    except SqlError:  # Computed names: UserNames.readers has the view.
        return []


def _words(tokens: list[Token]) -> frozenset[str]:
    """Return the names in a definition, also in texts that functions read names from."""
    found = {name_value(token) for token in tokens if token.kind in NAME_KINDS}
    reads = reads_names(tokens)
    for token in tokens:
        if reads and token.kind is TokenKind.STRING:
            found |= {word.lower() for word in _WORD.findall(string_value(token))}
    return frozenset(found)


def _tables(text: str) -> frozenset[str] | None:
    """Return the names of tables and functions in a statement; None if the parser can't tell."""
    try:
        tree = sqlglot.parse_one(text, read="duckdb")
    except (SqlglotError, RecursionError):
        return None
    if tree is None or tree.find(exp.Command) is not None:
        return None
    found = {table.name.lower() for table in tree.find_all(exp.Table)}
    return frozenset(found | {each.name.lower() for each in tree.find_all(exp.Anonymous)})
