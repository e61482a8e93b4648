"""The statements about AI tables: tables of answers, of which a refresh renews changed rows.

CREATE, ALTER, DROP and REFRESH of one session. Which rows a refresh asks about again is decided in
dbfront/jobs/ai_table_refresh.py; writes to the source wake a table through a SourceWatch.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace

from tierkv.dbfront.jobs.ai_table_refresh import (
    STALE,
    AiTable,
    AiTableRefresh,
    RefreshResult,
    table_row,
)
from tierkv.dbfront.jobs.job import AiJob, JobSession
from tierkv.dbfront.jobs.job_runner import try_again
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
from tierkv.sql.jobs.job_statement import literal, read_job_statement
from tierkv.sql.jobs.job_tables import SCHEMA


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
        self._refresh = AiTableRefresh(session, clock, self._source)

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
            await self._refresh.note(table, f"options = {literal(_json(options))}")
            await self._wake(replace(table, options=options))
            return ()
        return (_notice(table, await self._refresh.run(table)),)

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
            done = await self._refresh.run(table)
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
            f"WHERE {table_row(self._session, name)}"
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
                f"WHERE {table_row(self._session, table.name)}"
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
        async with self._refresh.alone(table):
            await self._session.execute("BEGIN")
            try:
                if table.options.sources:
                    left = await unfollow(self._watch, self._session.owner, table.name)
                await self._session.execute(f'DROP TABLE IF EXISTS "{table.name}"')
                for each in ("ai_rows", "ai_tables"):
                    await self._session.own(
                        f"DELETE FROM {SCHEMA}.{each} WHERE {table_row(self._session, table.name)}"
                    )
                await self._session.execute("COMMIT")
            except TierKVError:
                await self._session.abandon()
                raise
        return _told_left(table, left)


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
