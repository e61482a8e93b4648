"""Report of an engine with each heartbeat: hits, bytes, paths and complaints.

Pure. Called by integrations/pool_door.py; shown in ``tierkv.nodes``, ``tierkv.stat_kvcache_node``
and ``tierkv status``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierkv.dmp.client.values import PoolStats
from tierkv.integrations.complaints import Complaints, clean_text
from tierkv.integrations.identity import EngineIdentity
from tierkv.kvcore.location import Tier
from tierkv.kvcore.node import NodeReport, PathReport, TierStats

TIER_COUNTS: Final = ("query_tokens", "hit_tokens", "stored_tokens", "read_bytes", "write_bytes")
"""Counters of a door that are columns of a tier."""


def engine_report(
    identity: EngineIdentity,
    counts: Mapping[str, int],
    complaints: Complaints,
    pool: PoolStats | None,
) -> NodeReport:
    """Build the report of an engine.

    Args:
        identity: the engine's model.
        counts: the door's counters.
        complaints: the door's complaints.
        pool: the newest statistics of the pool; None before the pool first answered.
    """
    members = pool.members if pool is not None else ()
    near = any(member.path.transport == "shm" for member in members)
    tier = TierStats(
        tier=Tier.L2 if near else Tier.L3,
        medium="pool",
        model=identity.label,
        alloc_failures=pool.refused if pool is not None else 0,
        **{name: counts.get(name, 0) for name in TIER_COUNTS},
    )
    paths = tuple(
        PathReport(
            member.node_id,
            member.path.transport or "none",
            clean_text(member.path.reason),
            usable=member.up,
        )
        for member in members
    )
    engine = f"{identity.engine} {identity.version}, rank {identity.rank} of {identity.ranks}"
    return NodeReport(
        tiers=(tier,),
        cache_errors=complaints.counts(),
        transfer_bytes_in=counts.get("read_bytes", 0),
        transfer_bytes_out=counts.get("write_bytes", 0),
        transfer_errors=sum(count for member in members for _, count in member.errors),
        paths=paths,
        notes=(clean_text(engine), *complaints.notes()),
    )
