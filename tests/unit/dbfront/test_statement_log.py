"""What the front counts of statements: exact numbers, and no text of a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.fix_accounts import make_failed_call, make_request
from tests.fix_sql import TABLES, InstantGenerator
from tierkv.dbfront.accounts.ended_call import CallEnd
from tierkv.dbfront.accounts.statement_entry import LoggedStatements, new_query_id
from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import ClientInfo, PreparedCall, TextEvent
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.views.statistics import quantile_ms
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import (
    CancelledByUserError,
    OverloadedError,
    RowLevelError,
    SqlError,
    TierKVError,
    UdfArgumentError,
    UnknownModelError,
)
from tierkv.sql.view_columns import VIEW_COLUMNS

NOON = 1_700_049_600.0  # 2023-11-15 12:00:00 UTC
FULL = "SELECT id, ai_generate('Secret question: ' || body) FROM docs WHERE id < 7"
SHOWN = "SELECT id, ai_generate($1 || body) FROM docs WHERE id < $2"


class Front:
    """A server whose statistics are in a file, and which can be started again."""

    def __init__(self, path: Path, generator: InstantGenerator) -> None:
        self.path = path
        self.generator = generator
        self.clock = ManualClock(0.0, epoch=NOON)
        self.logged = LoggedStatements.AI
        self.server: DuckDbSqlServer

    def start(self, logged: LoggedStatements = LoggedStatements.AI) -> None:
        store = StatisticStore(str(self.path), now_s=self.clock.wall())
        log = StatementLog(store, self.clock, logged=logged)
        config = DuckDbConfig(threads=1)
        self.server = DuckDbSqlServer(config, self.generator, clock=self.clock, statements=log)

    async def session(self, user: str = "ann", **options: str) -> DuckDbSession:
        settings = {f"tierkv.{name}": value for name, value in options.items()}
        client = ClientInfo(user=user, application_name="test", options=settings)
        session = await self.server.open_session(client)
        for statement in session.split(TABLES):
            await session.execute(statement.replace("CREATE TABLE", "CREATE OR REPLACE TABLE"))
        return session

    async def view(self, view: str, session: DuckDbSession | None = None) -> list[dict[str, Any]]:
        asking = session or await self.server.open_session(ClientInfo(user="dba"))
        result = await asking.execute(f"SELECT * FROM tierkv.{view}")
        names = [column.name for column in result.columns]
        assert names == list(VIEW_COLUMNS[view])
        return [dict(zip(names[:-1], row[:-1], strict=True)) for row in result.rows]


@pytest.fixture
async def front(tmp_path: Path, generator: InstantGenerator) -> AsyncIterator[Front]:
    front = Front(tmp_path / "stats.sqlite", generator)
    front.start()
    yield front
    await front.server.close()


def counted(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def tokens(*ids: int) -> int:
    """Prompt tokens of distinct prompts, as InstantGenerator counts them."""
    bodies = {f"body {i % 30}" for i in ids if i % 10 != 7}
    return sum(len(f"user: Secret question: {body}") for body in bodies)


async def test_every_number_of_a_statement(front: Front) -> None:
    session = await front.session(query_tag="nightly")
    await session.execute(FULL)
    await session.execute(FULL.replace("Secret", "Another secret").replace("7", "40"))
    many = sum(len(f"user: Another secret question: body {i}") for i in range(30) if i % 10 != 7)
    ((row),) = await front.view("stat_statements")
    assert row == {
        "queryid": row["queryid"],
        "userid": "ann",
        "query": SHOWN,
        "calls": 2,
        "failures": 0,
        "total_time": 0.0,
        "engine_time": 0.0,
        "llm_wait_time": 0.0,
        "rounds": 4,
        "ai_calls": 7 + 36,
        "ai_calls_deduped": 36 - 27,
        "result_cache_hits": 0,
        "classified_calls": 0,
        "prompt_tokens": tokens(*range(7)) + many,
        "cached_tokens": 3 * (7 + 27),
        "completion_tokens": 7 + 27,
        "errors": 0,
        "stats_reset": datetime(2023, 11, 15, 12),
    }
    ((function),) = await front.view("stat_functions")
    assert function == {
        "function_name": "ai_generate",
        "model_name": "tiny",
        "calls": 34,
        "rows": 43,
        "errors": 0,
        "retries": 0,
        "null_results": 0,
        "classified_calls": 0,
        "prompt_tokens": row["prompt_tokens"],
        "cached_tokens": 102,
        "completion_tokens": 34,
        "total_time": 34_000.0,
        "mean_ttft": 500.0,
        "p95_ttft": pytest.approx(500.0, rel=0.01),
        "stats_reset": datetime(2023, 11, 15, 12),
    }
    first, second = await front.view("usage_history")
    assert first == {
        "start_time": datetime(2023, 11, 15, 12),
        "end_time": datetime(2023, 11, 15, 13),
        "query_id": first["query_id"],
        "user_name": "ann",
        "role_names": None,
        "query_tag": "nightly",
        "function_name": "ai_generate",
        "model_name": "tiny",
        "prompt_tokens": tokens(*range(7)),
        "cached_tokens": 21,
        "completion_tokens": 7,
        "calls": 7,
        "errors": 0,
        "is_completed": True,
        "stats_reset": datetime(2023, 11, 15, 12),
    }
    assert (second["prompt_tokens"], second["calls"]) == (many, 27)
    log = await front.view("query_log")
    assert counted(log, "type", "query_id", "queryid", "query", "query_kind", "ai_calls") == [
        ("QueryStart", first["query_id"], row["queryid"], SHOWN, "query", None),
        ("QueryFinish", first["query_id"], row["queryid"], SHOWN, "query", 7),
        ("QueryStart", second["query_id"], row["queryid"], SHOWN, "query", None),
        ("QueryFinish", second["query_id"], row["queryid"], SHOWN, "query", 36),
    ]
    assert counted(log[-1:], "rounds", "prompt_tokens", "errors", "exception_code") == [
        (2, many, 0, None)
    ]
    assert counted(log[:1], "pid", "user_name", "application_name", "query_tag") == [
        (session.pid, "ann", "test", "nightly")
    ]


async def test_time_passes_where_it_passes(front: Front) -> None:
    session = await front.session()
    front.generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute(FULL))
    await front.generator.started.wait()
    front.clock.advance(2.5)
    front.generator.gate.set()
    await running
    ((row),) = await front.view("stat_statements")
    assert (row["total_time"], row["engine_time"], row["llm_wait_time"]) == (2500.0, 0.0, 2500.0)
    start, finish = await front.view("query_log")
    assert (start["query_duration"], finish["query_duration"]) == (None, 2500.0)
    assert (finish["event_time"] - start["event_time"]).total_seconds() == 2.5


async def test_no_prompt_is_in_any_view_of_another_user(front: Front) -> None:
    session = await front.session()
    front.generator.gate = asyncio.Event()
    front.generator.failing["body 5"] = RowLevelError("Secret answer")
    running = asyncio.create_task(session.execute(FULL))
    await front.generator.started.wait()
    activity = await front.view("stat_activity")
    assert SHOWN in [row["query"] for row in activity]
    own = await front.view("stat_activity", await front.server.open_session(ClientInfo("ann")))
    assert FULL in [row["query"] for row in own]
    front.generator.gate.set()
    await running
    with pytest.raises(SqlError):
        await session.execute("SELECT ai_generate('Secret'), 'Secret'::INT")
    with pytest.raises(TierKVError):
        await session.execute("SELECT ai_generate('Secret', 'Secret', Secret => 'Secret')")
    for view in VIEW_COLUMNS:
        if view != "settings":
            shown = json.dumps(await front.view(view), default=str).replace("Secret =>", "")
            assert "Secret" not in shown, view
    await front.server.close()
    stored = b"".join(path.read_bytes() for path in front.path.parent.iterdir())
    assert b"Secret question" not in stored
    assert b"stat_statements" not in stored
    front.start()


async def test_a_call_that_fails_is_charged_for_the_answers_that_it_had(front: Front) -> None:
    session = await front.session(max_concurrency="1")
    front.generator.failing["Extract the b."] = RowLevelError("no")
    await session.execute("SELECT ai_extract('t', '[\"a\", \"b\"]')")
    (function,) = await front.view("stat_functions")
    asked = len("user: t\nQuestion: Extract the a.")
    costs = ("calls", "errors", "prompt_tokens", "completion_tokens", "total_time")
    assert counted([function], *costs) == [(1, 1, asked, 1, 1_000.0)]
    (usage,) = await front.view("usage_history")
    assert counted([usage], *costs[2:4]) == [(asked, 1)]
    stats = session.last_ai_stats
    assert (stats.distinct_calls, stats.errors, stats.requests) == (1, 1, 1)
    assert (stats.prompt_tokens, stats.completion_tokens) == (asked, 1)


async def test_how_statements_end(front: Front) -> None:
    session = await front.session(max_error_ratio="0.5")
    front.generator.failing["bad"] = RowLevelError("no")
    statements = {
        "SELECT ai_generate(modle => 'x')": ("ExceptionBeforeStart", "22023"),
        "SELECT ai_generate('x', model => 'gpt')": ("ExceptionBeforeStart", "42704"),
        "SELECT ai_generate('never ends)": ("ExceptionBeforeStart", "42601"),
        "SELECT ai_generate('x')::INT": ("ExceptionWhileProcessing", "22P02"),
        "SELECT ai_generate('bad')": ("ExceptionWhileProcessing", "22000"),
    }
    for statement, (_, code) in statements.items():
        with pytest.raises(TierKVError) as caught:
            await session.execute(statement)
        assert caught.value.sqlstate == code
    ends = [row for row in await front.view("query_log") if row["type"] != "QueryStart"]
    assert counted(ends, "type", "exception_code") == list(statements.values())
    assert [row["query"] for row in ends] == [
        "SELECT ai_generate(modle => $1)",
        "SELECT ai_generate($1, model => $2)",
        None,
        "SELECT ai_generate($1)::INT",
        "SELECT ai_generate($1)",
    ]
    rows = await front.view("stat_statements")
    assert counted(rows, "query", "calls", "failures", "errors") == [
        ("SELECT ai_generate($1)::INT", 1, 1, 0),
        ("SELECT ai_generate($1)", 1, 1, 1),
    ]


async def test_failed_and_null_answers_are_counted_by_function(front: Front) -> None:
    session = await front.session()
    front.generator.failing["body 3"] = RowLevelError("no")
    await session.execute("SELECT ai_generate(body), ai_generate(body, 'other') FROM docs")
    rows = await front.view("stat_functions")
    # 54 rows have a body: 27 distinct ones, of which "body 3" alone fails.
    names = ("model_name", "calls", "rows", "errors", "null_results", "completion_tokens")
    assert counted(rows, *names) == [("other", 27, 54, 1, 1, 26), ("tiny", 27, 54, 1, 1, 26)]
    usage = await front.view("usage_history")
    assert sorted(counted(usage, "model_name", "calls", "errors")) == [
        ("other", 27, 1),
        ("tiny", 27, 1),
    ]
    ((statement),) = await front.view("stat_statements")
    assert (statement["errors"], statement["ai_calls"]) == (2, 108)


class FullAtFirst(InstantGenerator):
    """A model that has no room when some prompts come for the first time."""

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        prompt = (prepared.call.messages or ())[-1].content
        if prompt in ("body 1", "body 2") and prompt not in self.prompts:
            self.prompts.append(prompt)
            raise OverloadedError("full", retry_after_ms=1)
        async for event in super().stream(prepared):
            yield event


async def test_what_is_sent_again_is_counted(tmp_path: Path) -> None:
    front = Front(tmp_path / "stats.sqlite", FullAtFirst())
    front.start()
    session = await front.session()
    await session.execute("SELECT ai_generate(body) FROM docs")
    rows = await front.view("stat_functions")
    assert counted(rows, "calls", "rows", "retries", "errors") == [(27, 54, 2, 0)]
    await front.server.close()


async def test_a_write_counts_its_rows_once(front: Front) -> None:
    session = await front.session()
    await session.execute("INSERT INTO docs SELECT id + 100, 0, ai_generate(body) FROM docs")
    assert counted(await front.view("stat_functions"), "calls", "rows") == [(27, 54)]
    ((row),) = await front.view("stat_statements")
    assert (row["ai_calls"], row["ai_calls_deduped"]) == (54, 27)


async def test_a_streamed_statement_counts_the_rows_of_all_windows(front: Front) -> None:
    session = await front.session(execution="stream", query_tag="streams")
    await session.execute("CREATE TABLE many AS SELECT i % 100 AS n FROM range(9000) r(i)")
    result = await session.execute("SELECT n, ai_generate('Note ' || n) FROM many")
    assert len(result.rows) == 9000
    assert counted(await front.view("stat_functions"), "calls", "rows") == [(100, 9000)]
    ((row),) = await front.view("stat_statements")
    assert (row["ai_calls"], row["ai_calls_deduped"], row["failures"]) == (9000, 8900, 0)
    log = await front.view("query_log")
    assert counted(log, "type", "query_tag", "ai_calls") == [
        ("QueryStart", "streams", None),
        ("QueryFinish", "streams", 9000),
    ]


async def test_a_cancelled_statement(front: Front) -> None:
    session = await front.session()
    front.generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute(FULL))
    await front.generator.started.wait()
    (usage, start) = (await front.view("usage_history"), (await front.view("query_log"))[-1])
    assert (usage, start["type"]) == ([], "QueryStart")
    watched = await front.view("stat_activity")
    assert start["query_id"] in [row["query_id"] for row in watched]
    await session.cancel()
    with pytest.raises(CancelledByUserError):
        await running
    end = (await front.view("query_log"))[-1]
    assert (end["type"], end["exception_code"]) == ("ExceptionWhileProcessing", "57014")
    assert counted(await front.view("stat_statements"), "calls", "failures") == [(1, 1)]


async def test_usage_is_split_at_the_hour(front: Front) -> None:
    session = await front.session(max_concurrency="1")
    front.generator.gate = asyncio.Event()
    front.generator.gate.set()
    log = front.server.statements
    account = log.open(session.client, 1, "SELECT ai_generate('x')")
    account.planned("query", holds_calls=True)
    await account.began()
    for _ in range(3):
        account.take(make_failed_call())
        front.clock.advance(1800.0)
    assert counted(await front.view("usage_history"), "calls", "is_completed") == [
        (2, False),
        (1, False),
    ]
    account.ended(AiStats())
    rows = await front.view("usage_history")
    assert counted(rows, "calls", "is_completed") == [(2, True), (1, True)]
    assert [row["start_time"].hour for row in rows] == [12, 13]


async def test_counters_go_on_after_a_restart(front: Front) -> None:
    session = await front.session()
    await session.execute(FULL)
    before = {view: await front.view(view) for view in ("stat_statements", "stat_functions")}
    await front.server.close()
    front.clock.advance(100.0)
    front.start()
    for view, rows in before.items():
        assert await front.view(view) == rows
    await (await front.session()).execute(FULL)
    ((row),) = await front.view("stat_statements")
    ((old),) = before["stat_statements"]
    assert (row["calls"], row["prompt_tokens"]) == (2, 2 * old["prompt_tokens"])
    assert row["stats_reset"] == old["stats_reset"]
    assert len(await front.view("usage_history")) == 2


async def test_a_statement_that_died_has_a_start_and_no_end(front: Front) -> None:
    session = await front.session()
    front.generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute(FULL))
    await front.generator.started.wait()
    # Another process sees what this one would leave if it were killed now.
    other = StatisticStore(str(front.path), now_s=front.clock.wall())
    rows = other.select("SELECT type, query, queryid FROM query_log", 0.0)
    assert [(row["type"], row["query"]) for row in rows] == [("QueryStart", SHOWN)]
    other.close(0.0)
    front.generator.gate.set()
    await running


async def test_sessions_at_once_add_up(front: Front) -> None:
    sessions = [await front.session(user) for user in ("ann", "bob", "ann", "cid")]
    statement = "SELECT ai_generate('q' || i) FROM range(20) r(i)"
    await asyncio.gather(*(session.execute(statement) for session in sessions for _ in [0]))
    await asyncio.gather(*(session.execute(statement) for session in sessions))
    rows = await front.view("stat_statements")
    assert sorted(counted(rows, "userid", "calls", "ai_calls")) == [
        ("ann", 4, 80),
        ("bob", 2, 40),
        ("cid", 2, 40),
    ]
    assert counted(await front.view("stat_functions"), "calls", "rows") == [(160, 160)]
    log = await front.view("query_log")
    assert len({row["query_id"] for row in log}) == 8
    assert len(log) == 16


async def test_reset(front: Front) -> None:
    session = await front.session()
    await session.execute(FULL)
    front.clock.advance(60.0)
    later = datetime(2023, 11, 15, 12, 1)
    assert (await session.execute("SELECT tierkv.stat_reset('statements')")).rows == [(later,)]
    assert await front.view("stat_statements") == []
    await session.execute(FULL)
    ((row),) = await front.view("stat_statements")
    assert (row["calls"], row["stats_reset"]) == (1, later)
    ((function),) = await front.view("stat_functions")
    assert (function["calls"], function["stats_reset"]) == (14, datetime(2023, 11, 15, 12))
    front.clock.advance(60.0)
    assert (await session.execute("SELECT tierkv.stat_reset()")).rows == [
        (datetime(2023, 11, 15, 12, 2),)
    ]
    for view in ("stat_statements", "stat_functions", "usage_history"):
        assert await front.view(view) == []
    assert len(await front.view("query_log")) == 4
    await session.execute("SELECT tierkv.stat_reset(what) FROM (VALUES ('query_log')) t(what)")
    assert await front.view("query_log") == []


async def test_an_unknown_group_is_refused_with_the_known_ones(front: Front) -> None:
    session = await front.session()
    with pytest.raises(UdfArgumentError, match="no statistics 'statement' to reset") as caught:
        await session.execute("SELECT tierkv.stat_reset('statement')")
    assert caught.value.hint == "Did you mean statements?"
    with pytest.raises(SqlError, match="convert"):
        await session.execute("SELECT 'a'::INT")


async def test_describing_resets_nothing(front: Front) -> None:
    session = await front.session()
    await session.execute(FULL)
    described = await session.describe("SELECT tierkv.stat_reset()")
    assert [column.type_name for column in described.columns or ()] == ["TIMESTAMP"]
    await session.execute("EXPLAIN SELECT tierkv.stat_reset()")
    assert len(await front.view("stat_statements")) == 1


@pytest.mark.parametrize("logged", list(LoggedStatements))
async def test_what_is_logged(front: Front, logged: LoggedStatements) -> None:
    await front.server.close()
    front.start(logged)
    session = await front.session()
    await session.execute("SELECT tierkv.stat_reset('query_log')")
    await session.execute("BEGIN")
    await session.execute("SET tierkv.max_tokens = 4")
    await session.execute("EXPLAIN SELECT ai_generate('x')")
    await session.execute("SELECT ai_generate('x')")
    await session.execute("COMMIT")
    with pytest.raises(SqlError):
        await session.execute("INSERT INTO docs VALUES (1, 0, 'twice')")
    with pytest.raises(SqlError):
        await session.execute("SELECT * FROM nowhere")
    with pytest.raises(TierKVError):
        await session.execute("SELECT * FROM docs WHERE ai_nothing(body)")
    with pytest.raises(TierKVError):
        await session.describe("SELECT nothing('x")
    log = await front.view("query_log")
    ai = [
        ("QueryStart", "query", "SELECT ai_generate($1)", None),
        ("QueryFinish", "query", "SELECT ai_generate($1)", None),
    ]
    expected = {
        LoggedStatements.OFF: [],
        LoggedStatements.AI: [
            *ai,
            (
                "ExceptionBeforeStart",
                "query",
                "SELECT * FROM docs WHERE ai_nothing(body)",
                "42883",
            ),
        ],
        LoggedStatements.ALL: [
            ("QueryFinish", "query", "SELECT tierkv.stat_reset($1)", None),
            ("QueryFinish", "begin", "BEGIN", None),
            ("QueryFinish", "set", "SET tierkv.max_tokens = $1", None),
            ("QueryFinish", "query", "EXPLAIN SELECT ai_generate($1)", None),
            *ai,
            ("QueryFinish", "commit", "COMMIT", None),
            ("ExceptionWhileProcessing", "insert", "INSERT INTO docs VALUES ($1, $2, $3)", "23505"),
            ("ExceptionBeforeStart", "query", "SELECT * FROM nowhere", "42P01"),
            (
                "ExceptionBeforeStart",
                "query",
                "SELECT * FROM docs WHERE ai_nothing(body)",
                "42883",
            ),
            ("ExceptionBeforeStart", "", None, "42601"),
        ],
    }[logged]
    assert counted(log, "type", "query_kind", "query", "exception_code") == expected
    assert len(await front.view("stat_statements")) == 1


async def test_the_scheduler_is_counted_over_restarts_and_resets(front: Front) -> None:
    counts: dict[str, dict[str, float]] = {"tiny": {"decisions": 3, "queue_time": 1.5}}
    names = ("model_name", "decisions", "affinity_hit", "queue_time")
    front.server.statements.scheduler_counts = lambda: {m: dict(c) for m, c in counts.items()}
    assert counted(await front.view("stat_scheduler"), *names) == [("tiny", 3, 0, 1.5)]
    counts["tiny"] |= {"decisions": 5, "affinity_hit": 2}
    await front.server.close()
    front.start()
    assert counted(await front.view("stat_scheduler"), *names) == [("tiny", 5, 2, 1.5)]
    counts["tiny"] = {"decisions": 1, "affinity_hit": 1, "queue_time": 0.0}
    front.server.statements.scheduler_counts = lambda: {m: dict(c) for m, c in counts.items()}
    assert counted(await front.view("stat_scheduler"), *names) == [("tiny", 6, 3, 1.5)]
    await front.server.statements.reset("scheduler")
    counts["tiny"]["decisions"] += 4
    assert counted(await front.view("stat_scheduler"), *names) == [("tiny", 4, 0, 0.0)]


async def test_the_log_writes_by_itself(tmp_path: Path) -> None:
    clock = ManualClock(0.0, epoch=NOON)
    store = StatisticStore(str(tmp_path / "s"), now_s=NOON)
    log = StatementLog(store, clock, flush_s=0.001)
    other = StatisticStore(str(tmp_path / "s"), now_s=NOON)
    await log.start()
    account = log.open(ClientInfo(), 1, "SELECT 1")
    account.take(make_failed_call())
    while not other.select("SELECT * FROM functions", 0.0):
        await asyncio.sleep(0.001)
    await log.stop()
    other.close(0.0)


async def test_a_write_that_fails_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(0.0, epoch=NOON)
    log = StatementLog(StatisticStore(now_s=NOON), clock, flush_s=0.001)
    looks = 0

    def counts() -> dict[str, dict[str, float]]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("a bug")
        return {"tiny": {"decisions": looks}}

    log.scheduler_counts = counts
    await log.start()
    while looks < 3:
        await asyncio.sleep(0.001)
    await log.stop()
    assert caplog.text.count("could not be written") == 1


async def test_calls_that_came_by_rest(front: Front) -> None:
    log = front.server.statements
    answered = make_request(origin="chat.completions")
    log.take(answered)
    log.take(make_request("req-2", origin="chat.completions", ttft_s=0.75))
    failed = {"end": CallEnd.FAILED, "usage": None, "ttft_s": 0.0, "total_s": 1.0}
    log.take(make_request(origin="completions", **failed))
    log.take(make_request())  # Its statement counts it.
    names = ("function_name", "calls", "rows", "errors", "prompt_tokens", "cached_tokens")
    rows = await front.view("stat_functions")
    assert counted(rows, *names, "completion_tokens", "total_time", "mean_ttft") == [
        ("chat.completions", 2, 0, 0, 200, 96, 14, 3000.0, 500.0),
        ("completions", 1, 0, 1, 0, 0, 0, 1000.0, None),
    ]
    usage = await front.view("usage_history")
    assert counted(usage, "query_id", "user_name", "function_name", "calls", "is_completed") == [
        ("req-1", "team", "chat.completions", 1, True),
        ("req-2", "team", "chat.completions", 1, True),
        ("req-1", "team", "completions", 1, True),
    ]


def test_query_ids_sort_by_time() -> None:
    ids = [new_query_id(second) for second in (0.0, NOON, NOON + 0.001, 1e10)]
    assert ids == sorted(ids)
    assert [UUID(one).version for one in ids] == [7] * 4
    assert [UUID(one).variant for one in ids] == ["specified in RFC 4122"] * 4
    assert UUID(ids[1]).int >> 80 == int(NOON * 1000)
    assert len({new_query_id(NOON) for _ in range(1_000)}) == 1_000


def test_a_quantile_is_that_of_the_rank() -> None:
    assert quantile_ms([]) is None
    assert quantile_ms([(0, 1)]) == pytest.approx(0.001)
    steps = [(100, 94), (200, 1), (300, 5)]
    low, middle = quantile_ms(steps, 0.94), quantile_ms(steps)
    assert low is not None and middle is not None
    assert middle / low == pytest.approx(1.02**100)


async def test_unknown_models_are_not_counted(front: Front) -> None:
    session = await front.session()
    with pytest.raises(UnknownModelError):
        await session.execute("SELECT ai_generate(body, 'model ' || id) FROM docs")
    assert await front.view("stat_functions") == []
