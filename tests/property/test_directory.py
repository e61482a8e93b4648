"""The directory against a naive model: events, gaps, inventories, deaths, in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, EventBatch
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvwire.event_records import pack_events
from tierkv.metaserver.directory.directory import Directory

KEYS = [BlockKey(bytes([n]) * 16) for n in range(4)]
CHAINS = (KEYS, KEYS[2:], KEYS[::-1], KEYS[1::2])
ROLES = {
    "dmp-a": (NodeRole.DMP, "a"),
    "dmp-b": (NodeRole.DMP, "b"),
    "cpu-a": (NodeRole.COMPUTE, "a"),
    "pre-a": (NodeRole.PREFILL, "a"),
    "dec-b": (NodeRole.DECODE, "b"),
}
NAMES = st.sampled_from(sorted(ROLES))
SOME_NAMES = st.sets(NAMES, min_size=1)
TIERS = st.sampled_from([Tier.L1, Tier.L2, Tier.L4])
FATES = st.tuples(
    st.sampled_from(["nothing", "events", "inventory"]), st.integers(1, 3), st.integers(0, 3)
)
SLOTS = st.none() | st.integers(0, 3)
CHANGES = st.lists(st.tuples(NAMES, st.sampled_from(KEYS), TIERS, SLOTS), min_size=1, max_size=20)


@dataclass
class Truth:
    """What a node really holds, and what the directory was told of it."""

    info: NodeInfo
    holds: dict[tuple[BlockKey, Tier], int] = field(default_factory=dict)
    told: dict[tuple[BlockKey, Tier], int] = field(default_factory=dict)
    seq: int = 0
    unsent: list[BlockEvent] = field(default_factory=list)
    lost: bool = True
    last: EventBatch | None = None


def stored(truth: Truth, key: BlockKey, tier: Tier, slot: int) -> BlockStored:
    info = truth.info
    location = Location(info.node_id, info.incarnation, 0, slot, 1, 64)
    return BlockStored(BlockSpec(key, ROOT_PARENT, 4), tier, None if tier is Tier.L1 else location)


class DirectoryMachine(RuleBasedStateMachine):
    """``told`` is the model: what a correct directory must answer from."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.nodes: dict[str, Truth] = {}
        self.started = 0
        self.now = 0.0

    @initialize()
    def start_all(self) -> None:
        for name in ROLES:
            self.start_node(name)

    @rule(names=SOME_NAMES, stop=st.booleans())
    def restart(self, names: set[str], stop: bool) -> None:
        for name in sorted(names):
            if stop:
                self.directory.drop_node(NodeId(name))
                self.nodes.pop(name, None)
            else:
                self.start_node(name)

    def start_node(self, name: str) -> None:
        """A node starts (again): its blocks are gone until it reports."""
        self.started += 1
        role, host = ROLES[name]
        info = NodeInfo(NodeId(name), Incarnation(self.started), role, HostId(host))
        self.directory.add_node(info)
        self.nodes[name] = Truth(info)
        assert self.directory.wants_inventory(info.node_id)

    @rule(changes=CHANGES, names=SOME_NAMES, fate=FATES)
    def work(
        self,
        changes: list[tuple[str, BlockKey, Tier, int | None]],
        names: set[str],
        fate: tuple[str, int, int],
    ) -> None:
        """Nodes store and remove blocks; some of them report it, and the report has its fate."""
        for change in changes:
            self.change(*change)
        kind, parts, arriving = fate
        for name in sorted(names & self.nodes.keys()):
            if kind == "inventory":
                self.send_inventory(self.nodes[name], parts, arriving)
            elif kind == "events":
                self.send_events(self.nodes[name], arrives=arriving > 0)

    def change(self, name: str, key: BlockKey, tier: Tier, slot: int | None) -> None:
        """Store a block in a slot, or remove it (None), at the node."""
        truth = self.nodes.get(name)
        if truth is None or (tier is Tier.L1) is (truth.info.role is NodeRole.DMP):
            return
        if slot is not None:
            truth.holds[key, tier] = slot
            truth.unsent.append(stored(truth, key, tier, slot))
        else:
            truth.holds.pop((key, tier), None)
            truth.unsent.append(BlockRemoved(key, tier))

    def send_events(self, truth: Truth, arrives: bool) -> None:
        """Send a batch; a lost one leaves a gap, which the next batch must show."""
        batch = self.batch(truth, truth.unsent)
        truth.unsent = []
        if not arrives:
            truth.lost = True
            return
        self.deliver(truth, batch)
        assert self.directory.wants_inventory(truth.info.node_id) is truth.lost

    def send_inventory(self, truth: Truth, parts: int, arriving: int) -> None:
        """Send an inventory in parts, of which only the first ``arriving`` arrive."""
        truth.unsent = []
        blocks = [stored(truth, k, t, slot) for (k, t), slot in truth.holds.items()]
        for part in range(min(parts, arriving)):
            events = blocks[part::parts]
            more = part < parts - 1
            batch = self.batch(truth, events, inventory=True, more=more, part=part)
            self.deliver(truth, batch)
        truth.lost = arriving < parts
        if not truth.lost:
            truth.told = dict(truth.holds)
            assert not self.directory.wants_inventory(truth.info.node_id)
            return
        if arriving:
            assert not self.directory.wants_inventory(truth.info.node_id), "parts are under way"
        if arriving == 0 or arriving % 2:
            truth.seq += 1  # The next part was sent and lost; else the node began something else.

    @rule(
        name=NAMES, key=st.sampled_from(KEYS), how=st.sampled_from(["repeat", "late", "lie", "old"])
    )
    def misbehave(self, name: str, key: BlockKey, how: str) -> None:
        truth = self.nodes.get(name)
        if truth is None or how == "old":
            self.speak_from_an_earlier_life(name)
        elif how == "lie":
            self.lie(truth, key)
        elif truth.last is not None:
            self.repeat(truth, truth.last if how == "repeat" else self.late(truth, key))

    def repeat(self, truth: Truth, last: EventBatch) -> None:
        """The last batch arrives a second time and changes nothing."""
        before = self.directory.wants_inventory(truth.info.node_id)
        assert self.directory.apply(pack_events(last), self.now)
        assert self.directory.wants_inventory(truth.info.node_id) is before

    def late(self, truth: Truth, key: BlockKey) -> EventBatch:
        """A batch that was overtaken: what it says is old news, whatever it says."""
        tier = Tier.L2 if truth.info.role is NodeRole.DMP else Tier.L1
        events = (stored(truth, key, tier, 9), BlockRemoved(key, Tier.L4))
        info = truth.info
        return EventBatch(info.node_id, info.incarnation, truth.seq, events, inventory=True)

    def lie(self, truth: Truth, key: BlockKey) -> None:
        """A node claims a slot of another, or a tier it has not: refused and counted."""
        location = Location(NodeId("other"), truth.info.incarnation, 0, 0, 1, 64)
        false = BlockStored(BlockSpec(key, ROOT_PARENT, 4), Tier.L2, location)
        before = self.directory.refused_events
        self.deliver(
            truth, self.batch(truth, [false, BlockStored(BlockSpec(key, key, 4), Tier.L3)])
        )
        assert self.directory.refused_events == before + 2

    def speak_from_an_earlier_life(self, name: str) -> None:
        truth = self.nodes.get(name)
        incarnation = truth.info.incarnation - 1 if truth else 0
        batch = EventBatch(NodeId(name), Incarnation(incarnation), 10**6, (), inventory=True)
        assert not self.directory.apply(pack_events(batch), self.now)

    def batch(
        self,
        truth: Truth,
        events: list[BlockEvent] | list[BlockStored],
        *,
        inventory: bool = False,
        more: bool = False,
        part: int = 0,
    ) -> EventBatch:
        truth.seq += 1
        info = truth.info
        return EventBatch(
            info.node_id, info.incarnation, truth.seq, tuple(events), inventory, more, part
        )

    def deliver(self, truth: Truth, batch: EventBatch) -> None:
        self.now += 1.0
        truth.last = batch
        assert self.directory.apply(pack_events(batch), self.now)
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                truth.told.pop((event.key, event.tier), None)
            elif self.is_true(truth, event):
                slot = event.location.slot if event.location else 0
                truth.told[event.key, event.tier] = slot

    @staticmethod
    def is_true(truth: Truth, event: BlockStored) -> bool:
        if event.location is None:
            return event.tier is Tier.L1
        return event.location.node == truth.info.node_id

    @invariant()
    def both_views_agree(self) -> None:
        self.directory.check_invariants()

    @invariant()
    def every_chain_is_located_as_the_model_says(self) -> None:
        for chain in CHAINS:
            reply = self.directory.locate(b"".join(chain), self.now)
            copies = [
                {(r.node, r.tier, r.host, r.location.slot if r.location else -1) for r in replicas}
                for replicas in reply.replicas
            ]
            expected = [self.pool_copies(key) for key in chain]
            prefix = next((i for i, found in enumerate(expected) if not found), len(expected))
            assert copies == expected[:prefix]
            assert {c.node_id: (c.l1_blocks, c.l2_blocks) for c in reply.coverage} == (
                self.coverage(chain)
            )

    @invariant()
    def a_reservation_asks_whoever_has_blocks_in_memory(self) -> None:
        for chain in CHAINS:
            found = self.directory.find(
                b"".join(chain), self.now, reader=None, max_replicas=0, use=False
            )
            reply = found.reply
            blocks = max([reply.prefix_blocks, *(c.l2_blocks for c in reply.coverage)])
            assert found.chain == b"".join(chain[:blocks])
            expected = {
                NodeId(name): b"".join(keys)
                for name, truth in self.nodes.items()
                if (keys := [k for k in chain[:blocks] if self.in_memory(truth, k)])
            }
            assert self.directory.holders(found) == expected

    @staticmethod
    def in_memory(truth: Truth, key: BlockKey) -> bool:
        return (key, Tier.L1) in truth.told or (key, Tier.L2) in truth.told

    @invariant()
    def the_listing_counts_every_copy(self) -> None:
        listing = self.directory.list_blocks(1_000, self.now)
        told = {(n, t.value, k) for n, truth in self.nodes.items() for k, t in truth.told}
        assert {(r.node_id, r.tier, r.block.key) for r in listing.blocks} == told
        assert listing.total == len(listing.blocks) == len(told)

    def pool_copies(self, key: BlockKey) -> set[tuple[str, Tier, str, int]]:
        return {
            (name, tier, truth.info.host, truth.told[key, tier])
            for name, truth in self.nodes.items()
            for tier in (Tier.L2, Tier.L4)
            if (key, tier) in truth.told
        }

    def coverage(self, chain: list[BlockKey]) -> dict[str, tuple[int, int]]:
        covered = {}
        for name, truth in self.nodes.items():
            if truth.info.role is NodeRole.DMP:
                continue
            in_l1 = [(key, Tier.L1) in truth.told for key in chain]
            near = [
                here
                or any(
                    (key, Tier.L2) in other.told
                    for other in self.nodes.values()
                    if other.info.host == truth.info.host
                )
                for here, key in zip(in_l1, chain, strict=True)
            ]
            l1, l2 = ((*blocks, False).index(False) for blocks in (in_l1, near))
            if l2:
                covered[name] = (l1, l2)
        return covered


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, derandomize=True
)
