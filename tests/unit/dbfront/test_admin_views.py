"""The admin views about the cluster: a directory, nodes and a scheduler as rows of SQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fix_meta import join, store_chain
from tests.fix_scheduler import make_info, make_request
from tests.fix_sql import TABLES, InstantGenerator, answer_text
from tests.fix_text import QUICK, Front, running_front, write_model_folder
from tierkv.config import load_config
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.views.worker_views import routing_rows
from tierkv.kvcore.block import Owner, Tier
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import NoNodeError
from tierkv.kvcore.ids import BlockKey, HostId, RequestId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import (
    NamespaceUsage,
    NodeInfo,
    NodeLoad,
    NodeReport,
    NodeRole,
    PathReport,
    TierStats,
)
from tierkv.kvcore.request import ReusePolicy
from tierkv.metaserver.client import KvLimits, Namespace
from tierkv.parts.front_source import MetaSource
from tierkv.scheduler.events import Dispatch, NodesSeen, RequestArrived, SeenNode, WantedModel
from tierkv.scheduler.requests.state import SchedulerState
from tierkv.scheduler.routing_stats import RoutingStats, RoutingView, node_costs

PATHS = (
    PathReport("dmp-0", "shm", "same host"),
    PathReport("", "rdma", "no RDMA device here", usable=False),
    PathReport("", "tcp", "127.0.0.1:7401"),
)
L2 = TierStats(Tier.L2, medium="shm", model="tiny", query_tokens=100, hit_tokens=25)
KEY = BlockKey(b"k" * 16)


def pool_node(number: int) -> NodeInfo:
    return make_info(f"n{number}", role=NodeRole.DMP, host=HostId("h"), models=())


@asynccontextmanager
async def viewed(
    folder: Path, generator: InstantGenerator, clock: ManualClock | None = None
) -> AsyncIterator[tuple[Front, DuckDbSession]]:
    """Start a front with one compute node, and a session that sees its views."""
    config = replace(QUICK, max_in_flight_per_node=1)
    async with running_front(write_model_folder(folder), config=config) as front:
        source = MetaSource(front.meta, front.generation, front.dispatcher, load_config(environ={}))
        server = DuckDbSqlServer(
            DuckDbConfig(threads=1), generator, cluster=source, clock=clock or ManualClock(10.0)
        )
        yield front, await server.open_session(ClientInfo(user="ann"))
        await server.close()


async def rows(session: DuckDbSession, sql: str) -> list[tuple[object, ...]]:
    return list((await session.execute(sql)).rows)


async def test_nodes_and_their_tiers(tmp_path: Path, generator: InstantGenerator) -> None:
    async with viewed(tmp_path, generator) as (front, session):
        for statement in session.split(TABLES):
            await session.execute(statement)
        report = NodeReport(load=NodeLoad(kv_usage=0.5), tiers=(L2,), paths=PATHS)
        for number in range(3):
            await join(front.meta, pool_node(number), report)
        assert await rows(
            session,
            "SELECT tier, medium, query_tokens, hit_tokens, hit_ratio FROM tierkv.stat_kvcache",
        ) == [("L2", "shm", 300, 75, 0.25)]
        assert await rows(
            session,
            "SELECT n.node_id, n.kv_cache_usage, d.id FROM tierkv.stat_kvcache_node n "
            "JOIN docs d ON 'n' || d.id = n.node_id WHERE n.hit_ratio > 0.2 ORDER BY d.id",
        ) == [("n0", 0.5, 0), ("n1", 0.5, 1), ("n2", 0.5, 2)]
        counted = "SELECT role, count(*), min(state) FROM tierkv.nodes GROUP BY ALL ORDER BY role"
        assert await rows(session, counted) == [("compute", 1, "alive"), ("dmp", 3, "alive")]
        assert await rows(
            session, "SELECT DISTINCT paths FROM tierkv.nodes WHERE role = 'dmp'"
        ) == [("dmp-0 shm: same host; no rdma: no RDMA device here; tcp: 127.0.0.1:7401",)]
        asked = "SELECT DISTINCT ai_generate(node_id) FROM tierkv.nodes WHERE node_id = 'n1'"
        assert await rows(session, asked) == [(answer_text("n1"),)]


async def test_blocks_leases_and_counts_of_the_directory(
    tmp_path: Path, generator: InstantGenerator
) -> None:
    async with viewed(tmp_path, generator) as (front, session):
        owner = Owner("tiny", "ann", "chat-1")
        await store_chain(front.meta, pool_node(1), [KEY], [Tier.L2], owner=owner)
        front.meta.clock.advance(2.0)
        for _ in range(2):
            await front.meta.locate([KEY], reserve_s=9.0)
        await front.meta.locate([KEY])
        ((*block, heat),) = await rows(
            session,
            "SELECT block_hash, node_id, created_at::VARCHAR, session_id, leases, heat "
            "FROM tierkv.kvcache_blocks",
        )
        assert block == ["6b" * 16, "n1", "2023-11-14 22:13:28", "chat-1", 2]
        assert isinstance(heat, float) and heat > 0.0
        counts = "SELECT name, value FROM tierkv.directory WHERE name IN ('blocks', 'leases_live')"
        assert dict(await rows(session, counts)) == {"blocks": 1, "leases_live": 2}


async def test_models_namespaces_and_settings(tmp_path: Path, generator: InstantGenerator) -> None:
    async with viewed(tmp_path, generator) as (front, session):
        policy = ReusePolicy(KvCodec.FP8, blend=True, recompute_ratio=0.3, gradual=True)
        for namespace in (Namespace("own"), Namespace("team", ("ann", "bob"), policy=policy)):
            await front.meta.put_namespace(namespace)
        models = "SELECT model_name, block_tokens, blend_refusal FROM tierkv.models"
        assert await rows(session, models) == [("tiny", 16, "")]
        policies = (
            "SELECT name, tenants, cache_enabled, kv_codec, blend, recompute_ratio, selector, "
            "gradual FROM tierkv.namespaces"
        )
        assert await rows(session, policies) == [
            ("own", "own", True, None, False, 0.15, "hkvd", True),
            ("team", "ann, bob", True, "fp8", True, 0.3, "hkvd", True),
        ]
        settings = "SELECT name, setting FROM tierkv.settings"
        assert ("front.pg_port", "5433") in await rows(session, settings)


async def test_a_namespaces_use_is_the_sum_of_the_pool_nodes(
    tmp_path: Path, generator: InstantGenerator
) -> None:
    async with viewed(tmp_path, generator) as (front, session):
        await front.meta.put_namespace(Namespace("own"))
        await front.meta.put_namespace(Namespace("red", limits=KvLimits(4 << 20, 60.0, False)))
        for number in range(2):
            used = NamespaceUsage(
                "red",
                2 << 20,
                1_000 + number,
                3,
                2,
                5,
                1,
                4,
                read_bytes=10,
                throttled=1,
                hits=7,
            )
            await join(front.meta, pool_node(number), NodeReport(namespaces=(used,)))
        columns = (
            "SELECT name, capacity_bytes, ttl_s, on_full, used_bytes, blocks, refused_blocks, "
            "evicted_for_quota, evicted_for_memory, evicted_for_ttl, read_bytes, throttled, hits "
            "FROM tierkv.namespaces"
        )
        assert await rows(session, columns) == [
            ("own", None, None, "evict", *[None] * 9),
            ("red", 4 << 20, 60.0, "refuse", 2_001, 6, 4, 10, 2, 8, 20, 2, 14),
        ]


async def test_what_waits_and_where_it_may_go(tmp_path: Path, generator: InstantGenerator) -> None:
    async with viewed(tmp_path, generator) as (front, session):
        load = NodeLoad(prefill_token_s=0.01, l3_queued_bytes=7)
        await join(front.meta, front.node.info, NodeReport(load=load))
        await front.dispatcher.refresh()
        front.node.gate.clear()

        async def ask(name: str) -> None:
            async for _ in front.dispatcher.submit(make_request(name, tenant="ann", priority=2)):
                pass

        asked = [asyncio.create_task(ask("q0"))]
        async with asyncio.timeout(20):
            while not front.node.running:
                await asyncio.sleep(0.001)
            asked.append(asyncio.create_task(ask("q1")))
            while not front.dispatcher.waiting():
                await asyncio.sleep(0.001)
        waiting = "SELECT request_id, tenant, model_name, priority FROM tierkv.queue"
        assert await rows(session, waiting) == [("q1", "ann", "tiny", 2)]
        costs = "SELECT node_id, requests, prefill_token_s, l3_queued_bytes FROM tierkv.node_costs"
        assert await rows(session, costs) == [("c1", 1, 0.01, 7)]
        front.node.gate.set()
        await asyncio.gather(*asked)
        decided = "SELECT request_id, node_id, prompt_tokens, stage FROM tierkv.routing_log"
        assert sorted(await rows(session, decided)) == [
            ("q0", "c1", 40, "whole"), ("q1", "c1", 40, "whole"),
        ]  # fmt: skip
        errors = "SELECT node_id, answers FROM tierkv.routing_errors ORDER BY node_id NULLS FIRST"
        assert await rows(session, errors) == [(None, 2), ("c1", 2)]


async def test_without_a_meta_server_its_views_say_so_and_the_others_stay(
    tmp_path: Path, generator: InstantGenerator
) -> None:
    async with viewed(tmp_path, generator) as (front, session):
        front.meta.down = True
        for view in ("nodes", "stat_kvcache", "kvcache_blocks", "directory", "namespaces"):
            with pytest.raises(NoNodeError, match="need the meta server"):
                await session.execute(f"SELECT * FROM tierkv.{view}")
        for view in ("models", "queue", "routing_log", "node_costs", "settings"):
            await session.execute(f"SELECT * FROM tierkv.{view}")


def test_a_decision_is_told_with_what_was_weighed_and_what_came_of_it() -> None:
    state = SchedulerState()
    load = NodeLoad(prefill_token_s=0.01, l3_queued_bytes=7)
    state.handle(NodesSeen((SeenNode(make_info("c1"), load),)), 0.0)
    arrived = RequestArrived(RequestId("q1"), WantedModel("tiny"), 100)
    (dispatch,) = state.handle(arrived, 0.0)
    assert isinstance(dispatch, Dispatch)
    stats = RoutingStats(8)
    stats.record_dispatch(dispatch, 0.0, unix_s=60.0, model="tiny", prompt_tokens=100)
    stats.record_first_token(dispatch, 1.5)
    view = RoutingView(tuple(stats.decisions()), node_costs(state.fleet.records.values()))
    (decided,) = routing_rows("routing_log", view)
    (candidate,) = json.loads(decided["candidates"])
    assert (candidate["node"], candidate["prefill_s"]) == ("c1", 1.0)
    predicted_s = candidate["wait_s"] + candidate["service_s"]
    assert decided["error_s"] == pytest.approx(1.5 - predicted_s, abs=1e-6)
    assert decided["decided_at"] == "1970-01-01 00:01:00"
    assert (decided["attempt"], decided["prompt_tokens"]) == (1, 100)
    errors = routing_rows("routing_errors", view)
    assert [(row["node_id"], row["answers"]) for row in errors] == [(None, 1), ("c1", 1)]
    assert {round(row["p99_abs_error_s"], 2) for row in errors} == {0.5}
    (costs,) = routing_rows("node_costs", view)
    names = ("requests", "waiting_tokens", "prefill_token_s", "l3_queued_bytes", "factor")
    assert [costs[name] for name in names] == [1, 100, 0.01, 7, 1.0]
