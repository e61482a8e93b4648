"""The store of statistics against plain sums: writes, restarts, kills and resets in any order."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistic_tables import FUNCTIONS, STATEMENTS

NAMES = st.sampled_from(["a", "b", "c"])


class Statistics(RuleBasedStateMachine):
    """One file, a front that comes and goes, and what it should have counted.

    Attributes:
        written: what is on disk, by table and key.
        new: what is only in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.written: Counter[tuple[str, str]] = Counter()
        self.new: Counter[tuple[str, str]] = Counter()
        self.events: list[int] = []
        self.new_events: list[int] = []
        self.killed: list[StatisticStore] = []
        self.store = self.open()

    def open(self) -> StatisticStore:
        return StatisticStore(str(Path(self.folder.name) / "s"), now_s=1.0)

    @rule(name=NAMES, calls=st.integers(0, 5), is_function=st.booleans())
    def add(self, name: str, calls: int, is_function: bool) -> None:
        table = FUNCTIONS if is_function else STATEMENTS
        key = (name, "tiny") if is_function else (name, 7)
        self.store.add(table, key, {"calls": calls}, at_s=1.0)
        self.new[table.name, name] += calls

    @rule(number=st.integers(0, 9))
    def log(self, number: int) -> None:
        self.store.append(lambda: {"event_s": 1.0, "pid": number})
        self.new_events.append(number)

    @rule()
    def flush(self) -> None:
        self.store.flush(1.0)
        self.saved()

    def saved(self) -> None:
        self.written.update(self.new)
        self.events += self.new_events
        self.new.clear()
        self.new_events = []

    @rule()
    def restart(self) -> None:
        self.store.close(1.0)
        self.saved()
        self.store = self.open()

    @rule()
    def kill(self) -> None:
        self.killed.append(self.store)
        self.new.clear()
        self.new_events = []
        self.store = self.open()

    @rule(group=st.sampled_from(["statements", "functions", "query_log"]))
    def reset(self, group: str) -> None:
        self.store.reset([group], 2.0)
        self.saved()
        if group == "query_log":
            self.events = []
        for table, name in list(self.written):
            if table == group:
                del self.written[table, name]

    @invariant()
    def counts_are_those_that_were_written(self) -> None:
        found: Counter[tuple[str, str]] = Counter()
        other = self.open()
        for table, key in ((STATEMENTS, "userid"), (FUNCTIONS, "function_name")):
            for row in other.select(f"SELECT {key}, calls FROM {table.name}", 1.0):
                found[table.name, row[key]] += row["calls"]
        events = [row["pid"] for row in other.select("SELECT pid FROM query_log ORDER BY id", 1.0)]
        other.close(1.0)
        assert +found == +self.written
        assert events == self.events

    def teardown(self) -> None:
        # A killed process writes nothing more; here its store still holds what was lost.
        self.store.close(1.0)
        for store in self.killed:
            store.close(1.0)
        self.folder.cleanup()


TestStatistics = Statistics.TestCase
