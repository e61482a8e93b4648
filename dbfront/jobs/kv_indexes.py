"""KV indexes: the KV of a column's documents is computed ahead, and freed with the rows.

Theory of operation. KV is found by content. An index therefore needs no entry per row, only the set
of different documents (``tierkv_jobs.kv_index_texts``, by digest). A refresh compares the digests
of the table with the known digests, warms new documents, forgets documents without a row, and
records both in batches. Equal documents are indexed once, and a document lives as long as a row
with the document. A killed refresh is repeated; stored KV is not computed again. Statements need
not name the index, because prompts with the same text have the same KV.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Final

from tierkv.dbfront.jobs.index_texts import IndexTexts, KvIndex
from tierkv.dbfront.jobs.job import JobSession
from tierkv.dbfront.jobs.job_errors import told
from tierkv.dbfront.jobs.job_runner import try_again
from tierkv.dbfront.jobs.job_source import JobSource, refuse_transaction, unknown_name
from tierkv.dbfront.jobs.keepers import BUILDING
from tierkv.dbfront.jobs.source_watch import SourceWatch, WatchedSource
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, TierKVError, UserError
from tierkv.sql.jobs.job_statement import literal
from tierkv.sql.jobs.job_tables import SCHEMA
from tierkv.sql.jobs.kv_index_command import (
    MANUAL,
    ON_CHANGE,
    KvIndexCommand,
    KvIndexOptions,
    volatile,
)
from tierkv.sql.text.lexer import name_value, tokenize

FRESH: Final = "fresh"
STALE: Final = "stale"
_NO_TABLE: Final = "42P01"
_LOCK_LOOK_S: Final = 0.2


class KvIndexes:
    """The statements about KV indexes of one session."""

    def __init__(self, session: JobSession, clock: Clock, watch: SourceWatch) -> None:
        """Use a session.

        Args:
            session: runs the batches.
            clock: for the times of refreshes.
            watch: tells the keeper of a front about changes of tables and indexes.
        """
        self._session = session
        self._clock = clock
        self._watch = watch
        self._source = JobSource(session)

    async def run(self, command: KvIndexCommand) -> StatementResult:
        """Carry out a statement; REFRESH returns when all documents are indexed.

        Raises:
            SqlError: 42710 or 42704, the index exists already or not; 25001, inside a transaction;
                42P17, a volatile expression; or what the expression gives.
        """
        refuse_transaction(self._session, command.tag, "refresh")
        await self._session.prepare()
        index = await self._find(command.name)
        if command.verb == "CREATE":
            notices = await self._create(command, index)
        elif index is None:
            if not command.tolerant:
                raise await unknown_name(
                    self._session, "KV index", "kv_indexes", command.name, "42704"
                )
            notices = (_notice(f"KV index {command.name} does not exist, skipping"),)
        elif command.verb == "DROP":
            notices = (await self._drop(index),)
        else:
            notices = (await self.refresh(index),)
        return StatementResult(command.tag, notices=notices)

    async def _create(self, command: KvIndexCommand, known: KvIndex | None) -> tuple[Notice, ...]:
        if known is not None:
            if command.tolerant:
                return (_notice(f"KV index {command.name} already exists, skipping"),)
            raise SqlError(
                f'KV index "{command.name}" already exists',
                sqlstate="42710",
                hint=f"REFRESH KV INDEX {command.name} brings it up to date.",
            )
        index, watched = await self._checked(command), self._watched(command.name, command.table)
        why = await self._watch.why_not()
        await self._session.execute("BEGIN")
        try:
            index, unheard = await self._recorded(index, command.table_name, why)
            await self._session.execute("COMMIT")
        except TierKVError:
            await self._session.abandon()
            raise
        notices = [_by_hand(index, unheard)] if unheard else []
        if not why:
            await self._watch.wake(watched)  # From now on writes to the table count.
        if not why and index.options.background:
            told_where = "SELECT * FROM tierkv.kv_indexes tells how far it is"
            built = f"KV index {index.name} is built in the background: {told_where}"
            return (*notices, _notice(built))
        return (*notices, await self.refresh(index))

    async def _recorded(self, index: KvIndex, table_name: str, why: str) -> tuple[KvIndex, str]:
        """Insert an index in the open transaction; return why no change wakes the index, if so.

        Raises:
            FeatureNotSupportedError: the index was to refresh by itself.
        """
        asked = index.options.refresh_s
        unheard = "" if asked == MANUAL else why
        if not why and asked in (None, ON_CHANGE):
            unheard = await self._watch.begin(self._watched(index.name, index.source))
        if unheard and asked is not None:
            raise FeatureNotSupportedError(
                f"this KV index can't refresh by itself: {unheard}",
                hint="Leave refresh out, and run REFRESH KV INDEX yourself, as from cron.",
            )
        if asked is None:
            asked = MANUAL if unheard else ON_CHANGE
        index = replace(index, options=replace(index.options, refresh_s=asked))
        owner, options = literal(self._session.owner), literal(json.dumps(asdict(index.options)))
        texts = (index.name, index.source, table_name, index.expression)
        await self._session.own(
            f"INSERT INTO {SCHEMA}.kv_indexes VALUES ({owner}, {', '.join(map(literal, texts))}, "
            f"{options}, {literal(index.path)}, NULL, 0, 0, 0, '{BUILDING}', '')"
        )
        progress = f"{SCHEMA}.kv_index_progress"  # A killed session may have left an old row.
        await self._session.own(f"DELETE FROM {progress} WHERE {self._is(index.name)}")
        await self._session.own(
            f"INSERT INTO {progress} VALUES ({owner}, {literal(index.name)}, NULL, 0)"
        )
        return index, unheard

    async def _checked(self, command: KvIndexCommand) -> KvIndex:
        options = command.options
        await self._refuse_volatile(command.functions)
        if options.system_prompt is None:
            shown = await self._session.execute("SHOW tierkv.system_prompt")
            options = replace(options, system_prompt=str(shown.rows[0][0]))
        if not options.model:
            shown = await self._session.execute("SHOW tierkv.model")
            options = replace(options, model=str(shown.rows[0][0] or ""))
        if options.model:  # An unknown model is an error now, not in the background.
            await self._session.execute(
                f"SELECT ai_count_tokens('', model => {literal(options.model)})"
            )
        session = self._session
        options = replace(
            options, made_by=session.user, made_s=self._clock.wall(), tenant=session.tenant
        )
        path = await self._session.search_path()
        await self._refuse_temporary(command)
        index = KvIndex(command.name, command.table, command.expression, options, path)
        before = index.documents.index(index.expression)
        try:
            await self._session.execute(f"{index.documents} LIMIT 0")
        except UserError as error:
            if error.position > before:
                error.position += command.offset - before
            raise
        return index

    async def _refuse_temporary(self, command: KvIndexCommand) -> None:
        if self._session.type_function == "typeof":
            schema = name_value(tokenize(command.table)[0]).lower()
            found = await self._session.own(
                "SELECT 1 FROM duckdb_tables() WHERE temporary AND lower(table_name) = "
                f"{literal(command.table_name)} AND {literal(schema)} IN "
                f"({literal(command.table_name)}, 'temp') LIMIT 1"
            )
        else:
            found = await self._session.own(
                "SELECT 1 FROM pg_catalog.pg_class WHERE relpersistence = 't' AND oid = "
                f"pg_catalog.to_regclass({literal(command.table)})"
            )
        if found:
            raise FeatureNotSupportedError(
                f"{command.table} is a temporary table, and refreshes run in other sessions",
                hint="Index a table that all sessions see.",
            )

    async def _refuse_volatile(self, functions: Sequence[str]) -> None:
        if not functions:
            return
        names = ", ".join(map(literal, functions))
        if self._session.type_function == "typeof":
            found = await self._session.own(
                "SELECT function_name FROM duckdb_functions() WHERE stability = 'VOLATILE' "
                f"AND function_name IN ({names}) LIMIT 1"
            )
        else:
            found = await self._session.own(
                "SELECT proname FROM pg_catalog.pg_proc WHERE provolatile = 'v' "
                f"AND proname IN ({names}) LIMIT 1"
            )
        if found:
            raise volatile(f"{found[0][0]}()")

    async def _find(self, name: str) -> KvIndex | None:
        rows = await self._session.own(
            f"SELECT source, expression, options, path FROM {SCHEMA}.kv_indexes "
            f"WHERE {self._is(name)}"
        )
        if not rows:
            return None
        source, expression, options, path = (text or "" for text in rows[0])
        return KvIndex(name, source, expression, KvIndexOptions(**json.loads(options)), path)

    async def _drop(self, index: KvIndex) -> Notice:
        async with self._alone(index):
            index = await self._present(index.name)
            error = "DROP KV INDEX runs, or did not come to its end: then run it again"
            await self._note(index, f"state = '{STALE}', error = {literal(error)}")
            return await self._remove(index)

    async def _present(self, name: str) -> KvIndex:
        """Return an index again after a wait, in which another session may have dropped it."""
        index = await self._find(name)
        if index is None:
            raise await unknown_name(self._session, "KV index", "kv_indexes", name, "42704")
        return index

    async def _remove(self, index: KvIndex, why: str = "") -> Notice:
        """Free all documents, and forget the index."""
        removed = await self._texts(index).forget_all()
        watched = self._watched(index.name, index.source)
        await self._session.execute("BEGIN")
        try:
            for table in ("kv_indexes", "kv_index_progress"):
                await self._session.own(
                    f"DELETE FROM {SCHEMA}.{table} WHERE {self._is(index.name)}"
                )
            left = await self._watch.end(watched)
            await self._session.execute("COMMIT")
        except TierKVError:
            await self._session.abandon()
            raise
        if not await self._watch.why_not():
            await self._watch.wake(watched)
        told_left = f"; {left}" if left else ""
        return _notice(
            f"KV index {index.name}: {why}the KV of {removed} documents was removed{told_left}"
        )

    # Refresh.

    async def refresh(self, index: KvIndex) -> Notice:
        """Index new documents and free documents without a row.

        Raises:
            TierKVError: the refresh stopped; what was indexed stays.
        """
        await self._source.check_path(f"KV index {index.name}", index.path)
        started = self._clock.now()
        async with self._alone(index):
            index = await self._present(index.name)
            mark = self._watch.mark(self._watched(index.name, index.source))
            try:
                try:
                    indexed, removed = await self._texts(index).compare()
                except TierKVError as error:
                    await self._session.abandon()
                    if error.sqlstate != _NO_TABLE:
                        raise
                    renamed = await self._renamed(index)
                    if renamed is None:
                        return await self._remove(index, "its table is gone: ")
                    index = renamed
                    indexed, removed = await self._texts(index).compare()
            except TierKVError as error:
                await self._session.abandon()
                await self._note(index, f"state = '{STALE}', error = {literal(told(error))}")
                raise
            await self._watch.note(self._watched(index.name, index.source), mark)
            await self._note(
                index,
                f"state = '{FRESH}', error = '', refreshed_s = {self._clock.wall()}, "
                f"took_s = {self._clock.now() - started}, indexed = {indexed}, "
                f"removed = {removed}",
            )
        return _notice(f"KV index {index.name}: {indexed} documents indexed, {removed} removed")

    async def _renamed(self, index: KvIndex) -> KvIndex | None:
        """Return the index over the present name of its table; None if the table is gone."""
        name = await self._watch.present_name(self._watched(index.name, index.source))
        if name and name != index.source:
            last = name_value(tokenize(name)[-1])
            await self._note(index, f"source = {literal(name)}, source_name = {literal(last)}")
            if not await self._watch.why_not():
                await self._watch.wake(self._watched(index.name, name))
        return replace(index, source=name) if name else None

    async def _note(self, index: KvIndex, changes: str) -> None:
        text = f"UPDATE {SCHEMA}.kv_indexes SET {changes} WHERE {self._is(index.name)}"
        await try_again(self._session, self._clock, lambda: self._session.own(text))

    @asynccontextmanager
    async def _alone(self, index: KvIndex) -> AsyncIterator[None]:
        """Wait for the end of a refresh elsewhere; a cancel ends the wait."""
        name = f"{self._session.owner}/kv index/{index.name}"
        while not await self._session.lock(name):
            await self._session.pause(_LOCK_LOOK_S)
        try:
            yield
        finally:
            await self._session.unlock(name)

    def _texts(self, index: KvIndex) -> IndexTexts:
        return IndexTexts(self._session, self._clock, index)

    def _watched(self, name: str, source: str) -> WatchedSource:
        return WatchedSource(self._session.owner, name, source)

    def _is(self, name: str) -> str:
        return f"owner = {literal(self._session.owner)} AND name = {literal(name)}"


def _notice(text: str) -> Notice:
    return Notice("NOTICE", text)


def _by_hand(index: KvIndex, unheard: str) -> Notice:
    text = f"KV index {index.name} does not refresh by itself: {unheard}"
    return Notice("NOTICE", text, hint=f"Run REFRESH KV INDEX {index.name} after changes.")
