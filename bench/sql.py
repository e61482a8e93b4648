"""SQL with AI calls: savings from cache, prompt order and plan, and the cost of the front.

Run ``python -m bench.sql``. Three workloads run on a small model in four ways each: without cache,
with cache in written order, sorted by prefix, and by the plan with reordered fields. Ways take
turns in random order, each time on a new cluster; ratios are medians of the turns. A replay round
then covers many rows with few distinct prompts. A last part measures the front's cost of each
distinct call. ``--relay`` compares the relay with PostgreSQL alone (needs a PostgreSQL server and
pgbench).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from bench import front_overhead
from bench.plan_cluster import MODEL, ClusterShape, plan_cluster
from bench.report import Report, finish, make_parser
from bench.sql_workloads import Workload, naive_calls, workloads
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import StatementResult

SHARED = {"tierkv.max_calls": "0", "tierkv.max_tokens": "2", "tierkv.max_concurrency": "8"}
_WRITTEN = {"tierkv.prefix_order": "off", "tierkv.plan": "off", "tierkv.field_reorder": "off"}
WAYS: dict[str, dict[str, str]] = {
    "cache_off": {**_WRITTEN, "tierkv.cache": "off"},
    "written": _WRITTEN,
    "sorted": {"tierkv.plan": "off", "tierkv.field_reorder": "off"},
    "planned": {},
}
L1_PAGES = 160
"""Far fewer blocks than a workload has, so the order decides which blocks are still cached."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--relay", action="store_true", help="measure the PostgreSQL relay too")
    arguments = parser.parse_args(argv)
    report = Report("sql")
    rng = random.Random(arguments.seed)
    rows = 48 if arguments.quick else 240
    turns = 1 if arguments.quick else 3
    for workload in workloads(rng, rows):
        asyncio.run(_workload(report, workload, turns, rng))
    asyncio.run(_replay(report, 100_000 if arguments.quick else 1_000_000))
    asyncio.run(front_overhead.measure(report, 2_000 if arguments.quick else 10_000))
    report.note(
        f"{rows} rows a workload, L1 of {L1_PAGES} blocks of 16 tokens, 8 calls in flight; "
        f"medians of {turns} turns, the cluster starts anew for every way and turn"
    )
    if arguments.relay:
        from bench import sql_relay  # Needs a PostgreSQL server.

        sql_relay.measure(report, quick=arguments.quick)
    finish(report, arguments.format)


async def _workload(report: Report, workload: Workload, turns: int, rng: random.Random) -> None:
    results: dict[str, StatementResult] = {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    hit_ratios: dict[str, float] = {}
    for turn in range(turns):
        for way in rng.sample(list(WAYS), len(WAYS)):
            async with _asked(workload, WAYS[way]) as (session, result, seconds):
                stats = session.last_ai_stats
                _check_equal(workload, way, result, results.setdefault(way, result))
                times[way].append(seconds)
                hit_ratios[way] = stats.hit_ratio
                if way == "planned" and not turn:
                    await _add_calls(report, workload, session, stats)
    for way in WAYS:
        if workload.name != "join" or way == "sorted":
            _check_equal(workload, way, results[way], results["cache_off"])
        name = f"{workload.name}_{way}"
        report.add(f"{name}_s", statistics.median(times[way]))
        rows_per_s = len(results[way].rows) / statistics.median(times[way])
        report.add(f"{name}_rows_per_s", rows_per_s)
        report.add(f"{name}_hit_ratio", hit_ratios[way])
    for way in ("written", "sorted", "planned"):
        pairs = zip(times[way], times["cache_off"], strict=True)
        report.add(
            f"{workload.name}_{way}_of_cache_off", statistics.median(s / off for s, off in pairs)
        )


@asynccontextmanager
async def _asked(
    workload: Workload, settings: Mapping[str, str]
) -> AsyncIterator[tuple[DuckDbSession, StatementResult, float]]:
    """Run the workload's statement on a new cluster; yield session, result and seconds."""
    shape = ClusterShape(MODEL, 1, l1_pages=L1_PAGES, pool_bytes=1)
    async with plan_cluster(shape) as cluster:
        server = DuckDbSqlServer(
            DuckDbConfig(), cluster.generation, session_defaults=SHARED | settings
        )
        session = await _filled(server, workload)
        started = time.perf_counter()
        result = await session.execute(workload.statement)
        yield session, result, time.perf_counter() - started
        await server.close()


def _check_equal(
    workload: Workload, way: str, result: StatementResult, known: StatementResult
) -> None:
    if result.rows != known.rows:
        raise AssertionError(f"{workload.name}: {way} changed an answer")


async def _filled(server: DuckDbSqlServer, workload: Workload) -> DuckDbSession:
    session = await server.open_session(ClientInfo(user="bench"))
    for statement in workload.tables:
        await session.execute(statement)
    return session


async def _add_calls(
    report: Report, workload: Workload, session: DuckDbSession, stats: AiStats
) -> None:
    """Compare the number of sent calls with the calls of the naive plan."""
    sent = stats.distinct_calls
    positive: frozenset[str] = frozenset()
    if workload.name == "filter":
        passed = await session.execute(
            "SELECT DISTINCT body FROM reviews WHERE ai_filter('Is the review positive?', body)"
        )
        positive = frozenset(str(row[0]) for row in passed.rows)
    report.add(f"{workload.name}_calls", sent)
    naive = naive_calls(workload, positive)
    report.add(f"{workload.name}_naive_calls", naive)
    report.add(f"{workload.name}_calls_of_naive", sent / naive)


async def _replay(report: Report, rows: int) -> None:
    """Time a mean round of a statement over many rows and 20,000 distinct prompts."""
    prompts = min(20_000, rows // 5)
    async with front_overhead.instant_server() as server:
        session = await server.open_session(ClientInfo(user="bench"))
        await session.execute(
            f"CREATE TABLE t AS SELECT 'prompt ' || (i % {prompts}) AS p FROM range({rows}) r(i)"
        )
        started = time.perf_counter()
        await session.execute("SELECT count(p) FROM t")
        plain_s = time.perf_counter() - started
        await session.execute("SELECT count(ai_generate(p)) FROM t")
        stats = session.last_ai_stats
        report.add("replay_rows", rows)
        report.add("replay_distinct_prompts", prompts)
        report.add("replay_round_s", stats.engine_s / stats.rounds)
        report.add("replay_rows_per_s", rows * stats.rounds / stats.engine_s)
        report.add("replay_engine_alone_s", plain_s)


if __name__ == "__main__":
    main()
