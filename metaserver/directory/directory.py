"""Where every block is: the soft-state block directory, a pure core.

Called by metaserver/state.py. Nodes feed it events and inventories, the scheduler asks it for whole
chains. A wrong reply costs a miss, never a wrong token, because owners check references.
"""

# Theory of operation.
# - State: the ledger (blocks and their copies) and the book (registered nodes). Each copy belongs
#   to a registered node, and a block has a row only while the block has a copy.
# - Events: ``add_node``, ``drop_node`` and ``apply`` of a batch. ``apply`` ignores a batch of an
#   unregistered life of a node and a repeated batch; Feed (node_book.py) classifies each batch.
# - A new node and a node whose feed has a gap are asked for an inventory. Copies that a finished
#   inventory did not name are dropped, so the directory needs no log and may restart empty.
# - Queries: ``find`` returns the longest known prefix of a chain and the part near each node.
# - Batches and chains have thousands of keys, so both are processed as NumPy columns
#   (ledger.py, views.py) and never key by key.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.kvcore.block import Tier
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo
from tierkv.kvwire.event_records import EventRecords
from tierkv.metaserver.client import MAX_LISTED_REPLICAS, BlockListing, LocateReply
from tierkv.metaserver.directory.arrays import U8, Ints
from tierkv.metaserver.directory.block_table import halves, heads_of
from tierkv.metaserver.directory.copy_table import L1, L2
from tierkv.metaserver.directory.event_columns import records_of
from tierkv.metaserver.directory.ledger import Ledger
from tierkv.metaserver.directory.locate_reply import ListedReplicas, ReplicaColumns, ReplicaHolder
from tierkv.metaserver.directory.node_book import NodeBook, Verdict
from tierkv.metaserver.directory.views import ChainView, blocks_after, list_blocks

MAX_BLOCKS: Final = 1 << 26
"""Upper bound on blocks of one directory, some 8 GiB; further blocks are refused and counted. Only
address space is reserved in advance."""

_FEWEST_BLOCKS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Found:
    """A locate reply, with the data for a reservation.

    Attributes:
        reply: the reply to the caller.
        chain: keys of the blocks that the pool or a compute node's surroundings have.
        view: copies of these blocks, valid until the directory changes; None if none was found.
    """

    reply: LocateReply
    chain: bytes
    view: ChainView | None


_NOTHING: Final = Found(LocateReply(), b"", None)


