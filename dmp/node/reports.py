"""Reports of a DMP node: inventory, counters, registration, heartbeat.

A part of DmpNode. Views read the reports through the meta server. The inventory is made in steps;
no step holds the lock for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from tierkv.dmp.node.disk_ledger import DiskLedger
from tierkv.dmp.node.lower_tier import LowerTier, resting
from tierkv.dmp.node.state import NodeState
from tierkv.dmp.node.turn_order import Moved
from tierkv.dmp.pool_node import NO_DISK, PoolNodeStats
from tierkv.dmp.segment.slots import SlotState
from tierkv.dmp.slots.accounts import NamespaceAccount
from tierkv.kvcore import limits
from tierkv.kvcore.block import Tier
from tierkv.kvcore.block_event import BlockStored
from tierkv.kvcore.node import (
    NamespaceUsage,
    NodeInfo,
    NodeLoad,
    NodeReport,
    NodeRole,
    TierStats,
)

_STEP: Final = 512
"""Blocks listed under one lock: about a millisecond."""


class Reports:
    """Counters and lists of a node.

    Attributes:
        lower: the lower tier, while the node is started; None without a lower tier.
        ledger: what namespaces keep in the lower tier; None without a lower tier.
        promoted_blocks: blocks loaded from the lower tier.
        demoted_blocks: blocks copied to the lower tier.
    """

    def __init__(self, state: NodeState) -> None:
        self.promoted_blocks = 0
        self.demoted_blocks = 0
        self.lower: LowerTier | None = None
        self.ledger: DiskLedger | None = None
        self._state = state

    def inventory(self) -> list[BlockStored]:
        """Return every readable block, for a meta server that lost track.

        Memory comes first, then the lower tier. Changes during the call are reported as events.
        """
        state = self._state
        with state.lock:
            keys = iter(list(state.table.store.by_key))
        found: list[BlockStored] = []
        while some := list(islice(keys, _STEP)):
            with state.lock:
                slots = [state.table.store.peek(key) for key in some]
                found += [state.stored(slot) for slot in slots if slot is not None]
        lower = self.lower
        if lower is not None:
            found += [resting(block) for block in lower.blocks()]
        return found

    def stats(self) -> PoolNodeStats:
        """Return the counters."""
        state, lower = self._state, self.lower
        disk = lower.stats() if lower is not None else NO_DISK  # The lower tier has its own locks.
        with state.lock:
            table, shape = state.table, state.segment.geometry
            bad = table.store.counts[SlotState.QUARANTINED]
            memory = TierStats(
                tier=Tier.L2,
                medium=f"shm ({bad} slots quarantined)" if bad else "shm",
                capacity_bytes=shape.extent_count * shape.extent_bytes,
                used_bytes=table.extents.used_bytes,
                blocks_total=table.extents.slots_total,
                blocks_used=table.store.counts[SlotState.SEALED],
                stored_tokens=state.stored_tokens,
                evicted_blocks=table.evicted_blocks,
                demoted_blocks=self.demoted_blocks,
                read_bytes=state.read_bytes,
                write_bytes=state.write_bytes,
                alloc_failures=table.alloc_failures,
            )
            return PoolNodeStats(
                memory,
                replace(disk, promoted_blocks=self.promoted_blocks),
                slots_writing=table.store.counts[SlotState.WRITING],
                quarantined_slots=bad,
                refused_puts=table.admission.refused_puts,
                leased_blocks=table.leases.blocks,
                refused_leases=table.leases.refused,
            )

    def info(self, *, data_address: str = "") -> NodeInfo:
        """Return the registration for the meta server."""
        config = self._state.config
        return NodeInfo(
            node_id=config.node_id,
            incarnation=self._state.incarnation,
            role=NodeRole.DMP,
            host=config.host,
            zone=config.zone,
            data_address=data_address,
            segment_path="" if config.nameless else str(config.segment_file),
            capacity_bytes=config.extent_count * config.extent_bytes,
        )

    def report(self) -> NodeReport:
        """Return the report for a heartbeat."""
        stats = self.stats()
        memory = stats.memory
        trouble = self._state.segment.trouble[: limits.MAX_REASON_CHARS]
        return NodeReport(
            load=NodeLoad(kv_usage=memory.used_bytes / memory.capacity_bytes),
            tiers=(memory,) if self.lower is None else (memory, stats.disk),
            cache_errors=tuple((kind, count) for kind, count in self._damage() if count),
            transfer_bytes_in=memory.write_bytes,
            transfer_bytes_out=memory.read_bytes,
            notes=(trouble,) if trouble else (),
            namespaces=self._namespaces(),
        )

    def _namespaces(self) -> tuple[NamespaceUsage, ...]:
        with self._state.lock:
            accounts = list(self._state.table.accounts)
        below = () if self.ledger is None else self.ledger.accounts()
        on_disk = {account.quota.name: account for account in below}
        moved = self._state.turns.moved()
        return tuple(
            NamespaceUsage(
                name=account.quota.name,
                capacity_bytes=account.quota.capacity_bytes,
                used_bytes=account.used_bytes,
                blocks=account.blocks,
                refused_blocks=account.refused,
                hits=account.hits,
                evicted_for_quota=account.evicted_for_quota,
                evicted_for_memory=account.evicted_for_memory,
                evicted_for_ttl=account.evicted_for_ttl,
                evicted_for_version=account.evicted_for_version + disk.evicted_for_version,
                disk_used_bytes=disk.used_bytes,
                disk_blocks=disk.blocks,
                evicted_from_disk=disk.evicted_for_quota,
                **moved.get(account.quota.name, Moved())._asdict(),
            )
            for account in accounts
            for disk in (on_disk.get(account.quota.name) or NamespaceAccount(account.quota),)
        )

    def _damage(self) -> Iterator[tuple[str, int]]:
        yield "checksum_mismatch", self._state.damage.count
        yield "segment_damaged", int(bool(self._state.segment.trouble))
