"""What roles own in the embedded database, and rights that follow tables through DROP and RENAME.

Used by the sessions (dbfront/statement/session.py). DuckDB has no users: a front's book says which
role owns a schema, and everything in a schema is the schema's owner's. Rights are kept by name, so
each statement that may drop or rename tables is followed by a look at the catalogue.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from tierkv.dbfront.contracts import TableAccess
from tierkv.dbfront.databases.duckdb_connection import DuckDbConnection
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.access import PUBLIC, Rights, RightsBook
from tierkv.kvcore.errors import RightMissingError, SqlError, TierKVError
from tierkv.sql.cluster_command import ClusterCommand
from tierkv.sql.jobs.job_tables import SCHEMA as JOBS
from tierkv.sql.schema_rights import SHARED_SCHEMAS, foreign_tables, made_schema, table_refused
from tierkv.sql.text.lexer import Token, name_value
from tierkv.sql.view_rights import (
    UserNames,
    ViewName,
    closed_temporary,
    closed_views,
    made_temporary,
    made_view,
    named_view,
    refuse_trigger,
)

_MOST_NAMED: Final = 20
"""Objects named in the detail of an error."""
_OWNERS: Final = {
    "jobs": ("AI job", "job"),
    "ai_tables": ("AI table", "name"),
    "kv_indexes": ("KV index", "name"),
}
_JOB_TABLES: Final = (
    *_OWNERS, "parts", "ai_rows", "kv_index_texts", "kv_index_progress", "kv_index_times",
    "failures",
)  # fmt: skip
_PATH_VERBS: Final = frozenset({"SET", "RESET", "PRAGMA", "USE"})
_PATH: Final = "SELECT current_setting('search_path')"
_HERE: Final = "WHERE NOT internal AND database_name = current_database()"
_NUMBERED: Final = (
    f"SELECT lower(schema_name) || '.' || lower(table_name), 't', table_oid FROM duckdb_tables() "
    f"{_HERE} UNION ALL SELECT lower(schema_name) || '.' || lower(view_name), 'v', view_oid "
    f"FROM duckdb_views() {_HERE} UNION ALL SELECT lower(schema_name) || '.*', 's', 0 "
    "FROM duckdb_schemas() WHERE database_name = current_database()"
)
_VERBS: Final = frozenset({"DROP", "ALTER", "CREATE"})
_OBJECTS: Final = (
    ("table", "table_name", "duckdb_tables"),
    ("view", "view_name", "duckdb_views"),
    ("sequence", "sequence_name", "duckdb_sequences"),
    ("type", "type_name", "duckdb_types"),
    ("function", "function_name", "duckdb_functions"),
)


class NamedObject(NamedTuple):
    """A table, view or schema in the catalogue: ``kind`` is t, v or s; ``number`` DuckDB's."""

    kind: str
    number: int


class GrantedTables:
    """Tables with rights, followed through the statements of a session's transaction.

    Attributes:
        moved: by the name at the begin of the transaction: the name now, or None if dropped.
    """

    def __init__(self, connection: DuckDbConnection) -> None:
        self.moved: dict[str, str | None] = {}
        self._connection = connection

    async def look(self, rights: Rights) -> dict[str, NamedObject]:
        """Return the catalogue as the session sees it; empty without any right on a table."""
        if not any(own.tables or own.owns for own in rights.roles.values()):
            return {}
        rows = (await self._connection.command(_NUMBERED)).rows
        return {str(name): NamedObject(str(kind), int(number)) for name, kind, number in rows}

    async def follow(self, before: dict[str, NamedObject], rights: Rights, verb: str) -> None:
        """Note what a statement did to the tables with rights.

        A view that is replaced keeps its rights, as in PostgreSQL; a table that is replaced is
        another table. A table keeps its number under another name.

        Args:
            before: the catalogue before the statement.
            rights: the rights of all roles.
            verb: first word of the statement, in upper case.
        """
        after = await self.look(rights)
        names = {known: name for name, known in after.items() if known.kind != "s"}
        for granted in _granted(rights):
            now = self.moved.get(granted, granted)
            known = before.get(now) if now is not None else None
            if now is None or known is None:
                continue
            left = after.get(now)
            same = left is not None and left.kind == known.kind
            if same and (verb != "CREATE" or known.kind != "t" or left == known):
                continue
            self.moved[granted] = names.get(known)

    def remember(self) -> Callable[[], None]:
        """Return a function that goes back to the present state, for a savepoint."""
        kept = dict(self.moved)

        def restore() -> None:
            self.moved = dict(kept)

        return restore

    def take(self) -> dict[str, str | None]:
        """Return the names that changed, and begin anew."""
        changed = {name: new for name, new in self.moved.items() if name != new}
        self.moved = {}
        return changed


