"""Which tables of other users a statement of the embedded database uses, and for what.

Pure. A schema belongs to the user or role with the schema's name, and ``main`` to all users. DuckDB
has no rights, hence a front checks each statement before the engine (dbfront/statement/session.py).
A statement reaches a table of another schema only by the schema's name: in front of a dot, in a
search path, or in text for a function. Statements without the name pass at once. In the rest the
parser tells tables from columns; if the parser can't explain each name, the check refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from tierkv.kvcore.errors import RightMissingError, SqlError, SqlSyntaxError
from tierkv.sql.plan.explain_options import explain_options
from tierkv.sql.text.lexer import (
    Token,
    TokenKind,
    closing_index,
    depth_change,
    has_codes,
    name_value,
    string_value,
    tokenize,
)
from tierkv.sql.text.statement import StatementKind, classify

PRIVILEGES: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
"""What can be granted on a table, in the order of PostgreSQL's documentation."""

SHARED_SCHEMAS: Final = frozenset(
    {"main", "public", "temp", "pg_catalog", "information_schema", "tierkv", "tierkv_pg"}
)
"""Schemas with rules of their own, or none."""

NAME_KINDS: Final = (TokenKind.WORD, TokenKind.QUOTED)
_PARSED: Final = frozenset(
    {StatementKind.QUERY, StatementKind.INSERT, StatementKind.UPDATE, StatementKind.DELETE}
    | {StatementKind.MERGE, StatementKind.CREATE_TABLE_AS}
)
_READS_NAMES: Final = re.compile(
    r"query|query_table|json_execute_serialized_sql|json_serialize_plan|pragma_storage_info"
    r"|nextval|currval|setval|duckdb_table_sample|histogram|histogram_values"
)
"""Functions that use what a text names; names and types of columns are no secret."""
_HISTOGRAMS: Final = frozenset({"histogram", "histogram_values"})
"""In FROM they read the table that the first argument names, in any form; ``histogram`` in a select
list is an aggregate."""
_CLAUSES: Final = frozenset(
    {"SELECT", "WHERE", "GROUP", "HAVING", "QUALIFY", "ORDER", "LIMIT", "SET"}
)
_TABLES: Final = frozenset(
    {"FROM", "JOIN", "USING", "INTO", "CALL", "PIVOT", "UNPIVOT", "SUMMARIZE"}
)
_PATHS: Final = frozenset({"schema", "search_path"})
_WHOLE_DATABASE: Final = (["COPY", "FROM", "DATABASE"], ["PRAGMA", "COPY_DATABASE", "("])
_READS: Final = frozenset({"SELECT"})
QUOTE: Final = '"'


@dataclass(frozen=True, slots=True)
class TableUse:
    """A table of another user's schema, and the privileges needed.

    Attributes:
        schema, table: in lower case.
        privileges: some of PRIVILEGES; empty: only the owner may do this.
        position: in the statement, counted in characters from 1.
    """

    schema: str
    table: str
    privileges: frozenset[str]
    position: int


