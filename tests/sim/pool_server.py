"""A DMP node of the simulation: the real slot table over a dictionary of payloads.

References are resolved as dmp/node/state.py does it. Payloads are read and written while time
passes, in pinned slots; a crash keeps the segment or loses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fix_dmp import restored_rows
from tests.sim.meta_server import ReportingNode
from tests.sim.network import Network, Sleep, Steps
from tests.sim.promises import Promises
from tests.sim.prompts import BLOCK_TOKENS
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.slot_table import SlotTable
from tierkv.kvcore.block import BlockSpec, Location, Outlook, Owner, RangeShape, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, HoldOrder
from tierkv.kvcore.errors import BlockNotFoundError, StaleEpochError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.policies.select import make_policy

EXTENT_BYTES = 128 << 10
SLOT_PAYLOAD_BYTES = 30_000
"""A slot of 32 KiB: four in an extent."""

RESERVE_S = 2.0
COPY_S = 0.01


@dataclass
class SegmentFile:
    """What survives a crash: payloads by slot number, and the headers of sealed slots."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    sealed: list[Slot] = field(default_factory=list)
    extent_sizes: list[int] = field(default_factory=list)
    generation: int = 0


class PoolServer(ReportingNode):
    """One life of a DMP node.

    Attributes:
        table: the real core.
        promises: the model of its leases.
        stale: references refused because they were of another life or another use of a slot.
    """

    def __init__(
        self,
        info: NodeInfo,
        net: Network,
        metas: Sequence[str],
        *,
        extents: int,
        policy: str,
        segment: SegmentFile,
    ) -> None:
        self.table = SlotTable(
            extent_count=extents,
            extent_bytes=EXTENT_BYTES,
            slots_per_extent=4,
            make_policy=lambda size, quota: make_policy(policy, 4 * extents),
        )
        self.promises = Promises()
        self.stale = 0
        self._segment = segment
        if segment.sealed:
            rows = restored_rows(segment.sealed)
            self.table.restore(segment.extent_sizes, rows, (), generation=segment.generation)
        super().__init__(info, net, metas)
        self.every(0.5, self._expire)

    # -- what clients ask

    def lookup(self, key: BlockKey) -> Location | None:
        slot = self.table.find(key)
        return None if slot is None else self._location(slot)

    def reserve(self, put: BlockSpec, owner: str) -> Location | None:
        self._expire()
        kept = self.promises.kept(self.now)
        decision = self.table.reserve(put, deadline=self.now + RESERVE_S, owner=owner)
        if decision is None:
            return None
        gone = [victim.block.key for victim in decision.victims]
        assert not kept.intersection(gone), f"{self.name} evicted a block under lease"
        self._report([BlockRemoved(key, Tier.L2) for key in gone])
        return self._location(decision.slot)

    def write(self, location: Location, payload: bytes) -> Steps:
        """Copy into a reserved slot: half of it now, the rest a little later."""
        slot = self._resolve(location, SlotState.WRITING)
        self.table.pin(slot)
        self._segment.payloads[slot.index] = payload[: len(payload) // 2]
        yield Sleep(COPY_S)
        self._segment.payloads[slot.index] = payload
        self.table.unpin([slot])
        return True

    def seal(self, location: Location) -> Location | None:
        self._resolve(location, SlotState.WRITING)
        slot = self.table.seal(location.slot, location.generation, now=self.now)
        if slot is None:
            return None
        self._report([self._stored(slot)])
        return self._location(slot)

    def read(self, location: Location) -> Steps:
        """Read a sealed slot, which takes a while: the payload is taken at the end."""
        slot = self._resolve(location, SlotState.SEALED)
        self.table.pin_for_read(slot)
        yield Sleep(COPY_S * self.net.slow.get(self.name, 1.0))
        payload = self._segment.payloads[slot.index]
        self.table.unpin([slot])
        return payload

    def on_hold(self, order: HoldOrder) -> None:
        self.table.leases.carry_out(order, self.now)
        self.promises.take_in(order, self._is_leased, self.now)

    def client_died(self, owner: str) -> None:
        """Free what a client had reserved: its connection broke."""
        self.table.release_owner(owner)

    # -- life

    def crash(self) -> None:
        super().crash()
        self._segment.sealed = self.table.store.sealed()
        self._segment.extent_sizes = list(self.table.extents.slot_sizes())
        self._segment.generation = self.table.generation

    def inventory(self) -> Sequence[BlockStored]:
        return [self._stored(slot) for slot in self.table.store.sealed()]

    def load(self) -> NodeReport:
        return NodeReport()

    def check(self) -> None:
        """Free + used = all, and what is promised is here."""
        self.table.check_invariants()
        sealed = {slot.block.key for slot in self.table.store.sealed()}
        assert self.promises.kept(self.now) <= sealed, f"{self.name} lost a block under lease"

    def check_expired(self) -> None:
        """No lease outlives its deadline."""
        self._expire()
        kept = self.promises.kept(self.now)
        leased = {slot.block.key for slot in self.table.store.sealed() if slot.leased}
        assert leased <= kept, f"{self.name} keeps blocks under leases that are over"

    def check_at_rest(self) -> None:
        """Nothing is reserved, pinned or kept when nobody does anything any more."""
        self.check_expired()
        assert self.table.store.counts[SlotState.WRITING] == 0, f"{self.name} has open reservations"
        assert self.table.pinned == 0 and self.table.leases.blocks == 0, self.name

    def _expire(self) -> None:
        self.table.expire(self.now)
        self.promises.forget_expired(self.now)

    def _resolve(self, location: Location, state: SlotState) -> Slot:
        if location.incarnation != self.info.incarnation:
            self.stale += 1
            raise StaleEpochError("another life")
        slot = self.table.get(location.slot, location.generation)
        if slot is None or slot.state is not state:
            self.stale += 1
            raise BlockNotFoundError("another block, or none")
        return slot

    def _location(self, slot: Slot) -> Location:
        info = self.info
        return Location(info.node_id, info.incarnation, 0, slot.index, slot.generation, slot.length)

    def _stored(self, slot: Slot) -> BlockStored:
        return BlockStored(slot.block, Tier.L2, self._location(slot))

    def _report(self, events: Sequence[BlockEvent]) -> None:
        self.reporter.report(events)

    def _is_leased(self, key: BlockKey) -> bool:
        slot = self.table.store.peek(key)
        return slot is not None and slot.leased


def put_of(key: BlockKey, parent: BlockKey, *, depth: int, tail: bool) -> BlockSpec:
    """Describe a block of the simulation."""
    return BlockSpec(
        key,
        parent,
        BLOCK_TOKENS,
        ranges=RangeShape(SLOT_PAYLOAD_BYTES, 1),
        owner=Owner("tiny"),
        outlook=Outlook(depth=depth, tail=tail),
    )