class Directory:
    """Copies of blocks by key and by node. Mutated only through its public methods.

    Attributes:
        ledger: blocks and their copies, of nodes in ``book`` only.
        book: registered nodes.
        stale_batches: batches of lives that are not registered.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        """Start empty; memory is used as blocks come."""
        self.ledger = _ledger(max_blocks)
        self.book = NodeBook()
        self.stale_batches = 0

    @property
    def refused_events(self) -> int:
        """Number of refused events; ``ledger.refused`` counts them by reason."""
        return sum(self.ledger.refused.values())

    def add_node(self, info: NodeInfo) -> None:
        """Register a node; blocks of an earlier incarnation are dropped."""
        known = self.book.by_name.get(info.node_id)
        if known is not None and _same_life(known.info, info):
            known.info = info
            return
        self.drop_node(info.node_id)
        self.book.add(info)

    def drop_node(self, node_id: NodeId) -> None:
        """Remove a node and all its copies. O(all copies), or O(1) for a node without copies."""
        holder = self.book.by_name.get(node_id)
        if holder is not None:
            self.ledger.strike_all(holder)
            self.book.remove(holder)

    def node_ids(self) -> tuple[NodeId, ...]:
        """Return the registered nodes."""
        return tuple(self.book.by_name)

    def incarnation_of(self, node_id: NodeId) -> Incarnation | None:
        """Return the incarnation of a registered node; None for an unregistered node."""
        holder = self.book.by_name.get(node_id)
        return None if holder is None else holder.info.incarnation

    def wants_inventory(self, node_id: NodeId) -> bool:
        """True when the copies of the node are not fully known and no inventory is under way."""
        holder = self.book.by_name.get(node_id)
        return holder is not None and holder.feed.wants_inventory

    def apply(self, batch: EventRecords, now: float) -> bool:
        """Apply a batch of events or a part of an inventory.

        Of several events about the same block and tier the last accepted event counts.

        Returns:
            True if the batch was meant for the directory, also for a repeat, which does nothing.
                False for a node not registered, or registered with another incarnation.

        Raises:
            RemoteProtocolError: the records are cut or too many.
        """
        records = records_of(batch)
        holder = self.book.by_name.get(batch.node_id)
        if holder is None or holder.info.incarnation != batch.incarnation:
            self.stale_batches += 1
            return False
        verdict = holder.feed.admit(batch)
        if verdict is Verdict.REPEATED:
            return True
        if verdict is Verdict.FIRST_PART:
            self.ledger.begin_inventory(holder)
        elif verdict is Verdict.EVENTS:
            holder.taking_inventory = False
        self.ledger.enter(holder, batch, records, now)
        if holder.taking_inventory and holder.feed.next_part is None:
            self.ledger.end_inventory(holder)
        return True

    def locate(
        self,
        chain: bytes,
        now: float,
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        use: bool = True,
    ) -> LocateReply:
        """Find the longest known prefix of a chain, and the part near each node.

        Args:
            chain: keys of the chain, concatenated.
            now: seconds.
            reader: host whose replicas come first.
            max_replicas: largest number of replicas listed per block; 0 only counts.
            use: count a use of the blocks found.
        """
        return self.find(chain, now, reader=reader, max_replicas=max_replicas, use=use).reply

    def find(
        self, chain: bytes, now: float, *, reader: HostId | None, max_replicas: int, use: bool
    ) -> Found:
        """Locate a chain, for a caller that may reserve the blocks found."""
        return self._found(chain, *self._rows_of(chain), now, reader, max_replicas, use=use)

    def find_many(self, chains: Sequence[bytes], now: float, *, use: bool) -> list[Found]:
        """Locate several chains without listing copies; the keys are looked up all at once."""
        low, rows, lines = self._rows_of(b"".join(chains))
        known = rows.astype(bool).tolist()
        found: list[Found] = []
        begin = 0
        for chain in chains:
            end = begin + len(chain) // BLOCK_KEY_BYTES
            if begin == end or not known[begin]:
                found.append(_NOTHING)
            elif use:  # Each use of a shared block counts, so its row is read again.
                found.append(self.find(chain, now, reader=None, max_replicas=0, use=True))
            else:
                part = slice(begin, end)
                columns = low[part], rows[part], lines[part]
                found.append(self._found(chain, *columns, now, None, 0, use=False))
            begin = end
        return found

    def _found(
        self,
        chain: bytes,
        low: U8,
        rows: Ints,
        lines: U8,
        now: float,
        reader: HostId | None,
        max_replicas: int,
        *,
        use: bool,
    ) -> Found:
        view = self._view(rows, lines)
        if not view.blocks:
            return _NOTHING
        prefix = view.prefix_of(view.tiers != L1)
        coverage = view.coverage()
        blocks = max([prefix, *[c.l2_blocks for c in coverage]])
        if use:
            self.ledger.blocks.use(rows[:blocks], lines[:blocks], now)
        reply = LocateReply(
            self._listed(chain, view, prefix, low, reader, max_replicas),
            coverage,
            prefix_blocks=prefix,
            memory_blocks=view.prefix_of(view.tiers == L2) if prefix else 0,
        )
        return Found(reply, chain[: blocks * BLOCK_KEY_BYTES], view)

    def use(self, chain: bytes, now: float) -> None:
        """Count a use of the blocks that are still known."""
        _, rows, lines = self._rows_of(chain)
        there = rows != 0
        self.ledger.blocks.use(rows[there], lines[there], now)

    def holders(self, found: Found) -> dict[NodeId, bytes]:
        """Return the found keys in each node's memory (L1, L2), in order."""
        if found.view is None:
            return {}
        keys = np.frombuffer(found.chain, f"V{BLOCK_KEY_BYTES}")
        held = found.view.in_memory_by_node(len(keys))
        return {
            self.book.holder(number).info.node_id: keys[blocks].tobytes()
            for number, blocks in held.items()
        }

    def blocks_after(self, keys: bytes) -> tuple[bytes, bytes]:
        """Return the blocks that follow others, directly or not; O(blocks log blocks).

        Raises:
            DirectoryUnavailableError: a node has not told all of its blocks yet.
        """
        for holder in self.book.by_name.values():
            complete = holder.feed.synced and not holder.taking_inventory
            if (holder.computes or holder.pools) and not complete:
                raise DirectoryUnavailableError(
                    f"the meta server does not know all blocks of {holder.info.node_id} yet"
                )
        return blocks_after(self.ledger.blocks, keys)

    def list_blocks(
        self, limit: int, now: float, *, leased: tuple[bytes, ...] = ()
    ) -> BlockListing:
        """Return up to ``limit`` copies, copies of the newest blocks first.

        Args:
            limit: largest number of copies.
            now: seconds.
            leased: chains of live leases, to be counted per block.
        """
        return list_blocks(self.ledger, self.book, limit, now, leased)

    def check_invariants(self) -> None:
        """Assert that blocks, copies and nodes are consistent."""
        self.ledger.check_invariants()
        for holder in self.book.by_name.values():
            self.ledger.check_holder(holder)
        held = sum(holder.copies for holder in self.book.by_name.values())
        assert held == len(self.ledger.copies)

    def _rows_of(self, chain: bytes) -> tuple[U8, Ints, U8]:
        """Return the low halves of a chain's keys, row numbers (0: unknown), and row copies."""
        halved = halves(chain)
        low = halved[:, 0].copy()
        rows, lines = self.ledger.blocks.index.find(low, halved[:, 1].copy())
        return low, rows, lines

    def _view(self, rows: Ints, lines: U8) -> ChainView:
        """Make a view of the copies of a chain's leading known blocks."""
        known = rows != 0
        blocks = len(rows) if known.all() else int(known.argmin())
        copies = self.ledger.copies.of_heads(heads_of(lines[:blocks]))
        return ChainView(blocks, copies, self.book)

    def _listed(
        self,
        chain: bytes,
        view: ChainView,
        prefix: int,
        low: U8,
        reader: HostId | None,
        max_replicas: int,
    ) -> ListedReplicas | tuple[()]:
        if not prefix or not max_replicas:
            return ()
        chosen, counts = view.best_first(prefix, low, reader=reader, most=max_replicas)
        names = view.copies.holders[chosen]
        seen = np.zeros(int(names.max()) + 1, bool)
        seen[names] = True
        present = np.flatnonzero(seen)
        columns = ReplicaColumns(
            counts=counts,
            holder=(np.cumsum(seen) - 1)[names],
            places=self.ledger.copies.places(view.copies.numbers[chosen]),
            holders=tuple(self._replica_holder(name) for name in present.tolist()),
        )
        return ListedReplicas(chain, columns)

    def _replica_holder(self, name: int) -> ReplicaHolder:
        info = self.book.holder(name >> 8).info
        tier = Tier.L2 if name & 0xFF == L2 else Tier.L4
        return ReplicaHolder(info.node_id, info.host, tier, info.incarnation)


def _ledger(max_blocks: int) -> Ledger:
    """Make a ledger for as many blocks as the available address space allows."""
    while True:
        try:
            return Ledger(max_blocks)
        except OSError:
            if max_blocks <= _FEWEST_BLOCKS:
                raise
            max_blocks //= 2


def _same_life(known: NodeInfo, info: NodeInfo) -> bool:
    return (known.incarnation, known.role, known.host) == (info.incarnation, info.role, info.host)
