"""The front's statistics at rest: exact sums, restarts, bounds, damage, and a disk that is full."""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.accounts.statistic_store import DAMAGED, StatisticStore
from tierkv.dbfront.accounts.statistic_tables import (
    FUNCTIONS,
    GROUPS,
    KV_INDEX_USES,
    MEMORY,
    STATEMENTS,
    TABLES,
    USAGE,
    open_database,
    seconds_of,
    step_of,
)
from tierkv.kvcore import limits

DAY_S = 86_400.0


_open: list[StatisticStore] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close(1.0)


def opened(path: Path | str = "", now_s: float = 100.0) -> StatisticStore:
    _open.append(StatisticStore(str(path), now_s=now_s, keep_s=30 * DAY_S))
    return _open[-1]


def count(store: StatisticStore, queryid: int = 1, at_s: float = 100.0, **counts: float) -> None:
    facts = {"query": f"SELECT {queryid}"}
    store.add(STATEMENTS, ("ann", queryid), counts, at_s=at_s, facts=facts)


def statements(store: StatisticStore, now_s: float = 100.0) -> list[dict[str, Any]]:
    return store.select("SELECT * FROM statements ORDER BY queryid", now_s)


def calls(store: StatisticStore) -> dict[int, int]:
    return {row["queryid"]: row["calls"] for row in statements(store)}


def test_what_is_new_is_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "stats.sqlite"
    for run in range(3):
        store = opened(path, now_s=100.0 + run)
        count(store, calls=1, total_time=0.5, at_s=200.0 + run)
        count(store, calls=2, rounds=3, at_s=199.0)
        store.flush(1.0)
        count(store, calls=4)
        assert calls(store) == {1: 7 * (run + 1)}
        assert store.resets(999.0) == dict.fromkeys(GROUPS, 100.0)
        store.close(1.0)
    ((row),) = statements(opened(path))
    assert row == dict.fromkeys(STATEMENTS.counters, 0) | {
        "userid": "ann",
        "queryid": 1,
        "query": "SELECT 1",
        "last_s": 202.0,
        "calls": 21,
        "total_time": 1.5,
        "rounds": 9,
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_killed_front_loses_only_what_it_had_not_written(tmp_path: Path) -> None:
    store = opened(tmp_path / "s")
    count(store, calls=1)
    store.flush(1.0)
    count(store, calls=1)
    # Nothing is closed: a second connection sees what a new process would.
    assert calls(opened(tmp_path / "s")) == {1: 1}


def test_two_fronts_on_one_file_add_up(tmp_path: Path) -> None:
    stores = [opened(tmp_path / "s") for _ in range(2)]
    for _ in range(3):
        for store in stores:
            count(store, calls=1)
            store.flush(1.0)
    assert [calls(store) for store in stores] == [{1: 6}, {1: 6}]


def test_threads_add_and_read_at_once(tmp_path: Path) -> None:
    store = opened(tmp_path / "s")

    def work() -> None:
        for number in range(200):
            count(store, calls=1)
            if number % 20 == 0:
                store.flush(1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls(store) == {1: 800}


def test_reset_forgets_a_group_and_says_when() -> None:
    store = opened()
    count(store, calls=1)
    store.add(FUNCTIONS, ("ai_generate", "tiny"), {"calls": 1}, at_s=1.0)
    store.append(lambda: {"type": "QueryFinish"})
    store.reset(["statements"], 500.0)
    assert calls(store) == {}
    assert len(store.select("SELECT * FROM functions", 1.0)) == 1
    assert len(store.select("SELECT * FROM query_log", 1.0)) == 1
    assert store.resets(1.0)["statements"] == 500.0
    assert store.resets(1.0)["functions"] == 100.0
    count(store, calls=1)
    store.reset(GROUPS, 600.0)
    assert [store.select(f"SELECT * FROM {table.name}", 1.0) for table in TABLES] == [[]] * len(
        TABLES
    )
    assert store.select("SELECT * FROM query_log", 1.0) == []
    assert store.resets(1.0) == dict.fromkeys(GROUPS, 600.0)


def test_the_least_recently_used_statements_go_first() -> None:
    store = opened()
    for number in range(limits.MAX_STATEMENTS_KEPT + 1_000):
        count(store, number, at_s=float(number), calls=1)
    count(store, 0, at_s=1e6, calls=1)
    store.flush(1e6)
    kept = calls(store)
    assert len(kept) == limits.MAX_STATEMENTS_KEPT
    assert kept[0] == 2
    assert set(kept) == {0, *range(1_001, limits.MAX_STATEMENTS_KEPT + 1_000)}


def test_usage_and_log_are_bounded_by_age_and_number() -> None:
    store = opened()
    now_s = 100 * DAY_S
    for day in range(100):
        key = (day * 86_400, f"q{day}", "ai_generate", "tiny")
        store.add(USAGE, key, {"calls": 1}, at_s=day * DAY_S, facts={"user_name": "ann"})
    for number in range(limits.MAX_QUERY_LOG_ROWS + 500):
        at_s = now_s if number >= 1_000 else 0.0
        store.append(lambda at_s=at_s, number=number: {"event_s": at_s, "pid": number})
    assert len(store.select("SELECT * FROM usage", now_s)) == 30
    ((bounds),) = store.select("SELECT count(*) n, min(pid) a, max(pid) b FROM query_log", now_s)
    last = limits.MAX_QUERY_LOG_ROWS + 499
    assert bounds == {"n": limits.MAX_QUERY_LOG_ROWS - 500, "a": 1_000, "b": last}


def test_a_file_of_an_older_release_gets_the_tables_that_it_lacks(tmp_path: Path) -> None:
    path = str(tmp_path / "statistics")
    StatisticStore(path, now_s=1.0).close(1.0)
    with closing(sqlite3.connect(path)) as old:
        old.execute("DROP TABLE kv_index_uses")
    store = StatisticStore(path, now_s=2.0)
    store.add(KV_INDEX_USES, ("ann", "i", 5.5), {"calls": 1, "hit_tokens": 7}, at_s=2.0)
    (row,) = store.select("SELECT owner, name, made_s, hit_tokens FROM kv_index_uses", 2.0)
    assert row == {"owner": "ann", "name": "i", "made_s": 5.5, "hit_tokens": 7}
    store.close(3.0)


def test_a_file_of_an_older_release_gets_the_counters_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "front.db"
    first = opened(path)
    count(first, calls=1, classified_calls=5)
    first.close(100.0)
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE statements DROP classified_calls")
        database.commit()
    again = opened(path)
    count(again, calls=1, classified_calls=2)
    ((row),) = statements(again)
    assert (row["calls"], row["classified_calls"]) == (2, 2)


def test_a_folder_in_its_place_leaves_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    assert "are lost when this process ends" in caplog.text
    count(store, calls=1)
    assert calls(store) == {1: 1}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["text", "newer", "torn"])
def test_a_damaged_file_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = tmp_path / "s"
    Path(f"{path}{DAMAGED}").write_text("an older one")
    store = opened(path)
    for number in range(1_000):
        count(store, number, calls=1)
    store.close(1.0)
    if what == "text":
        path.write_text("no database at all, but long enough to look at\n" * 100)
    elif what == "newer":
        database = sqlite3.connect(path)
        database.execute("PRAGMA user_version = 99")
        database.close()
    else:
        content = bytearray(path.read_bytes())
        content[4096:12288] = b"\xff" * 8192
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        store = opened(path, now_s=300.0)
    assert "starting new statistics" in caplog.text
    assert Path(f"{path}{DAMAGED}").read_bytes()[:8] != b"an older"
    count(store, calls=1)
    assert calls(store) == {1: 1}
    assert store.resets(1.0)["usage"] == 300.0
    store.close(1.0)
    assert calls(opened(path)) == {1: 1}


def test_a_file_damaged_while_in_use_is_replaced_and_nothing_new_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    store = opened(path)
    for number in range(5_000):
        count(store, number, calls=1)
    store.close(1.0)
    store = opened(path)
    database = sqlite3.connect(path)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 200_000)
    for number in range(5_000):
        count(store, number, calls=1)
    store.flush(1.0)
    assert "starting new statistics" in caplog.text
    assert calls(store) == dict.fromkeys(range(5_000), 1)


