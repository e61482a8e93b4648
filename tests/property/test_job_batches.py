"""Whatever the keys, batches, failures and interruptions: a job writes each row once or says why.

The oracle is the statement itself over the rows that can be answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_sql import InstantGenerator
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.errors import NoNodeError, RowLevelError, TierKVError

INTEGERS = st.integers(-(2**31), 2**31 - 1)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


@settings(max_examples=25, deadline=None)
@given(
    keys=st.one_of(
        st.tuples(st.just("int"), st.sets(INTEGERS, max_size=25)),
        st.tuples(st.just("text"), st.sets(WORDS, max_size=25)),
        st.tuples(
            st.just("numeric(12, 2)"),
            st.sets(st.decimals(-1000, 1000, places=2, allow_nan=False), max_size=25),
        ),
    ),
    data=st.data(),
)
def test_each_row_is_written_once_or_set_aside(
    keys: tuple[str, set[Any]], data: st.DataObject
) -> None:
    kind, values = keys
    rows = dict(enumerate(sorted(values)))
    numbers = st.sets(st.sampled_from(sorted(rows)), max_size=4) if rows else st.just(set[int]())
    failing = data.draw(numbers, label="failing")
    away = data.draw(numbers, label="away")
    batch = data.draw(st.integers(1, 9), label="batch")
    parts = data.draw(st.integers(1, 3), label="parts")
    stops = data.draw(st.integers(0, 3), label="stops")
    asyncio.run(_run(kind, rows, failing, away, batch, parts, stops))


async def _run(
    kind: str,
    rows: dict[int, Any],
    failing: set[int],
    away: set[int],
    batch: int,
    parts: int,
    stops: int,
) -> None:
    errors: dict[str, TierKVError | list[TierKVError]] = {}
    errors |= {f"<{n}>": [NoNodeError("away")] for n in away}
    errors |= {f"<{n}>": RowLevelError("no") for n in failing}
    engine = DuckDbSqlServer(DuckDbConfig(threads=1), InstantGenerator(failing=errors))
    server = DialectServer(engine, jobs=engine.jobs)
    session = await server.open_session(ClientInfo())
    try:
        await session.execute(f"CREATE TABLE docs (k {kind}, n int)")
        for number, key in rows.items():
            await session.execute("INSERT INTO docs VALUES ($1, $2)", (key, number))
        await session.execute("CREATE TABLE answers (n int, answer text)")
        text = (
            "CREATE AI JOB work AS INSERT INTO answers SELECT n, ai_generate('<' || n || '>') "
            f"FROM docs WITH (key = k, batch = {batch}, partitions = {parts}, max_cost_tokens = "
        )
        for number in range(stops):  # Stopped after its first batches, again and again.
            try:
                await session.execute(f"{text}{5 * (number + 1)})")
            except TierKVError as error:
                assert error.sqlstate == "53400", error
            text = "RESUME JOB work WITH (max_cost_tokens = "
        await session.execute(f"{text}0)")
        written = (await session.execute("SELECT n FROM answers ORDER BY n")).rows
        assert [n for (n,) in written] == [n for n in rows if n not in failing]
        aside = (await session.execute("SELECT key FROM tierkv.job_failures")).rows
        assert sorted(key for (key,) in aside) == sorted(str(rows[n]) for n in failing)
        state = (await session.execute("SELECT state, done, failed FROM tierkv.jobs")).rows
        assert state == [("done", len(rows), len(failing))]
    finally:
        await session.close()
        await server.close()


def test_an_empty_text_is_a_key_like_any_other() -> None:
    rows = {0: "", 1: "a", 2: "b", 3: "c"}
    asyncio.run(_run("text", rows, {2}, {1}, batch=1, parts=4, stops=1))
