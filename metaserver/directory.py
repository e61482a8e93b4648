"""Where every block is: the soft-state block directory, a pure core.

Called by metaserver/state.py. Nodes feed it events and inventories, the scheduler asks it for
whole chains; a wrong answer costs a miss, never a wrong token, because owners check references.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, EventBatch
from kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from kvcore.location import Replica, Tier
from kvcore.node import NodeInfo, NodeRole
from metaserver.client import (
    MAX_LISTED_REPLICAS,
    BlockListing,
    BlockRecord,
    LocateReply,
    NodeCoverage,
)
from metaserver.feed import Feed, Verdict

_POOL_TIERS = frozenset({Tier.L2, Tier.L4})


class _Block:
    """One known block; it exists while it has at least one copy.

    ``l1`` is a bit set of compute nodes; ``pool`` is kept as the Replica values ``locate``
    answers with, so that answering builds nothing.
    """

    __slots__ = (
        "created_at", "hits", "l1", "model", "parent", "pool", "tenant", "tokens", "touched_at",
    )  # fmt: skip

    def __init__(self, event: BlockStored, now: float) -> None:
        self.parent = event.parent
        self.tokens = event.tokens
        self.model = event.model
        self.tenant = event.tenant
        self.l1 = 0
        self.pool: tuple[Replica, ...] = ()
        self.created_at = now
        self.touched_at = now
        self.hits = 0


class _Holder:
    """A live node and what it holds.

    ``bit`` is its place in ``_Block.l1``, 0 for nodes without an L1. ``unconfirmed`` is, during an
    inventory, what it held before and has not named again; None outside an inventory.
    """

    __slots__ = ("bit", "feed", "held", "info", "unconfirmed")

    def __init__(self, info: NodeInfo, bit: int) -> None:
        self.info = info
        self.bit = bit
        self.feed = Feed()
        self.held: dict[Tier, set[BlockKey]] = {}
        self.unconfirmed: dict[Tier, set[BlockKey]] | None = None


class Directory:
    """Copies of blocks by key and by node. Mutated only through its public methods.

    Attributes:
        refused_events: events a node had no business sending (counted and ignored).
        _blocks: every block with a copy somewhere.
        _holders: registered nodes.
        _bits: compute node of each bit in use.
        _host_bits: union of the bits of a host's compute nodes.
    """

    def __init__(self) -> None:
        self.refused_events = 0
        self._blocks: dict[BlockKey, _Block] = {}
        self._holders: dict[NodeId, _Holder] = {}
        self._bits: dict[int, NodeId] = {}
        self._host_bits: dict[HostId, int] = {}

    def add_node(self, info: NodeInfo) -> None:
        """Expect events of a node; an earlier incarnation's blocks are dropped."""
        known = self._holders.get(info.node_id)
        if known is not None and _same_life(known.info, info):
            known.info = info
            return
        self.drop_node(info.node_id)
        bit = self._free_bit() if info.role.prefills or info.role.decodes else 0
        self._holders[info.node_id] = _Holder(info, bit)
        if bit:
            self._bits[bit] = info.node_id
            self._host_bits[info.host] = self._host_bits.get(info.host, 0) | bit

    def drop_node(self, node_id: NodeId) -> None:
        """Forget a node and every copy it held. O(blocks held)."""
        holder = self._holders.get(node_id)
        if holder is None:
            return
        self._remove_all(holder, holder.held)
        del self._holders[node_id]
        if holder.bit:
            del self._bits[holder.bit]
            rest = self._host_bits[holder.info.host] & ~holder.bit
            if rest:
                self._host_bits[holder.info.host] = rest
            else:
                del self._host_bits[holder.info.host]

    def node_ids(self) -> tuple[NodeId, ...]:
        """Return the nodes whose events are taken."""
        return tuple(self._holders)

    def incarnation_of(self, node_id: NodeId) -> Incarnation | None:
        """Return the life of a node whose events are taken; None when it has none."""
        holder = self._holders.get(node_id)
        return None if holder is None else holder.info.incarnation

    def wants_inventory(self, node_id: NodeId) -> bool:
        """Whether something of that node is missing, and no inventory is under way."""
        holder = self._holders.get(node_id)
        return holder is not None and holder.feed.wants_inventory

    def apply(self, batch: EventBatch, now: float) -> bool:
        """Take in a batch of events or a part of an inventory.

        Returns:
            Whether the batch was meant for the directory: False for a node that is not
            registered or registered with another incarnation. A repeat is True and does nothing.
        """
        holder = self._holders.get(batch.node_id)
        if holder is None or holder.info.incarnation != batch.incarnation:
            return False
        verdict = holder.feed.admit(batch)
        if verdict is Verdict.REPEATED:
            return True
        if verdict is Verdict.FIRST_PART:
            holder.unconfirmed = {tier: set(keys) for tier, keys in holder.held.items()}
        elif verdict is Verdict.EVENTS:
            holder.unconfirmed = None
        for event in batch.events:
            self._apply_event(holder, event, now)
        if holder.unconfirmed is not None and holder.feed.next_part is None:
            self._remove_all(holder, holder.unconfirmed)
            holder.unconfirmed = None
        return True

    def locate(
        self,
        keys: Sequence[BlockKey],
        now: float,
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        use: bool = True,
    ) -> LocateReply:
        """Find the longest known prefix of a chain, and who has how much of it near.

        One pass over the chain, until neither the pool nor any node has the next block.
        """
        everyone = _union(self._host_bits.values())
        in_l1 = near = everyone
        l1_blocks: dict[int, int] = {}
        l2_blocks: dict[int, int] = {}
        replicas: list[tuple[Replica, ...]] = []
        memory_blocks = 0
        for index, key in enumerate(keys):
            block = self._blocks.get(key)
            in_pool = block is not None and bool(block.pool) and len(replicas) == index
            has_l1 = in_l1 & block.l1 if block else 0
            has_near = near & (block.l1 | self._near_bits(block.pool)) if block else 0
            _note_end(in_l1 & ~has_l1, index, l1_blocks)
            _note_end(near & ~has_near, index, l2_blocks)
            in_l1, near = has_l1, has_near
            if block is None or not (in_pool or near):
                break
            if in_pool:
                replicas.append(_best_first(block.pool, reader)[:max_replicas])
                in_memory = any(replica.tier is Tier.L2 for replica in block.pool)
                memory_blocks += in_memory and memory_blocks == index
            if use:
                block.touched_at = now
                block.hits += 1
        _note_end(in_l1, len(keys), l1_blocks)
        _note_end(near, len(keys), l2_blocks)
        return LocateReply(
            tuple(replicas) if max_replicas else (),
            self._coverage(l1_blocks, l2_blocks),
            prefix_blocks=len(replicas),
            memory_blocks=memory_blocks,
        )

    def use(self, keys: Sequence[BlockKey], now: float) -> None:
        """Count a use of those blocks that are still there."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.touched_at = now
                block.hits += 1

    def holders(self, keys: Sequence[BlockKey]) -> dict[NodeId, bytes]:
        """Return which of ``keys`` each node has in memory (L1, L2), concatenated, in order."""
        held: dict[NodeId, list[bytes]] = {}
        for key in keys:
            block = self._blocks.get(key)
            nodes = self._copies(block) if block is not None else ()
            for node_id in dict.fromkeys(node for node, tier in nodes if tier is not Tier.L4):
                held.setdefault(node_id, []).append(key)
        return {node_id: b"".join(names) for node_id, names in held.items()}

    def list_blocks(self, limit: int, now: float) -> BlockListing:
        """Return up to ``limit`` copies, those of the newest blocks first."""
        total = sum(len(keys) for h in self._holders.values() for keys in h.held.values())
        records: list[BlockRecord] = []
        for key in reversed(self._blocks):
            if len(records) >= limit:
                break
            records.extend(self._records(key, now))
        return BlockListing(tuple(records[:limit]), total)

    def check_invariants(self) -> None:
        """Assert that the two views, by block and by node, say the same."""
        by_node = {
            (node_id, tier, key)
            for node_id, holder in self._holders.items()
            for tier, keys in holder.held.items()
            for key in keys
        }
        by_block = {
            (node_id, tier, key)
            for key, block in self._blocks.items()
            for node_id, tier in self._copies(block)
        }
        assert by_node == by_block, by_node ^ by_block
        assert all(block.l1 or block.pool for block in self._blocks.values())
        assert {h.bit: n for n, h in self._holders.items() if h.bit} == self._bits
        assert _union(self._host_bits.values()) == _union(self._bits)

    def _apply_event(self, holder: _Holder, event: BlockEvent, now: float) -> None:
        if isinstance(event, BlockRemoved):
            self._remove(holder, event.key, event.tier)
        elif _is_its_own(holder, event):
            self._store(holder, event, now)
        else:
            self.refused_events += 1

    def _store(self, holder: _Holder, event: BlockStored, now: float) -> None:
        block = self._blocks.get(event.key)
        if block is None:
            block = self._blocks[event.key] = _Block(event, now)
        block.model = block.model or event.model
        block.tenant = block.tenant or event.tenant
        info = holder.info
        if event.tier is Tier.L1:
            block.l1 |= holder.bit
        else:
            copy = Replica(event.key, info.node_id, info.host, event.tier, event.location)
            block.pool = (*_without(block.pool, info.node_id, event.tier), copy)
        holder.held.setdefault(event.tier, set()).add(event.key)
        if holder.unconfirmed is not None:
            holder.unconfirmed.get(event.tier, set()).discard(event.key)

    def _remove(self, holder: _Holder, key: BlockKey, tier: Tier) -> None:
        held = holder.held.get(tier)
        if held is None or key not in held:
            return
        held.remove(key)
        block = self._blocks[key]
        if tier is Tier.L1:
            block.l1 &= ~holder.bit
        else:
            block.pool = _without(block.pool, holder.info.node_id, tier)
        if not block.l1 and not block.pool:
            del self._blocks[key]

    def _remove_all(self, holder: _Holder, copies: dict[Tier, set[BlockKey]]) -> None:
        for tier, keys in copies.items():
            for key in tuple(keys):
                self._remove(holder, key, tier)

    def _free_bit(self) -> int:
        taken = _union(self._bits)
        return ~taken & (taken + 1)

    def _near_bits(self, pool: tuple[Replica, ...]) -> int:
        """Return the compute nodes on hosts that have the block in DMP memory."""
        bits = 0
        for replica in pool:
            if replica.tier is Tier.L2:
                bits |= self._host_bits.get(replica.host, 0)
        return bits

    def _coverage(
        self, l1_blocks: dict[int, int], l2_blocks: dict[int, int]
    ) -> tuple[NodeCoverage, ...]:
        return tuple(
            NodeCoverage(self._bits[bit], l1_blocks=l1_blocks[bit], l2_blocks=blocks)
            for bit, blocks in sorted(l2_blocks.items())
            if blocks
        )

    def _copies(self, block: _Block) -> Iterator[tuple[NodeId, Tier]]:
        for bit in _each_bit(block.l1):
            yield self._bits[bit], Tier.L1
        for replica in block.pool:
            yield replica.node, replica.tier

    def _records(self, key: BlockKey, now: float) -> Iterator[BlockRecord]:
        block = self._blocks[key]
        sizes = {(r.node, r.tier): r.location.length for r in block.pool if r.location}
        for node_id, tier in self._copies(block):
            yield BlockRecord(
                key=key,
                parent=block.parent,
                node_id=node_id,
                tier=tier.value,
                tokens=block.tokens,
                size_bytes=sizes.get((node_id, tier)) or self._page_bytes(node_id, block.model),
                model=block.model,
                tenant=block.tenant,
                age_s=max(0.0, now - block.created_at),
                idle_s=max(0.0, now - block.touched_at),
                hits=block.hits,
            )

    def _page_bytes(self, node_id: NodeId, model: str) -> int:
        """Return the size of a block in L1, whose events carry none; 0 for unknown models."""
        models = self._holders[node_id].info.models
        return next((m.layout.payload_bytes for m in models if m.name == model), 0)


def _same_life(known: NodeInfo, info: NodeInfo) -> bool:
    return (known.incarnation, known.role, known.host) == (info.incarnation, info.role, info.host)


def _is_its_own(holder: _Holder, event: BlockStored) -> bool:
    """Whether a node may claim that copy: L1 is of compute nodes, a slot of its owner.

    A block at rest (L4) may have no location; it gets one when its node promotes it.
    """
    if event.tier is Tier.L1:
        return bool(holder.bit)
    location = event.location
    if event.tier is Tier.L4 and location is None:
        return holder.info.role is NodeRole.DMP
    return (
        event.tier in _POOL_TIERS
        and location is not None
        and location.node == holder.info.node_id
        and location.incarnation == holder.info.incarnation
    )


def _without(pool: tuple[Replica, ...], node_id: NodeId, tier: Tier) -> tuple[Replica, ...]:
    return tuple(r for r in pool if r.node != node_id or r.tier is not tier)


def _best_first(pool: tuple[Replica, ...], reader: HostId | None) -> tuple[Replica, ...]:
    if len(pool) == 1:
        return pool
    return tuple(sorted(pool, key=lambda r: (r.tier is Tier.L4, r.host != reader)))


def _union(bits: Iterable[int]) -> int:
    union = 0
    for bit in bits:
        union |= bit
    return union


def _each_bit(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest


def _note_end(ended: int, blocks: int, ends: dict[int, int]) -> None:
    """Remember that the nodes in ``ended`` have the first ``blocks`` of the chain, not more."""
    for bit in _each_bit(ended):
        ends[bit] = blocks