def name_readers(definitions: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the views and macros with computed names of tables, also through each other.

    Args:
        definitions: name and text of each view and macro.
    """
    left = [(name, tokenize(text)) for name, text in definitions]
    readers: set[str] = set()
    grows = True
    while grows:
        found = {name for name, tokens in left if _computed(tokens, frozenset(), readers)}
        grows = bool(found - readers)
        readers |= found
    return frozenset(readers)


def foreign_tables(
    text: str, tokens: list[Token], foreign: Set[str], readers: Set[str] = frozenset()
) -> list[TableUse]:
    """Return the tables of other users' schemas in a statement.

    Args:
        text: one statement.
        tokens: its tokens.
        foreign: the schemas of others, in lower case.
        readers: views and macros with computed names of tables.

    Raises:
        SqlError: 42501, a use of names beyond the check.
    """
    if not tokens:
        return []
    # What is made now may be used when there are other users' schemas.
    if foreign or tokens[0].upper in ("CREATE", "PREPARE"):
        _refuse_computed(tokens, foreign, readers)
    if not foreign:
        return []
    options = _explained(tokens)
    if options:
        text, tokens = text[tokens[options].start :], tokens[options:]
    verb = tokens[0].upper
    copies = [token.upper for token in tokens[:3]] in _WHOLE_DATABASE
    if copies or verb in ("EXPORT", "IMPORT"):
        return [TableUse(min(foreign), "", frozenset(), tokens[0].start + 1)]
    if verb in ("SET", "RESET", "PRAGMA", "USE"):
        return [*_in_path(tokens, foreign), *_in_value(text, tokens, foreign, readers)]
    of_schemas = [token.upper for token in tokens[1:4] if token.kind is TokenKind.WORD]
    if verb in ("DROP", "ALTER") and "SCHEMA" in of_schemas:
        return [_owned(token, token) for token in tokens if _is_named(token, foreign)]
    places = [
        at
        for at, token in enumerate(tokens[:-1])
        if tokens[at + 1].text == "." and _is_named(token, foreign)
    ]
    if not places:
        return []
    if _reads_tables(tokens):
        uses = _parsed(text, tokens, places, foreign)
        if uses is not None:
            return uses
    return [_owned(tokens[at], tokens[min(at + 2, len(tokens) - 1)]) for at in places]


def table_refused(use: TableUse, user: str) -> RightMissingError:
    """Return the error of a use without the right."""
    if use.privileges and use.table:
        needed = ", ".join(each for each in PRIVILEGES if each in use.privileges)
        return RightMissingError(
            f"permission denied for table {use.table}",
            position=use.position,
            hint=f"The owner of schema {use.schema} runs GRANT {needed} ON "
            f'{use.schema}.{use.table} TO "{user}".',
        )
    return RightMissingError(
        f"permission denied for schema {use.schema}",
        position=use.position,
        hint="It belongs to the user or role of its name. SELECT, INSERT, UPDATE and DELETE can be "
        "granted on its tables.",
    )


def made_schema(tokens: list[Token]) -> Token | None:
    """Return the name in CREATE SCHEMA; None for any other statement."""
    if len(tokens) < 3 or tokens[0].upper != "CREATE":
        return None
    words = [token.upper for token in tokens[:4]]
    if "SCHEMA" not in words:
        return None
    rest = tokens[words.index("SCHEMA") + 1 :]
    if [token.upper for token in rest[:3]] == ["IF", "NOT", "EXISTS"]:
        rest = rest[3:]
    if len(rest) > 2 and rest[1].text == ".":
        rest = rest[2:]
    return rest[0] if rest and rest[0].kind in NAME_KINDS else None


def _explained(tokens: list[Token]) -> int:
    """Return where the statement inside an EXPLAIN begins; 0 for any other statement."""
    try:
        options = explain_options(tokens)
    except SqlSyntaxError:
        return 0
    return 0 if options is None else options.start


def _is_named(token: Token, foreign: Set[str]) -> bool:
    return token.kind in NAME_KINDS and name_value(token).lower() in foreign


def _owned(schema: Token, table: Token) -> TableUse:
    return TableUse(
        name_value(schema).lower(),
        "" if table is schema or table.kind not in NAME_KINDS else name_value(table).lower(),
        frozenset(),
        schema.start + 1,
    )


def _in_path(tokens: list[Token], foreign: Set[str]) -> Iterator[TableUse]:
    """Find other users' schemas in a search path: bare names would mean their tables."""
    words = [name_value(token).lower() for token in tokens if token.kind in NAME_KINDS]
    if tokens[0].upper not in ("USE", "PRAGMA") and _PATHS.isdisjoint(words):
        return
    for token in tokens[1:]:
        named = token.kind is TokenKind.QUOTED and any(
            has_word(name_value(token), name) for name in foreign
        )
        if named or _is_named(token, foreign) or _mentions(token, foreign):
            yield TableUse(_first(token, foreign), "", frozenset(), token.start + 1)


def _in_value(
    text: str, tokens: list[Token], foreign: Set[str], readers: Set[str]
) -> Iterator[TableUse]:
    """Find other users' tables in SET VARIABLE, whose value may come from a query."""
    if "VARIABLE" not in [token.upper for token in tokens[:3]]:
        return
    at = next(
        (at for at, token in enumerate(tokens) if token.upper in ("=", "TO", ":=")), len(tokens)
    )
    if at + 1 < len(tokens):
        begin, select = tokens[at + 1].start, "SELECT "
        query = select + text[begin:]
        for use in foreign_tables(query, tokenize(query), foreign, readers):
            yield replace(use, position=use.position + begin - len(select))


def _first(token: Token, foreign: Set[str]) -> str:
    text = string_value(token) if token.kind is TokenKind.STRING else name_value(token)
    return next((name for name in sorted(foreign) if has_word(text, name)), text)


def _mentions(token: Token, foreign: Set[str]) -> bool:
    """Return whether a text has the name of another user's schema, or might have."""
    if token.kind is not TokenKind.STRING:
        return False
    return has_codes(token) or any(has_word(string_value(token), name) for name in foreign)


def has_word(text: str, name: str) -> bool:
    """Return whether a text has a name, also in pieces with quotes between them.

    The engine reads ``ali""ce`` in a search path, or in a name that a text holds, as ``alice``.
    """
    word = re.compile(rf"(?<![\w$]){re.escape(name.replace(QUOTE, ''))}(?![\w$])", re.I)
    return any(word.search(each) is not None for each in (text, text.replace(QUOTE, "")))


def reads_names(tokens: list[Token]) -> bool:
    """Return whether a statement calls a function with names of tables in texts."""
    return any(
        token.kind in NAME_KINDS and _READS_NAMES.fullmatch(name_value(token)) is not None
        for token in tokens
    )


def _refuse_computed(tokens: list[Token], foreign: Set[str], readers: Set[str]) -> None:
    """Refuse names of tables in text, if the text is computed or names another user's schema."""
    token = _computed(tokens, foreign, readers)
    if token is None:
        return
    raise SqlError(
        f"{name_value(token)} may not read names of other users' tables",
        sqlstate="42501",
        position=token.start + 1,
        hint="Write the name of a table of yours as one text constant.",
    )


def _computed(tokens: list[Token], foreign: Set[str], readers: Set[str]) -> Token | None:
    """Return the first name of a function or view with access to other users' tables, or None."""
    for at, token in enumerate(tokens):
        if token.kind not in NAME_KINDS:
            continue
        name = name_value(token).lower()
        if name in readers:
            return token
        called = at + 1 < len(tokens) and tokens[at + 1].text == "("
        if not called or not _READS_NAMES.fullmatch(name):
            continue
        if name in _HISTOGRAMS and not _is_table(tokens, at):
            continue
        try:
            inside = tokens[at + 2 : closing_index(tokens, at + 1)]
        except SqlSyntaxError:
            inside = tokens[at + 2 :]
        if name in _HISTOGRAMS:
            inside = _first_argument(inside)
        if not _is_plain(name, inside, foreign, readers):
            return token
    return None


def _is_table(tokens: list[Token], at: int) -> bool:
    """Return whether a call may be a table in FROM, by the nearest clause before it."""
    depth = 0
    for token in reversed(tokens[:at]):
        if token.text in (")", "("):
            depth = max(0, depth + (1 if token.text == ")" else -1))
        elif depth == 0 and token.kind is TokenKind.WORD and token.upper in _CLAUSES | _TABLES:
            return token.upper in _TABLES
    return True


def _first_argument(inside: list[Token]) -> list[Token]:
    """Return the first argument of a call; all, if arguments have names."""
    if any(token.text in (":=", "=>", ":", "=") for token in inside):
        return inside
    depth = 0
    for at, token in enumerate(inside):
        depth += depth_change(token)
        if token.text == "," and depth == 0:
            return inside[:at]
    return inside


def _is_plain(function: str, inside: list[Token], foreign: Set[str], readers: Set[str]) -> bool:
    """Return whether arguments are constants and lead to no other user's schema."""
    if function == "json_execute_serialized_sql":
        return False
    if not inside or not all(
        each.kind is TokenKind.STRING or each.text in ("[", "]", ",") for each in inside
    ):
        return False
    if any(_mentions(each, foreign) for each in inside):
        return False
    runs = function in ("query", "json_serialize_plan")
    texts = [string_value(each) for each in inside if runs]
    return all(_computed(tokenize(text), foreign, readers) is None for text in texts)


def _reads_tables(tokens: list[Token]) -> bool:
    kind = classify(tokens)
    words = [token.upper for token in tokens[:6]]
    makes_view = kind is StatementKind.CREATE and "VIEW" in words
    return (kind in _PARSED or makes_view) and not any(
        token.upper == "TABLE" and token.kind is TokenKind.WORD and at != 1
        for at, token in enumerate(tokens)
        if kind is not StatementKind.CREATE_TABLE_AS
    )


def _parsed(
    text: str, tokens: list[Token], places: list[int], foreign: Set[str]
) -> list[TableUse] | None:
    """Return the uses found by the parser; None if a name is neither a table's nor a column's."""
    try:
        tree = sqlglot.parse_one(text, read="duckdb")
    except (SqlglotError, RecursionError):
        return None
    if tree is None or tree.find(exp.Command) is not None:
        return None
    writes = dict(_writes(tree))
    found: list[TableUse] = []
    columns = 0
    for node in tree.find_all(exp.Table, exp.Column):
        if isinstance(node, exp.Column):
            columns += sum(part.lower() in foreign for part in (node.table, node.db))
        elif isinstance(node, exp.Table) and node.db.lower() in foreign:
            needed = writes.get(id(node), _READS if node.name else frozenset())
            schema, table = node.db.lower(), node.name.lower()
            found.append(TableUse(schema, table, needed, _position(tokens, places, schema, table)))
    return found if len(found) + columns == len(places) else None


def _position(tokens: list[Token], places: list[int], schema: str, table: str) -> int:
    for at in places:
        after = tokens[at + 2] if at + 2 < len(tokens) else tokens[at]
        if (name_value(tokens[at]).lower(), name_value(after).lower()) == (schema, table):
            return tokens[at].start + 1
    return 0


def _writes(tree: exp.Expr) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield the targets of writing statements, and the privileges needed on them."""
    for node in tree.find_all(exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.Create):
        target = node.this.this if isinstance(node.this, exp.Schema) else node.this
        if not isinstance(target, exp.Table):
            continue
        reads = {"SELECT"} if node.args.get("where") or node.args.get("returning") else set()
        if isinstance(node, exp.Update) and _reads_target(node, target):
            reads = {"SELECT"}
        if isinstance(node, exp.Insert):
            replaces = node.args.get("conflict") or node.args.get("alternative")
            needed = {"INSERT", *(("UPDATE", "SELECT") if replaces else ())}
        elif isinstance(node, exp.Update):
            needed = {"UPDATE"}
        elif isinstance(node, exp.Delete):
            needed = {"DELETE"}
        elif isinstance(node, exp.Merge):
            needed = set(PRIVILEGES)
        else:
            yield id(target), frozenset()  # To make or replace a table is the owner's.
            continue
        yield id(target), frozenset(needed | reads)


def _reads_target(update: exp.Update, target: exp.Table) -> bool:
    """Return whether the new values of an UPDATE may read the table: an error could show a value.

    Columns without the name of a table count as the table's own.
    """
    own = {"", target.alias_or_name.lower(), target.name.lower()}
    for each in update.expressions:
        value = each.expression if isinstance(each, exp.EQ) else each
        if value.find(exp.Star, exp.Columns) is not None:
            return True
        for column in value.find_all(exp.Column):
            if column.table.lower() in own and column.sql().upper() != "DEFAULT":
                return True
    return False