class SchemaOwners:
    """Holds a session to its own schemas, and drops or keeps what roles own."""

    def __init__(self, connection: DuckDbConnection) -> None:
        self._connection = connection
        self._seen: Rights | None = None
        self._temporary: dict[str, frozenset[str]] = {}
        self._closed: tuple[Rights, UserNames, frozenset[ViewName]] | None = None

    async def check(
        self,
        sql: str,
        tokens: list[Token],
        *,
        user: str,
        book: RightsBook,
        runs: bool,
        leaves: bool,
    ) -> None:
        """Refuse other users' tables.

        Args:
            sql: one statement.
            tokens: its tokens.
            user: runs the statement.
            book: the rights.
            runs: False: the client asks for columns only; any right on a table is enough.
            leaves: the engine takes statements, so the search path may be changed.

        Raises:
            RightMissingError: a table was not granted to the user, or a schema is another user's.
        """
        made = made_schema(tokens)
        if made is not None and not book.owns_schema(user, name_value(made).lower()):
            raise RightMissingError(
                f"permission denied to create schema {name_value(made)}",
                position=made.start + 1,
                hint=f'A schema belongs to the user or role of its name: CREATE SCHEMA "{user}".',
            )
        refuse_trigger(tokens, is_admin=book.is_admin(user))
        names = await self._connection.user_names()
        others = book.foreign_schemas(user, names.schemas)
        if self._seen is not book.rights and leaves:
            # A schema that was the user's when the path was set may be another's now; and
            # whatever a statement wrote, the path that the engine made of the text counts.
            self._seen = book.rights
            ((path,),) = (await self._connection.command(_PATH)).rows
            words = {word.strip('" ').lower() for word in re.split(r"[,.]", str(path))}
            if not words.isdisjoint(others):
                await self._connection.enter_schema("main")
        if tokens and tokens[0].upper in _PATH_VERBS:
            self._seen = None  # The next statement looks at the path that this one leaves.
        uses = foreign_tables(sql, tokens, others, names.readers)
        for use in uses:
            held = book.table_privileges(user, use.schema, use.table)
            granted = held >= use.privileges or (bool(held) and not runs)
            if not use.privileges or not granted:
                raise table_refused(use, user)
        if uses:
            await self._refuse_without_owner(tokens)
        if others and tokens:
            self._refuse_closed_view(sql, tokens, book, names, others)

    async def _refuse_without_owner(self, tokens: list[Token]) -> None:
        """Refuse a view over another user's table without an owner to hold the right."""
        made = made_view(tokens)
        if made is None:
            return
        schema, temporary = made
        if not schema and not temporary:
            ((schema,),) = (await self._connection.command("SELECT current_schema()")).rows
        if temporary or str(schema).lower() in SHARED_SCHEMAS:
            raise RightMissingError(
                "a view over another user's table needs an owner",
                position=tokens[0].start + 1,
                hint="Make the view in your own schema, and GRANT SELECT on it. Schema main, and "
                "temporary views, belong to no user.",
            )

    def _refuse_closed_view(
        self,
        sql: str,
        tokens: list[Token],
        book: RightsBook,
        names: UserNames,
        others: AbstractSet[str],
    ) -> None:
        """Refuse a view with tables that are closed to the view's owner by now."""
        known = self._closed
        if known is None or known[0] is not book.rights or known[1] is not names:
            closed = closed_views(names.views, lambda schema, table: _reads(book, schema, table))
            known = self._closed = book.rights, names, closed
        closed = known[2]
        temporary = made_temporary(tokens)
        if temporary is not None:
            self._temporary[temporary[0]] = temporary[1]
        if closed and self._temporary:
            closed |= frozenset(closed_temporary(self._temporary, closed))
        found = named_view(sql, tokens, closed, others) if closed else None
        if found is not None:
            token, (_, view) = found
            raise RightMissingError(
                f"permission denied for a table of view {view}",
                position=token.start + 1,
                hint="The owner of the view may not read the table any more: the table's owner "
                "grants SELECT on it again, or the view is dropped.",
            )

    async def change(self, command: ClusterCommand, schemas: AbstractSet[str]) -> frozenset[str]:
        """Do the part of DROP ROLE, DROP OWNED or REASSIGN OWNED in the database.

        Args:
            command: the statement; the user may run it.
            schemas: of the roles, in lower case, whether they exist or not.

        Returns:
            changed: the schemas that existed.

        Raises:
            SqlError: 2BP01, a role to be dropped owns something; 42710, the new owner has a job of
                the same name.
        """
        assert command.right is not None, "the statement names roles"
        roles = command.right.roles
        known = (await self._connection.user_names()).schemas
        there = frozenset(schemas & known)
        if command.verb == "REASSIGN OWNED":
            await self._give(roles, command.right.names[0])
            return there
        if command.verb == "DROP":
            await self._refuse_owned(command.name, there, roles)
        # The user's own schema stays, empty, for sessions that are open.
        kept = {role.lower() for role in roles} if command.verb == "DROP OWNED" else set()
        await self._in_transaction(
            *(f"DROP SCHEMA {_quoted(each)} CASCADE" for each in there),
            *(f"CREATE SCHEMA {_quoted(each)}" for each in there & kept),
            *(await self._of_jobs(f"DELETE FROM {JOBS}.{{}} WHERE {_among('owner', roles)}")),
        )
        return there

    async def _give(self, roles: Iterable[str], owner: str) -> None:
        """Make jobs, AI tables and KV indexes another role's."""
        own = await self._own_jobs((owner,))
        same = sorted(set(own) & set(await self._own_jobs(tuple(set(roles) - {owner}))))
        if same:
            raise SqlError(
                f'role "{owner}" already has {same[0]}',
                sqlstate="42710",
                hint="Drop one of the two first.",
            )
        change = f"UPDATE {JOBS}.{{}} SET owner = {_text(owner)} WHERE {_among('owner', roles)}"
        await self._in_transaction(*(await self._of_jobs(change)))

    async def _refuse_owned(
        self, role: str, schemas: AbstractSet[str], roles: Iterable[str]
    ) -> None:
        found = [*await self._objects(schemas), *await self._own_jobs(roles)]
        if not found:
            return
        more = len(found) - _MOST_NAMED
        lines = [f"owner of {each}" for each in found[:_MOST_NAMED]]
        raise SqlError(
            f'role "{role}" cannot be dropped because some objects depend on it',
            sqlstate="2BP01",
            detail="\n".join([*lines, *([f"and {more} other objects"] if more > 0 else [])]),
            hint=f'REASSIGN OWNED BY "{role}" TO another role, or DROP OWNED BY "{role}", first.',
        )

    async def _objects(self, schemas: AbstractSet[str]) -> list[str]:
        """Return what is in some schemas, as text."""
        if not schemas:
            return []
        texts = (
            f"SELECT DISTINCT '{kind} ' || schema_name || '.' || {name} FROM {table}() "
            f"WHERE database_name = current_database() AND {_among('lower(schema_name)', schemas)}"
            for kind, name, table in _OBJECTS
        )
        rows = (await self._connection.command(" UNION ALL ".join(texts) + " ORDER BY 1")).rows
        return [str(text) for (text,) in rows]

    async def _own_jobs(self, roles: Iterable[str]) -> list[str]:
        found: list[str] = []
        for table, (kind, name) in _OWNERS.items():
            text = f"SELECT '{kind} ' || {name} FROM {JOBS}.{table} WHERE {_among('owner', roles)}"
            for one in await self._of_jobs(text, (table,)):
                found += [str(row[0]) for row in (await self._connection.command(one)).rows]
        return sorted(found)

    async def _of_jobs(self, text: str, tables: Iterable[str] = _JOB_TABLES) -> list[str]:
        """Return a statement for each table of jobs; none before the first job."""
        query = f"SELECT table_name FROM duckdb_tables() WHERE schema_name = '{JOBS}'"
        there = {name for (name,) in (await self._connection.command(query)).rows}
        return [text.format(table) for table in tables if table in there]

    async def _in_transaction(self, *texts: str) -> None:
        if not texts:
            return
        await self._connection.settle("BEGIN TRANSACTION")
        try:
            for text in texts:
                await self._connection.command(text)
            await self._connection.settle("COMMIT")
        except BaseException:
            with suppress(SqlError):  # A COMMIT that failed has ended the transaction.
                await self._connection.settle("ROLLBACK")
            raise
        finally:
            self._connection.engine_changes.schema += 1


