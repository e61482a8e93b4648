"""The front's statistics as a part: the settings' file, opened for every door of the front."""

from __future__ import annotations

from pathlib import Path

from tierkv.dbfront.accounts.statement_entry import LoggedStatements
from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.kvcore.clock import SystemClock
from tierkv.settings import FrontSettings


def statement_log(settings: FrontSettings) -> StatementLog:
    """Open the statistics; a file that can't be used never stops the front."""
    clock = SystemClock()
    path = settings.stats_path
    store = StatisticStore(
        str(Path(path).expanduser()) if path else "",
        now_s=clock.wall(),
        keep_s=86_400.0 * settings.stats_days,
    )
    return StatementLog(
        store,
        clock,
        logged=LoggedStatements(settings.query_log),
        flush_s=settings.stats_interval_s,
    )
