"""The account of a front's statements: opens entries, writes and resets statistics.

SQL sessions (DuckDB and the PostgreSQL relay) ``open`` a StatementEntry for each statement
(dbfront/accounts/statement_entry.py). dbfront/accounts/statistic_store.py stores the statistics;
dbfront/views/statistics.py shows the statistics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tierkv.dbfront.accounts.ended_call import ModelRequest
from tierkv.dbfront.accounts.statement_entry import LoggedStatements, StatementEntry, count_call
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistic_tables import GROUPS, QUERY_LOG_GROUP, SCHEDULER
from tierkv.dbfront.contracts import ClientInfo
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.sql.text.suggest import did_you_mean

_log = logging.getLogger("tierkv.statistics")

SchedulerCounts = Mapping[str, Mapping[str, float]]
"""Counters of dbfront/accounts/statistic_tables.py::SCHEDULER by model name, since the front
started.
"""


class StatementLog:
    """Counters and log of one front.

    Attributes:
        store: storage of the counters and the log.
        clock: clock of the front.
        logged: the statements to log.
        scheduler_counts: returns the scheduler's counters; set by the owner of the scheduler.
    """

    def __init__(
        self,
        store: StatisticStore,
        clock: Clock,
        *,
        logged: LoggedStatements = LoggedStatements.AI,
        flush_s: float = 5.0,
    ) -> None:
        """Create the account.

        Args:
            store: an open store.
            clock: clock for durations and wall-clock times.
            logged: see the attribute.
            flush_s: seconds between writes; a killed front loses statistics of at most this period.
        """
        self.store = store
        self.clock = clock
        self.logged = logged
        self.scheduler_counts: Callable[[], SchedulerCounts] = dict
        self._scheduler_seen: SchedulerCounts = {}
        self._flush_s = flush_s
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start writing periodically."""
        self._writer = asyncio.create_task(self._write(), name="statistics")

    async def stop(self) -> None:
        """Write pending statistics and close the store."""
        if self._writer is not None:
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer
            self._writer = None
        self._count_scheduling()
        await asyncio.to_thread(self.store.close, self.clock.wall())

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s)
            try:
                await self.flush()
            except Exception:  # noqa: BLE001 - the writer must outlive any bug in a write
                _log.exception("statistics could not be written")

    async def flush(self) -> None:
        """Write pending statistics; after a write error the next flush tries again."""
        self._count_scheduling()
        await asyncio.to_thread(self.store.flush, self.clock.wall())

    async def select(
        self, sql: str, finish: Callable[[dict[str, Any]], None] = lambda row: None
    ) -> list[dict[str, Any]]:
        """Return the rows of a query over the store, including pending statistics.

        ``finish`` may change each row. Both run off the event loop, because the result may be
        large.
        """
        self._count_scheduling()
        return await asyncio.to_thread(self._select, sql, finish)

    def _select(self, sql: str, finish: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        rows = self.store.select(sql, self.clock.wall())
        for row in rows:
            finish(row)
        return rows

    async def resets(self) -> dict[str, float]:
        """Return the start of counting of each group, in Unix time."""
        return await asyncio.to_thread(self.store.resets, self.clock.wall())

    async def kvcache_baseline(self) -> tuple[dict[str, float], float | None]:
        """Return the nodes' counters at the last reset, and its Unix time; None if never reset."""
        now_s = self.clock.wall()
        baseline = await asyncio.to_thread(self.store.baseline, now_s)
        return baseline, (await self.resets())["kvcache"] if baseline else None

    async def reset(self, what: str | None, nodes: Mapping[str, float] | None = None) -> float:
        """Reset the counters of one group, or of all groups.

        The log of statements is cleared only if named.

        Args:
            what: the group; None for all groups.
            nodes: present counters of the nodes, if the counters are to be reset.

        Returns:
            the Unix time of the reset.

        Raises:
            UdfArgumentError: unknown group.
        """
        if what is not None and what not in GROUPS:
            raise UdfArgumentError(
                f"there are no statistics {what!r} to reset", hint=did_you_mean(what, GROUPS)
            )
        chosen = GROUPS if what is None else (what,)
        now_s = self.clock.wall()
        self._count_scheduling()
        forgotten = [one for one in chosen if one != QUERY_LOG_GROUP or what]
        await asyncio.to_thread(self.store.reset, forgotten, now_s, nodes)
        return now_s

    def open(self, client: ClientInfo, pid: int, text: str, query_tag: str = "") -> StatementEntry:
        """Open the account of one statement; cheap."""
        return StatementEntry(
            self.store,
            self.clock,
            self.logged,
            client=client,
            pid=pid,
            text=text,
            query_tag=query_tag,
        )

    def take(self, request: ModelRequest) -> None:
        """Count a request by REST; requests of SQL are counted by their statement."""
        call = request.prepared.call
        if call.origin:
            facts = {"user_name": call.tenant, "query_tag": "", "is_completed": 1}
            count_call(self.store, request.as_call(), self.clock.wall(), facts)

    def _count_scheduling(self) -> None:
        """Add the increase of the scheduler's counters since the last call."""
        seen, self._scheduler_seen = self._scheduler_seen, self.scheduler_counts()
        for model, counts in self._scheduler_seen.items():
            before = seen.get(model, {})
            new = {name: value - before.get(name, 0) for name, value in counts.items()}
            if any(new.values()):
                self.store.add(SCHEDULER, (model,), new, at_s=self.clock.wall())
