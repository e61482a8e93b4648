"""AI tables: tables of answers; a refresh asks again only about rows that changed.

Theory of operation. ``tierkv_jobs.ai_rows`` has a fingerprint of each row's inputs when the row was
asked about last: the columns and expressions that the SELECT depends on. A refresh walks the
source in ranges of keys and compares. Keys with another fingerprint, and keys that are gone, lose
their rows of the table; the changed ones are asked about again; the new fingerprints commit with
the new rows. Hence a refresh that is killed leaves a table of right rows, and the next one goes on:
what was done needs no checkpoint. A row that fails by itself has no row in the table and an error
in ``ai_rows``, until its inputs change.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Final

from tierkv.dbfront.jobs.job import AiJob, JobSession
from tierkv.dbfront.jobs.job_errors import JobRemedy, remedy, told
from tierkv.dbfront.jobs.job_runner import set_for_batch, try_again
from tierkv.dbfront.jobs.job_source import JobSource, refuse_transaction, unknown_name
from tierkv.dbfront.jobs.source_watch import SourceWatch, WatchedSource, follow, unfollow
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, TierKVError, UserError
from tierkv.sql.jobs.ai_table_command import (
    MANUAL,
    ON_CHANGE,
    AiTableCommand,
    AiTableOptions,
    ai_table_options,
    source_tables,
)
from tierkv.sql.jobs.job_command import JobOptions
from tierkv.sql.jobs.job_statement import KEY, KeyRange, literal, read_job_statement
from tierkv.sql.jobs.job_tables import SCHEMA

_COMPARED_ROWS: Final = 5_000
"""Fingerprints that the front compares at a time."""

_GONE_COMPARED_ROWS: Final = 50_000
"""Keys that are looked through at a time for those that are gone."""

_FOLLOWED_WAIT_S: Final = 10.0
_LOCK_LOOK_S: Final = 0.1
"""How long REFRESH and DROP wait for the end of another refresh, and the pause between looks."""

FRESH: Final = "fresh"
STALE: Final = "stale"


@dataclass(frozen=True, slots=True)
class AiTable:
    """An AI table.

    Attributes:
        source: its statement, cut like that of a job.
        options: how it is kept.
        key_column: column of the table that has the key.
        path: search path of the session that made it.
    """

    source: AiJob
    options: AiTableOptions
    key_column: str
    path: str

    @property
    def name(self) -> str:
        """The table's name."""
        return self.source.name


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """What a refresh did: rows asked about, rows removed, and rows that failed by themselves."""

    asked: int = 0
    removed: int = 0
    failed: int = 0