class SessionSchemas:
    """Rights of a session where users log in, and changes of rights by the session's statements.

    Without logins each method is a no-op.
    """

    def __init__(
        self,
        connection: DuckDbConnection,
        user: str,
        access: Callable[[], TableAccess | None],
        move: Callable[[Mapping[str, str | None]], Awaitable[None]],
    ) -> None:
        """Follow a session.

        Args:
            connection: the session's connection.
            user: whose session.
            access: returns which schemas the user may use now; None: nobody logs in.
            move: gives tables' rights to their new names, or takes the rights of dropped tables;
                NoNodeError if the meta server is away.
        """
        self._connection = connection
        self._user = user
        self._access = access
        self._move = move
        self._granted = GrantedTables(connection)
        self._owners = SchemaOwners(connection)
        self.remember = self._granted.remember

    @property
    def owned_change(self) -> Callable[..., Awaitable[frozenset[str]]] | None:
        """SchemaOwners.change, for statements about roles; None without logins."""
        return None if self._access() is None else self._owners.change

    async def check(self, sql: str, tokens: list[Token], *, runs: bool, leaves: bool) -> None:
        """Refuse other users' tables; see SchemaOwners.check."""
        access = self._access()
        if access is not None and access.book is not None:
            await self._owners.check(
                sql, tokens, user=self._user, book=access.book, runs=runs, leaves=leaves
            )

    async def enter_own(self, owns: Callable[[str], bool]) -> bool:
        """Look names up in the schema of the user first, if the schema exists; True if it does.

        Args:
            owns: tells whether the user owns a schema.
        """
        access, name = self._access(), self._user.lower()
        if access is None or name in SHARED_SCHEMAS or not owns(name):
            return False
        there = name in (await self._connection.user_names()).schemas
        if not there and access.has_schema:
            there = await self._connection.make_schema(self._user)
        if there:
            await self._connection.enter_schema(self._user)
        return there

    @asynccontextmanager
    async def following(
        self, tokens: list[Token], rights_of_all: Callable[[], Rights]
    ) -> AsyncIterator[None]:
        """Run a statement, and note which tables the statement dropped or renamed.

        Args:
            tokens: the statement.
            rights_of_all: returns the rights of all roles; asked only where users log in.
        """
        verb = names_change(tokens) if self._access() is not None else ""
        if not verb:
            yield
            return
        rights = rights_of_all()
        before = await self._granted.look(rights)
        yield
        if before:
            await self._granted.follow(before, rights, verb)

    async def settle(self) -> tuple[Notice, ...]:
        """Let rights follow a statement outside a transaction; a notice tells a failure."""
        moved = self._granted.take()
        if not moved:
            return ()
        try:
            await self._move(moved)
        except TierKVError as error:
            text = f"rights on {', '.join(sorted(moved))} could not be changed: {error.message}"
            return (Notice("WARNING", text, hint="REVOKE them before a new table has the name."),)
        return ()

    @asynccontextmanager
    async def ending(self, *, commits: bool) -> AsyncIterator[None]:
        """End a transaction: rights follow the tables ahead of a COMMIT, and back if it fails."""
        moved = self._granted.take()
        if not commits or not moved:
            yield
            return
        await self._move(moved)
        try:
            yield
        except BaseException:
            await self._move({new: old for old, new in moved.items() if new is not None})
            raise


