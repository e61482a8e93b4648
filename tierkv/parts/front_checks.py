"""The checks of ``/readyz?verbose``: parts that a front can run without, but should have.

Used by tierkv/parts/front_part.py. Each check returns an empty string, or the problem.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.metaserver.client import MetaClient
from tierkv.scheduler.dispatcher import Dispatcher

LEAST_FREE_BYTES: Final = 64 << 20
"""With fewer free bytes a commit may soon fail."""

Check = Callable[[], Awaitable[str]]


def front_checks(
    meta: MetaClient, dispatcher: Dispatcher, *, folder: Path | None
) -> dict[str, Check]:
    """Return the checks of one front by name.

    Args:
        meta: the directory.
        dispatcher: knows the nodes.
        folder: folder of tables and statistics; None if both are in memory.
    """

    clock = SystemClock()

    async def directory() -> str:
        try:
            await meta.list_nodes()
        except DirectoryUnavailableError as error:
            return error.message
        return ""

    async def nodes() -> str:
        now = clock.now()
        records = dispatcher.state.fleet.records.values()
        away = sorted(r.info.node_id for r in records if r.state != "alive" or not r.usable(now))
        return f"do not answer: {', '.join(away)}" if away else ""

    async def pool() -> str:
        states = [s for s in dispatcher.view.nodes if s.info.role.value == "dmp"]
        away = sorted(s.info.node_id for s in states if s.state != "alive")
        return f"pool nodes that do not answer: {', '.join(away)}" if away else ""

    async def disk() -> str:
        return _disk(folder) if folder is not None else ""

    return {"directory": directory, "nodes": nodes, "pool": pool, "disk": disk}


def _disk(folder: Path) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    return "" if free >= LEAST_FREE_BYTES else f"{free} bytes are free in {folder}"