def test_a_full_disk_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path / "s")
    count(store, calls=1)
    store.flush(1.0)
    ((pages,),) = store._database.execute("PRAGMA page_count")
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(1_000):
        count(store, number, calls=1)
    store.append(lambda: {"type": "QueryFinish"})
    store.flush(1.0)
    count(store, 5, calls=1)
    store.flush(1.0)
    assert caplog.text.count("can't be written") == 1
    store._database.execute("PRAGMA max_page_count = 100000")
    found = calls(store)
    assert (len(found), found[1], found[5], found[6]) == (1_000, 2, 2, 1)
    assert len(store.select("SELECT * FROM query_log", 1.0)) == 1


def test_a_path_that_can_not_be_used_leaves_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = opened(tmp_path / "file" / "s")
    assert "are lost when this process ends" in caplog.text
    count(store, calls=1)
    assert calls(store) == {1: 1}


def test_every_table_is_made_of_known_columns() -> None:
    database = open_database(MEMORY, 1.0)
    for table in TABLES:
        made = [row[1] for row in database.execute(f"PRAGMA table_info({table.name})")]
        assert made == list(table.columns)
    database.close()


@given(st.lists(st.floats(min_value=1e-6, max_value=1e5), min_size=1))
def test_steps_are_as_exact_as_they_say(durations: list[float]) -> None:
    steps = Counter(map(step_of, durations))
    assert list(map(step_of, sorted(durations))) == sorted(steps.elements())
    for duration in durations:
        assert math.isclose(seconds_of(step_of(duration)), duration, rel_tol=0.0101)
    assert step_of(0.0) == 0


def test_a_damaged_file_of_several_workers_is_replaced_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    first, second = opened(path), opened(path)
    for number in range(5_000):
        count(first, number, calls=1)
    first.flush(1.0)
    first._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 200_000)
    for number in range(5_000):
        count(first, number, calls=1)
        count(second, number, calls=1)
    first.flush(1.0)
    second.flush(1.0)
    assert caplog.text.count("starting new statistics") == 1
    # The first still had its pages in memory, and follows the second to the new file.
    count(first, 0, calls=1)
    expected = dict.fromkeys(range(5_000), 1)
    assert calls(second) == expected
    assert calls(first) == calls(second) == expected | {0: 2}
