"""DROP KV INDEX beside other statements, and cancelled, through both doors."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.fix_jobs import Door, Running
from tierkv.dbfront.jobs.index_texts import KvIndex
from tierkv.dbfront.jobs.kv_indexes import KvIndexes

MADE = "CREATE KV INDEX docs_kv ON docs (body) WITH (background = off)"


def test_a_refresh_that_waited_for_a_drop_leaves_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, find = threading.Event(), KvIndexes._find

    async def seen(self: KvIndexes, name: str) -> KvIndex | None:
        found = await find(self, name)
        looked.set()
        return found

    with door.session() as connection:
        connection.execute(MADE)
        door.hold()
        dropping = Running(door, "DROP KV INDEX docs_kv")
        asyncio.run_coroutine_threadsafe(door.generator.started.wait(), door.loop).result(20)
        monkeypatch.setattr(KvIndexes, "_find", seen)
        waiting = Running(door, "REFRESH KV INDEX docs_kv")
        assert looked.wait(20)
        door.release()
        dropping.join()
        waiting.join()
        assert dropping.error is None and waiting.error is not None
        assert waiting.error.sqlstate == "42704"
        for table in ("kv_indexes", "kv_index_texts", "kv_index_times", "kv_index_progress"):
            left = connection.execute(f"SELECT count(*) FROM tierkv_jobs.{table}".encode())
            assert left.fetchall() == [(0,)], table


def test_a_drop_that_is_cancelled_is_seen(door: Door) -> None:
    with door.session() as connection:
        connection.execute(MADE)
        door.hold()
        dropping = Running(door, "DROP KV INDEX docs_kv")
        asyncio.run_coroutine_threadsafe(door.generator.started.wait(), door.loop).result(20)
        dropping.connection.cancel_safe()
        dropping.join()
        door.release()
        ((state, stale_rows, error),) = door.rows(
            "SELECT state, stale_rows, last_error FROM tierkv.kv_indexes"
        )
        assert (state, stale_rows) == ("stale", None) and "DROP KV INDEX" in error
        connection.execute("DROP KV INDEX docs_kv")
        assert door.rows("SELECT name FROM tierkv.kv_indexes") == []
