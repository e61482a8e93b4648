"""The refresh of an AI table: asks again only about rows that changed.

Theory of operation. ``tierkv_jobs.ai_rows`` has a fingerprint of each row's inputs when the row was
asked about last: the columns and expressions that the SELECT depends on. A refresh walks the
source in ranges of keys and compares. Keys with another fingerprint, and keys that are gone, lose
their rows of the table; the changed ones are asked about again; the new fingerprints commit with
the new rows. Hence a refresh that is killed leaves a table of right rows, and the next one goes on:
what was done needs no checkpoint. A row that fails by itself has no row in the table and an error
in ``ai_rows``, until its inputs change.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from tierkv.dbfront.jobs.job import AiJob, JobSession
from tierkv.dbfront.jobs.job_errors import JobRemedy, remedy, told
from tierkv.dbfront.jobs.job_runner import set_for_batch, try_again
from tierkv.dbfront.jobs.job_source import JobSource
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import SqlError, TierKVError
from tierkv.sql.jobs.ai_table_command import ON_CHANGE, AiTableOptions
from tierkv.sql.jobs.job_statement import KEY, KeyRange, literal
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


class AiTableRefresh:
    """Makes the rows of AI tables right, through one session."""

    def __init__(self, session: JobSession, clock: Clock, source: JobSource) -> None:
        """Use a session.

        Args:
            session: runs the batches.
            clock: for the times of refreshes.
            source: reads the source's keys.
        """
        self._session = session
        self._clock = clock
        self._source = source

    async def run(self, table: AiTable) -> RefreshResult:
        """Make all rows of a table right, and return what was done.

        Raises:
            TierKVError: the refresh stopped; rows that were not reached are as before.
        """
        await self._source.check_path(f"AI table {table.name}", table.path)
        started = self._clock.now()
        async with self.alone(table):
            try:
                done = await self._walk(table)
            except TierKVError as error:
                await self._session.abandon()
                await self.note(table, f"state = '{STALE}', error = {literal(told(error))}")
                raise
            await self.note(
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
            f"SELECT count(*) FROM {SCHEMA}.ai_rows WHERE {table_row(self._session, table.name)}"
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
            f"SELECT key, print FROM {SCHEMA}.ai_rows WHERE {table_row(self._session, table.name)} "
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
                f"SELECT key FROM {SCHEMA}.ai_rows WHERE {table_row(self._session, table.name)} "
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
            f"DELETE FROM {SCHEMA}.ai_rows WHERE {table_row(self._session, table.name)} "
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

    async def note(self, table: AiTable, changes: str) -> None:
        """Change what is known about a table; an ALTER may meet the end of a refresh."""
        text = (
            f"UPDATE {SCHEMA}.ai_tables SET {changes} WHERE {table_row(self._session, table.name)}"
        )
        await try_again(self._session, self._clock, lambda: self._session.own(text))

    @asynccontextmanager
    async def alone(self, table: AiTable) -> AsyncIterator[None]:
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


def table_row(session: JobSession, name: str) -> str:
    """Return the condition for what the tables of jobs hold about a session's AI table."""
    return f"owner = {literal(session.owner)} AND name = {literal(name)}"


def _listed(keys: Iterable[str], kind: str) -> str:
    return ", ".join(f"CAST({literal(key)} AS {kind})" for key in keys)
