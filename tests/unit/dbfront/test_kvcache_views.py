"""Views of cached KV: sums over tiers and nodes, resets of what nodes count, prefixes of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fix_meta import join, store_chain
from tests.fix_sql import InstantGenerator
from tests.fix_text import Front
from tests.unit.dbfront.test_admin_views import pool_node, viewed
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.views.kvcache import (
    baseline_of,
    block_row,
    error_rows,
    node_rows,
    prefix_rows,
    tier_rows,
)
from tierkv.kvcore.block import BlockSpec, Owner, Tier
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole, TierStats
from tierkv.metaserver.client import BlockRecord, DirectoryNode

L2 = TierStats(Tier.L2, "shm", "tiny", query_tokens=100, hit_tokens=40, read_time_s=0.5)


def state(number: int, *tiers: TierStats, life: int = 1, transfers: int = 0) -> DirectoryNode:
    info = NodeInfo(NodeId(f"n{number}"), Incarnation(life), NodeRole.DMP, HostId("h"))
    report = NodeReport(tiers=tiers, transfer_bytes_in=transfers, cache_errors=(("miss", 2),))
    return DirectoryNode(info=info, report=report, heartbeat_age_s=0.5, state="alive")


def picked(rows: Iterable[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_tiers_are_added_up_over_nodes() -> None:
    other = replace(L2, medium="hugetlb", query_tokens=300, hit_tokens=60, read_time_s=0.25)
    l1 = TierStats(Tier.L1, "cpu", "tiny")
    rows = tier_rows([state(1, L2, l1), state(2, other), state(3)], {}, 10.0)
    names = ("tier", "medium", "model_name", "query_tokens", "hit_tokens", "hit_ratio", "read_time")
    assert picked(rows, *names) == [
        ("L1", "cpu", "tiny", 0, 0, 0.0, 0.0),
        ("L2", "shm, hugetlb", "tiny", 400, 100, 0.25, 750.0),
    ]
    assert "cache_errors" not in rows[0]
    assert "node_id" not in rows[0]
    old = replace(state(4, L2), heartbeat_age_s=7.0)
    (row,) = tier_rows([state(1, L2), old], {}, 10.0)
    assert row["as_of"] == "1970-01-01 00:00:03"


def test_cache_errors_are_told_by_kind_and_node() -> None:
    before = [state(1), state(2)]
    more = replace(state(1).report, cache_errors=(("checksum_mismatch", 1), ("miss", 5)))
    now = [replace(state(1), report=more), state(2, life=2)]
    rows = error_rows(now, baseline_of(before), 10.0)
    assert picked(rows, "node_id", "kind", "errors", "as_of") == [
        ("n1", "checksum_mismatch", 1, "1970-01-01 00:00:09.500000"),
        ("n1", "miss", 3, "1970-01-01 00:00:09.500000"),
        ("n2", "miss", 2, "1970-01-01 00:00:09.500000"),
    ]


def test_what_was_counted_before_a_reset_is_taken_off() -> None:
    before = [state(1, L2, transfers=7), state(2, L2)]
    baseline = baseline_of(before)
    more = replace(L2, query_tokens=150, hit_tokens=80, read_time_s=0.75)
    now = [state(1, more, transfers=9), state(2, replace(L2, hit_tokens=5), life=2), state(3, L2)]
    rows = node_rows(now, baseline, 10.0)
    names = ("node_id", "query_tokens", "hit_tokens", "hit_ratio", "read_time", "transfer_bytes_in")
    assert picked(rows, *names) == [
        ("n1", 50, 40, 0.8, 250.0, 2),
        ("n2", 100, 5, 0.05, 500.0, 0),  # It started again, so it counts from zero.
        ("n3", 100, 40, 0.4, 500.0, 0),
    ]
    assert picked(rows, "cache_errors", "heartbeat_at") == [
        (0, "1970-01-01 00:00:09.500000"),
        (2, "1970-01-01 00:00:09.500000"),
        (2, "1970-01-01 00:00:09.500000"),
    ]
    assert picked(tier_rows(before, baseline, 10.0), "query_tokens", "hit_ratio") == [(0, 0.0)]
    assert isinstance(rows[0]["query_tokens"], int)


async def rows_of(session: DuckDbSession, sql: str) -> list[tuple[Any, ...]]:
    return list((await session.execute(sql)).rows)


async def test_stat_reset_begins_anew_though_nodes_go_on(
    tmp_path: Path, generator: InstantGenerator
) -> None:
    clock = ManualClock(0.0)
    async with viewed(tmp_path, generator, clock) as (front, session):
        await join(front.meta, pool_node(1), NodeReport(tiers=(L2,)))
        await check_reset(front, session, clock)


async def check_reset(front: Front, session: DuckDbSession, clock: ManualClock) -> None:
    shown = "SELECT query_tokens, hit_tokens, hit_ratio, stats_reset FROM tierkv.stat_kvcache"
    assert await rows_of(session, shown) == [(100, 40, 0.4, None)]
    await session.execute("SELECT tierkv.stat_reset('functions')")
    assert await rows_of(session, shown) == [(100, 40, 0.4, None)]
    clock.advance(5.0)
    now = datetime(2023, 11, 14, 22, 13, 25)
    assert await rows_of(session, "SELECT tierkv.stat_reset('kvcache')") == [(now,)]
    assert await rows_of(session, shown) == [(0, 0, 0.0, now)]
    more = replace(L2, query_tokens=140, hit_tokens=70)
    await join(front.meta, pool_node(1), NodeReport(tiers=(more,)))
    assert await rows_of(session, shown) == [(40, 30, 0.75, now)]
    of_node = shown.replace("kvcache", "kvcache_node") + " WHERE node_id = 'n1'"
    assert await rows_of(session, of_node) == [(40, 30, 0.75, now)]
    await session.execute("SELECT tierkv.stat_reset()")
    assert await rows_of(session, shown.split(", stats")[0] + " FROM tierkv.stat_kvcache") == [
        (0, 0, 0.0)
    ]


def record(
    key: int, parent: int, hits: int = 0, tier: str = "L2", tokens: int = 16, **changes: Any
) -> BlockRecord:
    block = BlockRecord(
        block=BlockSpec(name(key), name(parent), tokens, owner=Owner("tiny", "ann")),
        node_id=NodeId("n1"),
        tier=tier,
        size_bytes=64,
        age_s=1.0,
        idle_s=0.5,
        hits=hits,
    )
    return replace(block, **changes)


def name(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def test_prefixes_are_where_chains_part_and_end() -> None:
    #   1 - 2 - 3 - 4       2 also rests in L4; 9 is not known any more
    #        \- 5           9 - 6
    blocks = [
        record(1, 0, hits=5),
        record(2, 1, hits=4),
        record(2, 1, hits=4, tier="L4"),
        record(3, 2, hits=2),
        record(4, 3, hits=1, tokens=10),
        record(5, 2, hits=3),
        record(6, 9, hits=7),
    ]
    rows = prefix_rows(blocks)
    names = ("prefix_hash", "depth_tokens", "children", "hits", "tokens_saved", "tiers")
    assert picked(rows, *names) == [
        (name(2).hex(), 32, 2, 4, 16 * 9, ["L2", "L4"]),
        (name(4).hex(), 58, 0, 1, 16 * 2 + 10, ["L2"]),
        (name(5).hex(), 48, 0, 3, 48, ["L2"]),
        (name(6).hex(), 16, 0, 7, 7 * 16, ["L2"]),
    ]
    assert {row["sample_text"] for row in rows} == {None}
    assert prefix_rows([]) == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=40))
def test_every_saved_token_is_counted_with_one_prefix(parents: list[tuple[int, int]]) -> None:
    blocks = [
        record(number, min(parent, number - 1), hits)
        for number, (parent, hits) in enumerate(parents, 1)
    ]
    rows = prefix_rows(blocks)
    assert sum(row["tokens_saved"] for row in rows) == sum(16 * copy.hits for copy in blocks)
    known = {copy.block.parent for copy in blocks}
    ends = {copy.block.key.hex() for copy in blocks if copy.block.key not in known}
    assert ends <= {row["prefix_hash"] for row in rows}


async def test_prefixes_are_a_view(tmp_path: Path, generator: InstantGenerator) -> None:
    async with viewed(tmp_path, generator) as (front, session):
        chain, owner = [name(1), name(2)], Owner("tiny", "ann")
        for tiers in ([Tier.L2, Tier.L2], [None, Tier.L4]):
            await store_chain(front.meta, pool_node(1), chain, tiers, owner=owner)
        for _ in range(2):
            await front.meta.locate(chain)
        assert await rows_of(session, "SELECT * EXCLUDE (as_of) FROM tierkv.kvcache_prefixes") == [
            (name(2).hex(), "tiny", "ann", 32, 0, 2, 64, ["L2", "L4"], None)
        ]


def test_leases_keep_a_block() -> None:
    free, held = block_row(record(1, 0), 1.0), block_row(record(1, 0, leases=2), 1.0)
    assert picked([free, held], "ref_count", "pinned") == [(0, False), (2, True)]
