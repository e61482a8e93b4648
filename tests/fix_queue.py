"""Every WorkLog over real places: an SQLite file, Valkey, and Debian's older Redis."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from valkey import Valkey

from tierkv.dbfront.queue.file_log import FileLog
from tierkv.dbfront.queue.valkey_log import ValkeyLog
from tierkv.dbfront.queue.work_log import WorkLog
from tierkv.kvcore.clock import SystemClock

PLACES = ("file", "valkey", "redis")


@dataclass
class LogPlace:
    """A place of logs: opens logs, and makes pending entries look old."""

    opens: Callable[[], WorkLog]
    age: Callable[[str, str, str, float], None]
    clear: Callable[[], None]


def file_place(path: Path) -> LogPlace:
    def run(text: str, *values: object) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(text, values)

    def age(queue: str, group: str, entry: str, seconds: float) -> None:
        where = "queue = ? AND grp = ? AND id = ?"
        text = f"UPDATE pending SET since_s = since_s - ? WHERE {where}"
        run(text, seconds, queue, group, int(entry))

    def clear() -> None:
        if path.exists():
            for table in ("entries", "groups", "pending", "dead"):
                run(f"DELETE FROM {table}")

    return LogPlace(lambda: FileLog(str(path), SystemClock()), age, clear)


def server_place(url: str) -> LogPlace:
    def age(queue: str, group: str, entry: str, seconds: float) -> None:
        key = "{tierkv:queue}:log:" + queue
        with Valkey.from_url(url) as client:
            (row,) = client.xpending_range(key, group, entry, entry, 1)
            idle_ms = int(1_000 * seconds)
            client.xclaim(key, group, row["consumer"], 0, [entry], idle=idle_ms, justid=True)

    def clear() -> None:
        with Valkey.from_url(url) as client:
            client.flushall()

    return LogPlace(lambda: ValkeyLog(url, SystemClock()), age, clear)
