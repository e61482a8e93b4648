"""The account of a front's statements: entries are opened here, written and forgotten.

Sessions of both doors ``open`` a StatementEntry for each statement
(dbfront/accounts/statement_entry.py). What is kept goes to dbfront/accounts/statistic_store.py;
dbfront/views/statistics.py shows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tierkv.dbfront.accounts.ended_call import EndedRequest
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
        store: where they are.
        clock: the front's.
        logged: which statements the log is for.
        scheduler_counts: what the scheduler counted; set by whoever has one.
    """

    def __init__(
        self,
        store: StatisticStore,
        clock: Clock,
        *,
        logged: LoggedStatements = LoggedStatements.AI,
        flush_s: float = 5.0,
    ) -> None:
        """Make the account.

        Args:
            store: open.
            clock: for durations, and times for people.
            logged: see the attribute.
            flush_s: seconds between writes; so much is lost with a front that is killed.
        """
        self.store = store
        self.clock = clock
        self.logged = logged
        self.scheduler_counts: Callable[[], SchedulerCounts] = dict
        self._scheduler_seen: SchedulerCounts = {}
        self._flush_s = flush_s
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write from time to time."""
        self._writer = asyncio.create_task(self._write(), name="statistics")

    async def stop(self) -> None:
        """Write what is left and close the store."""
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
        """Write what is new; a file that can't be written is tried again the next time."""
        self._count_scheduling()
        await asyncio.to_thread(self.store.flush, self.clock.wall())

    async def select(
        self, sql: str, finish: Callable[[dict[str, Any]], None] = lambda row: None
    ) -> list[dict[str, Any]]:
        """Return the rows of a query over the store, all that happened included.

        ``finish`` may change each; it runs off the event loop like the query: there may be many.
        """
        self._count_scheduling()
        return await asyncio.to_thread(self._select, sql, finish)

    def _select(self, sql: str, finish: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        rows = self.store.select(sql, self.clock.wall())
        for row in rows:
            finish(row)
        return rows

    async def resets(self) -> dict[str, float]:
        """Return since when each group counts, in Unix time."""
        return await asyncio.to_thread(self.store.resets, self.clock.wall())

    async def kvcache_baseline(self) -> tuple[dict[str, float], float | None]:
        """Return what nodes had counted at the last reset, and its Unix time; None: never."""
        now_s = self.clock.wall()
        baseline = await asyncio.to_thread(self.store.baseline, now_s)
        return baseline, (await self.resets())["kvcache"] if baseline else None

    async def reset(self, what: str | None, nodes: Mapping[str, float] | None = None) -> float:
        """Forget what one group counted, or all counters.

        The log of statements is forgotten only when it is named.

        Args:
            what: the group; None: all.
            nodes: what nodes have counted by now, where that is to be forgotten.

        Returns:
            the Unix time of the reset.

        Raises:
            UdfArgumentError: there is no such group.
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
        """Begin the account of one statement; cheap."""
        return StatementEntry(
            self.store,
            self.clock,
            self.logged,
            client=client,
            pid=pid,
            text=text,
            query_tag=query_tag,
        )

    def take(self, request: EndedRequest) -> None:
        """Count a request that came by REST; requests of SQL are counted by their statement."""
        if request.origin:
            facts = {"user_name": request.tenant, "query_tag": "", "is_completed": 1}
            count_call(self.store, request.as_call(), self.clock.wall(), facts)

    def _count_scheduling(self) -> None:
        """Add what the scheduler counted since the last look."""
        seen, self._scheduler_seen = self._scheduler_seen, self.scheduler_counts()
        for model, counts in self._scheduler_seen.items():
            before = seen.get(model, {})
            new = {name: value - before.get(name, 0) for name, value in counts.items()}
            if any(new.values()):
                self.store.add(SCHEDULER, (model,), new, at_s=self.clock.wall())
