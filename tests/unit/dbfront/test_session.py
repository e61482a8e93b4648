"""Writes, transactions, settings, describe, COPY and the admin views of a SQL session."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.fix_scheduler import make_info as scheduler_info
from tests.fix_sql import TABLES, InstantGenerator, answer_text, make_model
from tierkv.dbfront.contracts import ClientInfo, Column
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.views.admin import SettingRow
from tierkv.kvcore.block import BlockSpec, Owner
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import (
    CancelledByUserError,
    ConfigError,
    SqlError,
)
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId, RequestId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.location import Tier
from tierkv.kvcore.node import (
    ModelInfo,
    NodeInfo,
    NodeLoad,
    NodeReport,
    NodeRole,
    PathReport,
    TierStats,
)
from tierkv.kvcore.request import ReusePolicy
from tierkv.metaserver.client import BlockListing, BlockRecord, DirectoryNode, Namespace
from tierkv.scheduler.choosing.admission import WaitingCall
from tierkv.scheduler.dispatcher import WaitingRequest
from tierkv.scheduler.events import Dispatch, NodesSeen, RequestArrived, SeenNode, WantedModel
from tierkv.scheduler.requests.state import SchedulerState
from tierkv.scheduler.routing_stats import RoutingStats, RoutingView, node_costs

BODIES = {i: None if i % 10 == 7 else f"body {i % 30}" for i in range(60)}


async def rows(session: DuckDbSession, sql: str) -> list[tuple[object, ...]]:
    return list((await session.execute(sql)).rows)


async def tag(session: DuckDbSession, sql: str) -> str:
    return (await session.execute(sql)).command_tag


async def test_returning(session: DuckDbSession) -> None:
    sql = (
        "INSERT INTO docs SELECT 100 + id, topic, ai_generate(body) FROM docs WHERE id < 2 "
        "RETURNING id, ai_generate('r' || id) AS a"
    )
    described = await session.describe(sql)
    assert described.columns == (Column("id", "INTEGER"), Column("a", "VARCHAR"))
    result = await session.execute(sql)
    assert result.command_tag == "INSERT 0 2"
    assert sorted(result.rows) == [(100, answer_text("r100")), (101, answer_text("r101"))]
    assert result.columns == described.columns
    result = await session.execute("DELETE FROM docs WHERE id = 100 RETURNING body")
    assert list(result.rows) == [(answer_text("body 0"),)]


async def test_notices_of_transactions_have_their_states(session: DuckDbSession) -> None:
    await session.execute("BEGIN")
    assert (await session.execute("BEGIN")).notices[0].sqlstate == "25001"
    await session.execute("ROLLBACK")
    assert (await session.execute("ROLLBACK")).notices[0].sqlstate == "25P01"


async def test_client_options_and_server_defaults(generator: InstantGenerator) -> None:
    server = DuckDbSqlServer(
        DuckDbConfig(threads=1), generator, session_defaults={"tierkv.max_calls": "0"}
    )
    session = await server.open_session(
        ClientInfo(options={"tierkv.model": "other", "DateStyle": "ISO"})
    )
    assert await rows(session, "SHOW tierkv.max_calls") == [("0",)]
    assert await rows(session, "SHOW tierkv.model") == [("other",)]
    with pytest.raises(SqlError):
        await server.open_session(ClientInfo(options={"tierkv.nope": "1"}))
    await server.close()
    with pytest.raises(SqlError):
        DuckDbSqlServer(DuckDbConfig(), generator, session_defaults={"tierkv.nope": "1"})


async def test_describe(session: DuckDbSession, generator: InstantGenerator) -> None:
    described = await session.describe(
        "SELECT id, ai_generate($1 || body), $2::int + 1 AS n FROM docs WHERE id = CAST($3 AS "
        "bigint) LIMIT $4"
    )
    assert described.columns == (
        Column("id", "INTEGER"),
        Column("ai_generate", "VARCHAR"),
        Column("n", "INTEGER"),
    )
    assert described.parameter_types == ("VARCHAR", "INTEGER", "BIGINT", "BIGINT")
    for statement in ("INSERT INTO docs VALUES ($1, 1, 'x')", "CREATE TABLE x (a INT)", "BEGIN"):
        assert (await session.describe(statement)).columns is None
    explained = await session.describe("EXPLAIN SELECT 1")
    assert [column.name for column in explained.columns or ()] == ["explain_key", "explain_value"]
    shown = await session.describe("SHOW TABLES")
    assert [column.name for column in shown.columns or ()] == ["name"]
    decimal = await session.describe("SELECT 1.5::DECIMAL(18,3) AS d, [1] AS l")
    assert [column.type_name for column in decimal.columns or ()] == [
        "DECIMAL(18,3)",
        "INTEGER[]",
    ]
    with pytest.raises(SqlError):
        await session.describe("SELECT nope FROM docs")
    assert generator.prompts == []
    assert await rows(session, "SELECT count(*) FROM docs") == [(60,)]


async def test_database_file(tmp_path: Path, generator: InstantGenerator) -> None:
    for _ in range(2):
        server = DuckDbSqlServer(DuckDbConfig(path=str(tmp_path / "a.duckdb")), generator)
        session = await server.open_session(ClientInfo())
        await session.execute("CREATE TABLE IF NOT EXISTS t AS SELECT ai_generate('x') AS a")
        assert await rows(session, "SELECT * FROM t") == [(answer_text("x"),)]
        await server.close()
    assert generator.prompts == ["x"]
    with pytest.raises(ConfigError, match="hides the admin views"):
        DuckDbSqlServer(DuckDbConfig(path=str(tmp_path / "tierkv.db")), generator)
    duckdb.connect(tmp_path / "tierkv.db", config={"threads": 1}).close()  # Nothing has it open.
    with pytest.raises(ConfigError, match="can't open"):
        DuckDbSqlServer(DuckDbConfig(path=str(tmp_path / "no" / "a.db")), generator)


PATHS = (
    PathReport("dmp-0", "shm", "same host"),
    PathReport("", "rdma", "no RDMA device here", usable=False),
    PathReport("", "tcp", "127.0.0.1:7401"),
)


class ThreeNodes:
    """A cluster with fixed numbers."""

    async def nodes(self) -> tuple[DirectoryNode, ...]:
        l2 = TierStats(Tier.L2, medium="shm", model="tiny", query_tokens=100, hit_tokens=25)
        return tuple(
            DirectoryNode(
                info=NodeInfo(
                    NodeId(f"n{number}"),
                    Incarnation(1),
                    NodeRole.DMP,
                    HostId("h"),
                    models=(make_model(),),
                ),
                report=NodeReport(load=NodeLoad(kv_usage=0.5), tiers=(l2,), paths=PATHS),
                heartbeat_age_s=0.25,
                state="alive",
            )
            for number in range(3)
        )

    async def blocks(self, limit: int) -> BlockListing:
        record = BlockRecord(
            block=BlockSpec(
                BlockKey(b"k" * 16), BlockKey(bytes(16)), 64, owner=Owner("tiny", "ann", "chat-1")
            ),
            node_id=NodeId("n1"),
            tier="L2",
            size_bytes=4096,
            age_s=60.0,
            idle_s=1.0,
            hits=3,
            heat=1.5,
            leases=2,
        )
        return BlockListing((record,), 1)

    async def directory(self) -> tuple[tuple[str, int], ...]:
        return (("blocks", 7), ("leases_live", 2))

    async def models(self) -> tuple[ModelInfo, ...]:
        return (make_model(),)

    @property
    def dispatcher(self) -> ThreeNodes:
        return self

    def waiting(self) -> tuple[WaitingRequest, ...]:
        call = WaitingCall(RequestId("q1"), 2, waited_s=1.5, predicted_ttft_s=3.0, node_id=None)
        return (WaitingRequest("ann", "tiny", call),)

    def routing(self) -> RoutingView:
        state = SchedulerState()
        load = NodeLoad(prefill_token_s=0.01, l3_queued_bytes=7)
        state.handle(NodesSeen((SeenNode(scheduler_info("c1"), load),)), 0.0)
        arrived = RequestArrived(RequestId("q1"), WantedModel("tiny"), 100)
        (dispatch,) = state.handle(arrived, 0.0)
        assert isinstance(dispatch, Dispatch)
        stats = RoutingStats(8)
        stats.record_dispatch(dispatch, 0.0, unix_s=60.0, model="tiny", prompt_tokens=100)
        stats.record_first_token(dispatch, 1.5)
        return RoutingView(tuple(stats.decisions()), node_costs(state.fleet.records.values()))

    async def namespaces(self) -> tuple[Namespace, ...]:
        policy = ReusePolicy(KvCodec.FP8, blend=True, recompute_ratio=0.3, gradual=True)
        return (Namespace("own"), Namespace("team", ("ann", "bob"), True, policy))

    async def settings(self) -> tuple[SettingRow, ...]:
        return (SettingRow("front.pg_port", "5433", "default"),)


async def test_admin_views(generator: InstantGenerator) -> None:
    server = DuckDbSqlServer(
        DuckDbConfig(threads=1), generator, cluster=ThreeNodes(), clock=ManualClock(10.0)
    )
    session = await server.open_session(ClientInfo(user="ann", application_name="test"))
    for statement in session.split(TABLES):
        await session.execute(statement)
    assert await rows(
        session,
        "SELECT tier, medium, query_tokens, hit_tokens, hit_ratio FROM tierkv.stat_kvcache",
    ) == [("L2", "shm", 300, 75, 0.25)]
    assert await rows(
        session,
        "SELECT n.node_id, n.kv_cache_usage, d.id FROM tierkv.stat_kvcache_node n "
        "JOIN docs d ON 'n' || d.id = n.node_id WHERE n.hit_ratio > 0.2 ORDER BY d.id",
    ) == [("n0", 0.5, 0), ("n1", 0.5, 1), ("n2", 0.5, 2)]
    assert await rows(
        session,
        "SELECT block_hash, created_at::VARCHAR, session_id, heat, leases "
        "FROM tierkv.kvcache_blocks",
    ) == [("6b" * 16, "2023-11-14 22:12:30", "chat-1", 1.5, 2)]
    assert await rows(session, "SELECT value FROM tierkv.directory ORDER BY name") == [(7,), (2,)]
    assert await rows(session, "SELECT model_name, block_tokens FROM tierkv.models") == [
        ("tiny", 16)
    ]
    assert await rows(session, "SELECT count(*), min(state) FROM tierkv.nodes") == [(3, "alive")]
    assert await rows(session, "SELECT DISTINCT paths FROM tierkv.nodes") == [
        ("dmp-0 shm: same host; no rdma: no RDMA device here; tcp: 127.0.0.1:7401",)
    ]
    assert await rows(session, "SELECT * EXCLUDE (as_of) FROM tierkv.queue") == [
        ("q1", "ann", "tiny", 2, 1.5, 3.0, None)
    ]
    ((candidates, error_s, *decided),) = await rows(
        session,
        "SELECT candidates, error_s, request_id, attempt, stage, decided_at::VARCHAR, "
        "prompt_tokens, node_id FROM tierkv.routing_log",
    )
    assert decided == ["q1", 1, "whole", "1970-01-01 00:01:00", 100, "c1"]
    (candidate,) = json.loads(candidates)
    assert (candidate["node"], candidate["prefill_s"]) == ("c1", 1.0)
    assert error_s == pytest.approx(1.5 - candidate["wait_s"] - candidate["service_s"], abs=1e-6)
    assert await rows(
        session,
        "SELECT node_id, answers, round(p99_abs_error_s, 2) FROM tierkv.routing_errors "
        "ORDER BY node_id NULLS FIRST",
    ) == [(None, 1, 0.5), ("c1", 1, 0.5)]
    assert await rows(
        session,
        "SELECT node_id, requests, waiting_tokens, prefill_token_s, l3_queued_bytes, factor "
        "FROM tierkv.node_costs",
    ) == [("c1", 1, 100, 0.01, 7, 1.0)]
    assert await rows(session, "SELECT * EXCLUDE (as_of) FROM tierkv.namespaces") == [
        ("own", "own", True, None, False, 0.15, "hkvd", True),
        ("team", "ann, bob", True, "fp8", True, 0.3, "hkvd", True),
    ]
    assert await rows(session, "SELECT blend_refusal FROM tierkv.models") == [("",)]
    assert ("front.pg_port", "5433") in await rows(
        session, "SELECT name, setting FROM tierkv.settings"
    )
    assert await rows(
        session, "SELECT DISTINCT ai_generate(node_id) FROM tierkv.nodes WHERE node_id = 'n1'"
    ) == [(answer_text("n1"),)]
    await server.close()


async def test_stat_activity_shows_a_running_statement(
    server: DuckDbSqlServer, session: DuckDbSession, generator: InstantGenerator
) -> None:
    watcher = await server.open_session(ClientInfo(user="dba"))
    generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute("SELECT ai_generate(body) FROM docs"))
    await generator.started.wait()
    seen = await rows(
        watcher,
        "SELECT usename, state, phase, round, calls_total, query FROM tierkv.stat_activity "
        f"WHERE pid = {session.pid}",
    )
    assert seen == [("ann", "active", "llm", 1, 27, "SELECT ai_generate(body) FROM docs")]
    generator.gate.set()
    await running
    state = (
        f"SELECT state, query_start IS NOT NULL FROM tierkv.stat_activity WHERE pid = {session.pid}"
    )
    assert await rows(watcher, state) == [("idle", True)]


async def test_an_admin_view_is_described_before_it_was_ever_filled(
    session: DuckDbSession,
) -> None:
    described = await session.describe("SELECT pid, state FROM tierkv.stat_activity WHERE pid = $1")
    assert described.columns == (Column("pid", "BIGINT"), Column("state", "VARCHAR"))


async def test_pg_cancel_backend_stops_another_session(
    server: DuckDbSqlServer, session: DuckDbSession, generator: InstantGenerator
) -> None:
    watcher = await server.open_session(ClientInfo(user="dba"))
    generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute("SELECT ai_generate(body) FROM docs"))
    await generator.started.wait()
    cancel = "SELECT pg_cancel_backend(pid) FROM tierkv.stat_activity WHERE phase = 'llm'"
    assert await rows(watcher, cancel) == [(True,)]
    with pytest.raises(CancelledByUserError):
        await running
    assert await rows(session, "SELECT 1") == [(1,)]
    assert await rows(watcher, "SELECT pg_cancel_backend(4711)") == [(False,)]


async def test_text_that_is_no_utf8_is_refused(session: DuckDbSession) -> None:
    with pytest.raises(SqlError, match="UTF-8") as caught:
        await session.execute("SELECT '\udcff'")
    assert caught.value.sqlstate == "22021"


async def test_a_statement_cancelled_before_its_first_step_leaves_nothing_behind(
    session: DuckDbSession,
) -> None:
    """As when a client hangs up at once; a coroutine that was never awaited would warn."""

    async def work() -> None:
        pytest.fail("it was cancelled before")

    statement = work()
    task = await session._start(statement)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert inspect.getcoroutinestate(statement) == inspect.CORO_CLOSED


async def test_the_error_of_a_statement_whose_client_left_is_not_logged(
    session: DuckDbSession,
) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def work() -> None:
        raise SqlError("nobody reads this")

    task = await session._start(work())
    await asyncio.wait([task])
    session._running = None
    del task
    gc.collect()
    assert told == []


WITH_CALLS = [
    "INSERT INTO mine SELECT ai_generate(body) FROM docs",
    pytest.param(
        "WITH m AS (INSERT INTO mine SELECT ai_generate(body) FROM docs RETURNING 1) FROM m",
        marks=pytest.mark.skipif(
            int(duckdb.__version__.split(".")[0]) < 2, reason="the WITH of this DuckDB can't write"
        ),
    ),
    "SELECT id FROM docs WHERE ai_generate(body) = 'x'",
]


@pytest.mark.parametrize("sql", WITH_CALLS)
async def test_a_cancel_that_comes_again_and_again_leaves_the_session_usable(
    session: DuckDbSession, generator: InstantGenerator, sql: str
) -> None:
    """As Ctrl-C twice, or a cancel beside statement_timeout: the next one meets the ROLLBACK."""
    await session.execute("CREATE TABLE mine (a VARCHAR)")
    generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute(sql))
    await generator.started.wait()
    while not running.done():
        await session.cancel()
        await asyncio.sleep(0)
    with pytest.raises(CancelledByUserError):
        await running
    assert session.transaction_status == "I"
    assert await rows(session, "SELECT count(*) FROM mine") == [(0,)]
    generator.gate = None
    assert await tag(session, WITH_CALLS[0]) == "INSERT 0 60"


@pytest.mark.parametrize("sql", [WITH_CALLS[0], "INSERT INTO mine SELECT body FROM docs", "COMMIT"])
async def test_a_cancel_at_any_step_writes_all_or_nothing_and_says_which(
    session: DuckDbSession, sql: str
) -> None:
    await session.execute("CREATE TABLE mine (a VARCHAR)")
    for steps in range(0, 120, 3):
        await session.execute("DELETE FROM mine")
        if sql == "COMMIT":
            await session.execute("BEGIN")
            await session.execute("INSERT INTO mine SELECT body FROM docs")
        running = asyncio.create_task(session.execute(sql))
        for _ in range(steps):
            await asyncio.sleep(0)
        await session.cancel()
        try:
            await running
            written = 60
        except CancelledByUserError:
            written = 0
        if session.transaction_status != "I":
            await session.execute("ROLLBACK")
        assert await rows(session, "SELECT count(*) FROM mine") == [(written,)], steps


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_session_that_two_close_at_once_is_closed_once(
    generator: InstantGenerator, gives_up: bool
) -> None:
    """As when a client hangs up while the front stops; the second comes at any step."""
    for steps in range(12):
        server = DuckDbSqlServer(DuckDbConfig(), generator)
        session = await server.open_session(ClientInfo())
        await session.execute("SELECT 1")
        by_client = asyncio.create_task(session.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        if gives_up:
            by_client.cancel()
        await server.close()
        await asyncio.wait([by_client])
        assert by_client.cancelled() or by_client.exception() is None


KILLED = """
import duckdb, os, sys
database = duckdb.connect(sys.argv[1])
database.execute("CREATE TABLE t (v VARCHAR CHECK (length(rtrim(v)) < 5))")
database.execute("INSERT INTO t VALUES ('x')")
database.execute("CHECKPOINT")
database.execute("ALTER TABLE t ADD COLUMN w VARCHAR DEFAULT left('abc', 2)")
database.execute("INSERT INTO t VALUES ('y', 'z')")
os._exit(9)
"""


async def test_a_database_is_opened_whatever_a_kill_left_to_replay(
    tmp_path: Path, generator: InstantGenerator
) -> None:
    """DuckDB alone can't: it replays before it knows the functions of constraints."""
    path = tmp_path / "it's.duckdb"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60)
    server = DuckDbSqlServer(DuckDbConfig(path=str(path)), generator)
    session = await server.open_session(ClientInfo())
    assert await rows(session, "SELECT * FROM t ORDER BY v") == [("x", "ab"), ("y", "z")]
    with pytest.raises(SqlError):
        await session.execute("INSERT INTO t VALUES ('too long', '')")
    await server.close()
