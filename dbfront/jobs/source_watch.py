"""How a KV index or an AI table hears of changes of its tables, on either database.

dbfront/jobs/kv_indexes.py and ai_tables.py use the watch of the client's session. Over the
embedded database all statements pass through the front, which notes the tables named in them.
Behind PostgreSQL a trigger on each table notifies CHANNEL, and one front listens
(tierkv/parts/postgres_keepers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import md5
from typing import Final, Protocol

from tierkv.dbfront.jobs.embedded_jobs import WriteMark, WrittenTables
from tierkv.dbfront.jobs.job import JobSession
from tierkv.sql.jobs.job_statement import literal
from tierkv.sql.jobs.job_tables import CHANNEL, TELL_CHANGE
from tierkv.sql.text.lexer import name_value, tokenize

TABLES_CHANGED: Final = ""
"""Payload after a change of AI tables; a changed table has the digest of what depends on it."""

TABLE_DIGEST: Final = "t_"
"""Beginning of the digest of an AI table; that of an index has hexadecimal digits only."""


@dataclass(frozen=True, slots=True)
class WatchedSource:
    """The table of an index, or one of the tables that an AI table reads.

    Attributes:
        owner: of the index.
        name: of the index.
        source: the table as written.
        by_table: an AI table reads the source.
    """

    owner: str
    name: str
    source: str
    by_table: bool = False

    @property
    def digest(self) -> str:
        """Short name of the index, for payloads and triggers."""
        return (TABLE_DIGEST if self.by_table else "") + source_digest(self.owner, self.name)


def source_digest(owner: str, name: str) -> str:
    """Return the payload of changes under an index; equals SQL's ``md5(owner || '/' || name)``.

    The payload of an AI table has TABLE_DIGEST in front.
    """
    return md5(f"{owner}/{name}".encode(), usedforsecurity=False).hexdigest()


class SourceWatch(Protocol):
    """The changes of tables.

    1. ``why_not`` returns why nothing is refreshed in the background here; empty if it is.
    2. ``begin`` makes committed changes of a table wake the index, or returns why they can't. It
       takes part in the session's transaction; ``end`` undoes it, and returns what is left.
    3. ``wake`` has the index looked at soon.
    4. ``present_name`` returns the name of a table that was renamed since the last ``note``, the
       same name if the table is there, or nothing if the table is gone.
    5. ``mark`` comes before a refresh reads a table. With the mark, ``note`` tells that the index
       has all rows that were written before.
    """

    async def why_not(self) -> str: ...

    async def begin(self, watched: WatchedSource) -> str: ...

    async def end(self, watched: WatchedSource) -> str: ...

    async def wake(self, watched: WatchedSource) -> None: ...

    def mark(self, watched: WatchedSource) -> WriteMark | None: ...

    async def note(self, watched: WatchedSource, mark: WriteMark | None = None) -> None: ...

    async def present_name(self, watched: WatchedSource) -> str: ...


async def follow(watch: SourceWatch, owner: str, name: str, sources: Sequence[str]) -> str:
    """Have writes to the tables of an AI table wake the table; return why they can't.

    Takes part in the session's transaction. Earlier triggers of the table go first.
    """
    why = await watch.why_not()
    await unfollow(watch, owner, name)
    for source in sources:
        why = why or await watch.begin(WatchedSource(owner, name, source, by_table=True))
    if why:
        await unfollow(watch, owner, name)
    return why or ("" if sources else "its query reads what is no table of this database")


async def unfollow(watch: SourceWatch, owner: str, name: str) -> str:
    """Undo ``follow`` for all tables; return what is left."""
    return await watch.end(WatchedSource(owner, name, "", by_table=True))


class EmbeddedWatch:
    """Tables of the embedded database. A table keeps its number when it is renamed."""

    def __init__(self, session: JobSession, written: WrittenTables, *, keeps: bool) -> None:
        """Use a session.

        Args:
            session: of the client.
            written: wakes the keeper.
            keeps: the keeper runs in this process.
        """
        self._session = session
        self._written = written
        self._keeps = keeps

    async def why_not(self) -> str:
        """See SourceWatch."""
        return "" if self._keeps else "no front has this database open"

    async def begin(self, watched: WatchedSource) -> str:
        """See SourceWatch."""
        if not watched.by_table:
            return ""
        rows = await self._session.own(
            "SELECT 1 FROM duckdb_tables() WHERE NOT temporary AND lower(table_name) = "
            f"{literal(table_name(watched.source))} LIMIT 1"
        )
        return "" if rows else f"{watched.source} is no table that lasts"

    async def end(self, watched: WatchedSource) -> str:
        """See SourceWatch."""
        self._written.forget(watched.digest)
        return ""

    async def wake(self, watched: WatchedSource) -> None:
        """See SourceWatch."""
        self._written.wake(watched.digest if watched.by_table else table_name(watched.source))

    def mark(self, watched: WatchedSource) -> WriteMark | None:
        """See SourceWatch."""
        return self._written.mark(table_name(watched.source))

    async def note(self, watched: WatchedSource, mark: WriteMark | None = None) -> None:
        """See SourceWatch."""
        if mark is not None:
            self._written.seen(watched.digest, table_name(watched.source), mark)
        *schemas, table = _parts(watched.source)
        where = f"lower(table_name) = {literal(table)}"
        if schemas:
            where += f" AND lower(schema_name) = {literal(schemas[-1])}"
        rows = await self._session.own(
            f"SELECT table_oid FROM duckdb_tables() WHERE {where} AND database_name = "
            "current_database() ORDER BY list_position(current_schemas(true), schema_name) LIMIT 1"
        )
        for (number,) in rows:
            self._written.numbers[watched.digest] = int(number or 0)

    async def present_name(self, watched: WatchedSource) -> str:
        """See SourceWatch."""
        number = self._written.numbers.get(watched.digest)
        if number is None:
            return ""
        rows = await self._session.own(
            "SELECT schema_name, table_name FROM duckdb_tables() WHERE database_name = "
            f"current_database() AND table_oid = {number}"
        )
        if not rows:
            return ""
        schema, table = (str(part) for part in rows[0])
        if [schema.lower(), table.lower()][-len(_parts(watched.source)) :] == _parts(
            watched.source
        ):
            return watched.source
        return ".".join(f'"{part.replace(chr(34), 2 * chr(34))}"' for part in (schema, table))


class TriggerWatch:
    """Tables of PostgreSQL: a trigger per index, which goes with its table."""

    def __init__(self, session: JobSession, refusal: Callable[[str, str], str]) -> None:
        """Use a session.

        Args:
            session: of the client.
            refusal: returns why indexes of a user and a database are not refreshed by a front.
        """
        self._session = session
        self._refusal = refusal

    async def why_not(self) -> str:
        """See SourceWatch."""
        ((database,),) = await self._session.own("SELECT current_database()")
        return self._refusal(self._session.user, database or "")

    async def begin(self, watched: WatchedSource) -> str:
        """See SourceWatch."""
        source = watched.source
        ((kind, lasts, may, has),) = await self._session.own(
            "SELECT relkind, CAST(relpersistence <> 't' AS text), "
            "CAST(pg_catalog.has_table_privilege(oid, 'TRIGGER') AS text), "
            f"CAST(EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = c.oid AND tgname = "
            f"{literal(_trigger(watched))}) AS text) FROM pg_catalog.pg_class c "
            f"WHERE oid = CAST({literal(source)} AS pg_catalog.regclass)"
        )
        if kind not in ("r", "p"):
            return f"{source} is no table, so it has no triggers"
        if lasts != "true":
            return f"{source} is a temporary table, which no front sees"
        if has == "true":  # An earlier index left it.
            return ""
        if may != "true":
            return f"{self._session.owner} has no privilege TRIGGER on {source}"
        # Statement triggers of a partitioned table miss statements that name a partition.
        level = "STATEMENT" if kind == "r" else "ROW"
        events = "INSERT OR UPDATE OR DELETE"
        for name, event, each in (
            (_trigger(watched), events, level),
            (_trigger(watched) + "_t", "TRUNCATE", "STATEMENT"),
        ):
            await self._session.own(
                f"CREATE TRIGGER {name} AFTER {event} ON {source} FOR EACH {each} "
                f"EXECUTE FUNCTION {TELL_CHANGE}({literal(watched.digest)})"
            )
        return ""

    async def end(self, watched: WatchedSource) -> str:
        """See SourceWatch."""
        found = await self._session.own(
            "SELECT t.tgname, CAST(CAST(t.tgrelid AS pg_catalog.regclass) AS text), "
            "CAST(pg_catalog.pg_has_role(c.relowner, 'USAGE') AS text) FROM pg_catalog.pg_trigger "
            "t JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid WHERE t.tgparentid = 0 "
            f"AND {self._ours(watched)}"
        )
        left = [(name, table) for name, table, may in found if may != "true"]
        for name, table, may in found:
            if may == "true":
                await self._session.own(f"DROP TRIGGER {name} ON {table}")
        if not left:
            return ""
        return f"the owner of {left[0][1]} may drop its triggers {left[0][0]} and {left[-1][0]}"

    async def wake(self, watched: WatchedSource) -> None:
        """See SourceWatch."""
        await self._session.own(
            f"SELECT pg_catalog.pg_notify('{CHANNEL}', {literal(watched.digest)})"
        )

    def mark(self, watched: WatchedSource) -> WriteMark | None:
        """See SourceWatch; triggers do not count rows."""
        return None

    async def note(self, watched: WatchedSource, mark: WriteMark | None = None) -> None:
        """See SourceWatch; the trigger stays with a table that is renamed."""

    async def present_name(self, watched: WatchedSource) -> str:
        """See SourceWatch."""
        found = await self._session.own(
            "SELECT CAST(CAST(tgrelid AS pg_catalog.regclass) AS text), CAST(tgrelid = "
            f"pg_catalog.to_regclass({literal(watched.source)}) AS text) "
            f"FROM pg_catalog.pg_trigger t WHERE tgparentid = 0 AND {self._ours(watched)}"
        )
        for name, is_same in found:
            return watched.source if is_same == "true" else name or ""
        return ""

    def _ours(self, watched: WatchedSource) -> str:
        name = _trigger(watched)
        return f"t.tgname IN ('{name}', '{name}_t')"


def _trigger(watched: WatchedSource) -> str:
    return f"tierkv_{watched.digest}"


def table_name(source: str) -> str:
    """Return the last part of a table's name, in lower case."""
    return _parts(source)[-1]


def _parts(source: str) -> list[str]:
    """Return the parts of a table's name, in lower case."""
    return [name_value(token).lower() for token in tokenize(source) if token.text != "."]
