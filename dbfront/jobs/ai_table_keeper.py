"""Refreshes the AI tables of the embedded database when they are due.

tierkv/parts/front_part.py runs the keeper beside the doors. Each refresh is a REFRESH in a session
of the table's owner; tierkv.ai_tables shows how it ended. A refresh that takes longer than its
period begins anew at once; one table at a time, so that tables can't crowd out users.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import TierKVError
from tierkv.sql.jobs.job_tables import SCHEMA

DUE_TABLES: Final = (
    f"SELECT owner, name, path, options, coalesce(refreshed_s, 0) FROM {SCHEMA}.ai_tables"
)
_log = logging.getLogger("tierkv.front")


@dataclass(frozen=True, slots=True)
class DueTable:
    """An AI table that refreshes by itself: whose, where, and when it is due.

    Attributes:
        user: whose session refreshes.
        name: the table.
        path: search path of the session.
        due_s: Unix time.
    """

    user: str
    name: str
    path: str
    due_s: float


class AiTableKeeper:
    """Refreshes tables until it is cancelled."""

    def __init__(
        self,
        read: Callable[[str], list[tuple[Any, ...]]],
        refresh: Callable[[DueTable], Awaitable[None]],
        clock: Clock,
        changed: asyncio.Event,
    ) -> None:
        """Note what to use.

        Args:
            read: runs a query, in another thread.
            refresh: refreshes a table.
            clock: tells what is due.
            changed: set after each CREATE, ALTER or DROP of an AI table.
        """
        self._read = read
        self._refresh = refresh
        self._clock = clock
        self._changed = changed
        self._tried: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Refresh what is due, and wait for the next; without tables it waits for one."""
        while True:
            self._changed.clear()
            tables = due_tables(await asyncio.to_thread(self._read, DUE_TABLES), self._tried)
            now_s = self._clock.wall()
            for table in tables:
                if table.due_s <= now_s and not self._changed.is_set():
                    await self._try(table)
            if any(table.due_s <= now_s for table in tables):
                continue
            wait_s = min((table.due_s - now_s for table in tables), default=None)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _try(self, table: DueTable) -> None:
        try:
            await self._refresh(table)
        except TierKVError as error:
            _log.warning("AI table %s was not refreshed: %s", table.name, error.message)
        self._tried[table.user, table.name] = self._clock.wall()


def due_tables(
    rows: Sequence[tuple[Any, ...]], tried: dict[tuple[str, str], float]
) -> list[DueTable]:
    """Return the tables that refresh by themselves, the first due first. Pure.

    Args:
        rows: result of DUE_TABLES.
        tried: Unix time of the last try by user and table; a failure waits a period, too.
    """
    found: list[DueTable] = []
    for owner, name, path, text, refreshed_s in rows:
        options = json.loads(text)
        user = owner or options["made_by"]
        if options["refresh_s"] and not options["suspended"]:
            last_s = max(float(refreshed_s), tried.get((user, name), 0.0))
            found.append(DueTable(user, name, path, last_s + options["refresh_s"]))
    return sorted(found, key=lambda table: table.due_s)