class AiTables:
    """The statements about AI tables of one session."""

    def __init__(
        self,
        session: JobSession,
        clock: Clock,
        watch: SourceWatch,
        changed: asyncio.Event | None = None,
        why_not: str = "no front has this database open",
    ) -> None:
        """Use a session.

        Args:
            session: runs the batches.
            clock: for the times of refreshes.
            watch: tells a front about writes to the tables of a query.
            changed: set after a change of the tables; None: nobody refreshes tables here.
            why_not: the reason if ``changed`` is None.
        """
        self._why_not = why_not
        self._session = session
        self._clock = clock
        self._watch = watch
        self._changed = changed
        self._source = JobSource(session)

    async def run(self, command: AiTableCommand) -> StatementResult:
        """Carry out a statement; CREATE and REFRESH return when all rows are right.

        Raises:
            SqlError: 42P07 or 42P01, the table exists already or not; 55006, a refresh runs; 25001,
                inside a transaction; or what the SELECT gives.
        """
        refuse_transaction(self._session, command.tag, "refresh")
        await self._session.prepare()
        try:
            return StatementResult(command.tag, notices=await self._run(command))
        finally:
            if self._changed is not None and command.verb != "REFRESH":
                self._changed.set()

    async def _run(self, command: AiTableCommand) -> tuple[Notice, ...]:
        if command.verb == "CREATE":
            return await self._create(command)
        table = await self._find(command.name)
        if table is None:
            if command.tolerant:
                return ()
            raise await unknown_name(self._session, "AI table", "ai_tables", command.name, "42P01")
        if command.verb == "DROP":
            return await self._drop(table)
        if command.verb == "ALTER":
            options = self._options(command, table.options)
            kinds = (table.options.refresh_s, options.refresh_s)
            if ON_CHANGE in kinds and command.suspended is None:
                return await try_again(
                    self._session, self._clock, lambda: self._alter_following(table, options)
                )
            await self._note(table, f"options = {literal(_json(options))}")
            await self._wake(replace(table, options=options))
            return ()
        return (_notice(table, await self.refresh(table)),)

    def _options(self, command: AiTableCommand, old: AiTableOptions | None) -> AiTableOptions:
        options = ai_table_options(command, old)
        if options.refresh_s > 0 and self._changed is None:
            raise FeatureNotSupportedError(
                f"this AI table can't refresh by itself: {self._why_not}",
                hint="Leave refresh out, and run REFRESH AI TABLE yourself, as from cron.",
            )
        return replace(options, made_by=options.made_by or self._session.user)

    async def _create(self, command: AiTableCommand) -> tuple[Notice, ...]:
        if await self._find(command.name) is not None:
            if command.tolerant:
                return (Notice("NOTICE", f"AI table {command.name} already exists, skipping"),)
            raise SqlError(
                f'AI table "{command.name}" already exists',
                sqlstate="42P07",
                hint=f"REFRESH AI TABLE {command.name} brings it up to date.",
            )
        options = self._options(command, None)
        table = await self._checked(command, options)
        await self._session.execute("BEGIN")
        try:
            await self._session.execute(table.source.pieces.table())
            await self._check_columns(table)
            options, notices = await self._follow(table, options)
            owner, name = literal(self._session.owner), literal(table.name)
            texts = (table.source.statement, _json(options), table.source.key_type, table.path)
            await self._session.own(
                f"INSERT INTO {SCHEMA}.ai_tables VALUES ({owner}, {name}, "
                f"{', '.join(map(literal, texts))}, NULL, 0, 0, '{STALE}', '')"
            )
            await self._session.execute("COMMIT")
        except TierKVError:
            await self._session.abandon()
            raise
        table = replace(table, options=options)
        try:
            done = await self.refresh(table)
        finally:
            await self._wake(table)  # From now on writes to its tables count.
        return (*notices, _notice(table, done))

    async def _checked(self, command: AiTableCommand, options: AiTableOptions) -> AiTable:
        prefix = f'CREATE TABLE "{command.name}" AS '
        try:
            pieces = read_job_statement(prefix + command.query)
        except UserError as error:
            if error.position:
                error.position = max(1, error.position - len(prefix) + command.offset)
            raise
        if not pieces.inputs:
            raise FeatureNotSupportedError(
                "the columns that this SELECT depends on are not known",
                hint="Write its AI calls over plain columns of a view.",
            )
        kind, rows = await self._source.check_key(pieces, options.key)
        path = await self._session.search_path()
        source = AiJob(
            command.name, prefix + command.query, pieces, JobOptions(key=options.key), kind, path,
            rows, self._clock.wall(),
        )  # fmt: skip
        return AiTable(source, options, options.key.rpartition(".")[2], path)

    async def _check_columns(self, table: AiTable) -> None:
        """Refuse a select list without the key, by which rows are found again."""
        try:
            await self._session.execute(
                f'SELECT {table.key_column} FROM "{table.name}" WHERE FALSE'
            )
        except SqlError as error:
            if error.sqlstate != "42703":
                raise
            raise SqlError(
                f"the select list of an AI table must have its key {table.key_column}",
                sqlstate="42601",
                hint=f"Add {table.source.options.key} to the select list.",
            ) from None

    async def _find(self, name: str) -> AiTable | None:
        rows = await self._session.own(
            f"SELECT statement, options, key_type, path FROM {SCHEMA}.ai_tables "
            f"WHERE {self._is(name)}"
        )
        if not rows:
            return None
        statement, options_text, kind, path = (text or "" for text in rows[0])
        options = AiTableOptions(**json.loads(options_text))
        options = replace(options, sources=tuple(options.sources))
        pieces = read_job_statement(statement)
        job_options = JobOptions(key=options.key)
        source = AiJob(name, statement, pieces, job_options, kind, path, 0, 0.0)
        return AiTable(source, options, options.key.rpartition(".")[2], path)

    async def _alter_following(self, table: AiTable, options: AiTableOptions) -> tuple[Notice, ...]:
        await self._session.execute("BEGIN")
        try:
            options, notices = await self._follow(table, options)
            await self._session.own(
                f"UPDATE {SCHEMA}.ai_tables SET options = {literal(_json(options))} "
                f"WHERE {self._is(table.name)}"
            )
            await self._session.execute("COMMIT")
        except TierKVError:
            await self._session.abandon()
            raise
        await self._wake(replace(table, options=options))
        return notices

    async def _follow(
        self, table: AiTable, options: AiTableOptions
    ) -> tuple[AiTableOptions, tuple[Notice, ...]]:
        """Let writes to the tables of the query wake the table, or no more.

        Returns:
            the options, MANUAL where nothing can wake the table; and a notice that says so.
        """
        owner, name = self._session.owner, table.name
        if options.refresh_s != ON_CHANGE:
            left = await unfollow(self._watch, owner, name) if table.options.sources else ""
            return replace(options, sources=()), _told_left(table, left)
        sources = source_tables(table.source.pieces.fingerprints(options.key))
        why = await follow(self._watch, owner, name, sources)
        if not why:
            return replace(options, sources=sources), ()
        text = f"AI table {name} does not refresh by itself: {why}"
        notice = Notice("NOTICE", text, hint=f"Run REFRESH AI TABLE {name} after changes.")
        return replace(options, refresh_s=MANUAL, sources=()), (notice,)

    async def _wake(self, table: AiTable) -> None:
        """Have a table that follows changes refreshed soon."""
        if table.options.refresh_s == ON_CHANGE and not table.options.suspended:
            watched = WatchedSource(self._session.owner, table.name, "", by_table=True)
            await self._watch.wake(watched)

    async def _drop(self, table: AiTable) -> tuple[Notice, ...]:
        left = ""
        async with self._alone(table):
            await self._session.execute("BEGIN")
            try:
                if table.options.sources:
                    left = await unfollow(self._watch, self._session.owner, table.name)
                await self._session.execute(f'DROP TABLE IF EXISTS "{table.name}"')
                for each in ("ai_rows", "ai_tables"):
                    await self._session.own(
                        f"DELETE FROM {SCHEMA}.{each} WHERE {self._is(table.name)}"
                    )
                await self._session.execute("COMMIT")
            except TierKVError:
                await self._session.abandon()
                raise
        return _told_left(table, left)

    # Refresh.

    async def refresh(self, table: AiTable) -> RefreshResult:
        """Make all rows of a table right, and return what was done.

        Raises:
            TierKVError: the refresh stopped; rows that were not reached are as before.
        """
        await self._source.check_path(f"AI table {table.name}", table.path)
        started = self._clock.now()
        async with self._alone(table):
            try:
                done = await self._walk(table)
            except TierKVError as error:
                await self._session.abandon()
                await self._note(table, f"state = '{STALE}', error = {literal(told(error))}")
                raise
            await self._note(
                table,
                f"state = '{FRESH}', error = '', refreshed_s = {self._clock.wall()}, "
                f"asked = {done.asked}, took_s = {self._clock.now() - started}",
            )
        return done

    async def _walk(self, table: AiTable) -> RefreshResult:
        done, rows = RefreshResult(), 0
        low: str | None = None
        while chunk := await self._source.next_batch(
            table.source, KeyRange(low, None), _COMPARED_ROWS
        ):
            prints = await self._prints(table, chunk.keys)
            rows += len(prints)
            done = await self._compare(table, prints, done)
            low = chunk.keys.high
        ((known,),) = await self._session.own(
            f"SELECT count(*) FROM {SCHEMA}.ai_rows WHERE {self._is(table.name)}"
        )
        if int(known or 0) > rows:
            done = replace(done, removed=await self._remove_gone(table))
        return done

    async def _prints(self, table: AiTable, keys: KeyRange) -> dict[str, str]:
        """Return the fingerprint of each row of a range of keys."""
        found = await self._session.execute(
            f"SELECT CAST({KEY} AS text) AS shown, print FROM "
            f"({table.source.pieces.fingerprints(table.options.key)}) AS tierkv_prints "
            f"WHERE {keys.condition(KEY, table.source.key_type)}"
        )
        return {str(key): str(text) for key, text in found.rows}

    async def _compare(
        self, table: AiTable, prints: dict[str, str], done: RefreshResult
    ) -> RefreshResult:
        """Ask about the rows with another fingerprint; return what was done so far."""
        if not prints:
            return done
        rows = await self._session.own(
            f"SELECT key, print FROM {SCHEMA}.ai_rows WHERE {self._is(table.name)} "
            f"AND key IN ({', '.join(map(literal, prints))})"
        )
        known = {str(key): text for key, text in rows}
        changed = [key for key, text in prints.items() if known.get(key) != text]
        size = table.options.batch
        for at in range(0, len(changed), size):
            some = {name: prints[name] for name in changed[at : at + size]}
            failed = await self._ask(table, some)
            done = replace(done, asked=done.asked + len(some), failed=done.failed + failed)
            self._session.tell(None, done.asked, max(done.asked, len(changed)))
        return done

    async def _remove_gone(self, table: AiTable) -> int:
        """Remove the rows whose keys the source no longer has; return their number.

        Runs only when more rows are known than the source has: no index finds these keys.
        """
        kind, removed = table.source.key_type, 0
        low: str | None = None
        while True:
            chunk = await self._source.next_batch(
                table.source, KeyRange(low, None), _GONE_COMPARED_ROWS
            )
            keys = KeyRange(low, None) if chunk is None else chunk.keys
            found = set(await self._prints(table, keys))
            rows = await self._session.own(
                f"SELECT key FROM {SCHEMA}.ai_rows WHERE {self._is(table.name)} "
                f"AND {keys.condition(f'CAST(key AS {kind})', kind)}"
            )
            gone = [str(key) for (key,) in rows if str(key) not in found]
            for at in range(0, len(gone), table.options.batch):
                await self._write(table, {}, gone[at : at + table.options.batch])
            removed += len(gone)
            if chunk is None:  # Behind the last key there may be keys that are gone.
                return removed
            low = chunk.keys.high

    async def _ask(self, table: AiTable, prints: dict[str, str]) -> int:
        """Ask about changed rows; return how many fail by themselves."""
        try:
            await try_again(
                self._session, self._clock, lambda: self._write(table, prints, list(prints))
            )
        except TierKVError as error:
            if remedy(error) is not JobRemedy.SET_ASIDE:
                raise
            if len(prints) == 1:
                await self._write(table, prints, list(prints), error=told(error))
                return 1
        else:
            return 0
        names, half = list(prints), len(prints) // 2
        parts = (names[:half], names[half:])
        return sum([await self._ask(table, {n: prints[n] for n in part}) for part in parts])

    async def _write(
        self,
        table: AiTable,
        prints: dict[str, str],
        old: Sequence[str],
        *,
        error: str = "",
    ) -> None:
        """Replace rows and fingerprints in one transaction.

        Args:
            table: the table.
            prints: new fingerprint of each key that is asked about.
            old: keys whose rows go.
            error: the row that fails: it is not asked about, and its error is kept.
        """
        kind = table.source.key_type
        await self._session.execute("BEGIN")
        await self._session.execute(
            f'DELETE FROM "{table.name}" WHERE {table.key_column} IN ({_listed(old, kind)})'
        )
        if prints and not error:
            await set_for_batch(self._session, table.options.priority)
            condition = f"({table.options.key}) IN ({_listed(prints, kind)})"
            await self._session.execute(table.source.pieces.batch(condition))
        await self._session.own(
            f"DELETE FROM {SCHEMA}.ai_rows WHERE {self._is(table.name)} "
            f"AND key IN ({', '.join(map(literal, old))})"
        )
        if prints:
            owner, name = literal(self._session.owner), literal(table.name)
            rows = ", ".join(
                f"({owner}, {name}, {literal(key)}, {literal(text)}, {literal(error)})"
                for key, text in prints.items()
            )
            await self._session.own(f"INSERT INTO {SCHEMA}.ai_rows VALUES {rows}")
        await self._session.execute("COMMIT")

    async def _note(self, table: AiTable, changes: str) -> None:
        """Change what is known about a table; an ALTER may meet the end of a refresh."""
        text = f"UPDATE {SCHEMA}.ai_tables SET {changes} WHERE {self._is(table.name)}"
        await try_again(self._session, self._clock, lambda: self._session.own(text))

    @asynccontextmanager
    async def _alone(self, table: AiTable) -> AsyncIterator[None]:
        """Hold a table. If the table follows changes, wait for the end of a short refresh."""
        name = f"{self._session.owner}/table/{table.name}"
        patience_s = _FOLLOWED_WAIT_S if table.options.refresh_s == ON_CHANGE else 0.0
        until_s = self._clock.now() + patience_s
        while not await self._session.lock(name):
            if self._clock.now() >= until_s:
                raise SqlError(
                    f"AI table {table.name} is being refreshed in another session",
                    sqlstate="55006",
                )
            await self._session.pause(_LOCK_LOOK_S)
        try:
            yield
        finally:
            await self._session.unlock(name)

    def _is(self, name: str) -> str:
        return f"owner = {literal(self._session.owner)} AND name = {literal(name)}"


def _listed(keys: Iterable[str], kind: str) -> str:
    return ", ".join(f"CAST({literal(key)} AS {kind})" for key in keys)


def _json(options: AiTableOptions) -> str:
    return json.dumps(asdict(options))


def _told_left(table: AiTable, left: str) -> tuple[Notice, ...]:
    return (Notice("NOTICE", f"AI table {table.name}: {left}"),) if left else ()


def _notice(table: AiTable, done: RefreshResult) -> Notice:
    text = f"AI table {table.name}: {done.asked} rows asked about, {done.removed} removed"
    hint = ""
    if done.failed:
        text += f", {done.failed} failed"
        hint = (
            "See tierkv.job_failures for the reasons. A row is asked about again when it changes."
        )
    return Notice("NOTICE", text, hint=hint)