def names_change(tokens: list[Token]) -> str:
    """Return the verb of a statement that may drop or rename tables; empty for all others.

    EXPLAIN ANALYZE runs its statement.
    """
    words = [token.upper for token in tokens[:12]]
    if words[:1] == ["EXPLAIN"]:
        words = words[next((at for at, word in enumerate(words) if word in _VERBS), len(words)) :]
    changes = bool(words) and (words[0] != "CREATE" or "REPLACE" in words[:3])
    return words[0] if changes and words[0] in _VERBS else ""


def _reads(book: RightsBook, owned: str, table: ViewName) -> bool:
    """Return whether the owner of a schema, a role or a member, may read a table."""
    if owned == table[0]:
        return True
    members = (
        role
        for role in book.rights.roles
        if role != PUBLIC and not book.is_admin(role) and book.owns_schema(role, owned)
    )
    return any(
        book.owns_schema(role, table[0]) or "SELECT" in book.table_privileges(role, *table)
        for role in (owned, *members)
    )


def _granted(rights: Rights) -> Iterator[str]:
    """Yield the names that rights are about; a schema of another role's name is one too."""
    yield from {name for own in rights.roles.values() for name in own.tables}
    yield from {f"{schema}.*" for schema in rights.reassigned}


def _among(column: str, names: Iterable[str]) -> str:
    return f"{column} IN ({', '.join(map(_text, sorted(names)))})"


def _text(value: str) -> str:
    escaped = value.replace("'", "''")
    return f"'{escaped}'"


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
