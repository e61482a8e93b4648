"""Read-only views of the directory: a chain's copies for a locate, and the listing for the admin.

Called by metaserver/directory/directory.py. A ChainView answers for prefixes, coverage and best
copies of a chain's blocks; it works on whole columns, because a chain has up to
limits.MAX_CHAIN_BLOCKS blocks and up to one copy per node and tier for each block. The cost of a
listing is bounded by the requested limit and the number of scanned rows. Pure; nothing is changed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore.block import BlockSpec, Owner, Tier
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, HostId
from tierkv.metaserver.client import BlockListing, BlockRecord, NodeCoverage
from tierkv.metaserver.directory.arrays import U8, Bools, Ints, distinct
from tierkv.metaserver.directory.block_table import BlockTable, halves
from tierkv.metaserver.directory.copy_table import L1, L2, L4, Copies
from tierkv.metaserver.directory.ledger import Ledger
from tierkv.metaserver.directory.node_book import Holder, NodeBook

_TIER: Final = 0xFF
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_SPREAD_SHIFT: Final = np.uint64(35)
_OTHER_HOST: Final = np.uint64(1 << 31)
_OTHER_ZONE: Final = np.uint64(1 << 30)
_ON_DISK: Final = np.uint64(1 << 29)
_AT_SHIFT: Final = np.uint64(32)

_ROWS_LOOKED_AT: Final = 1 << 20
"""Only the last rows of a larger table are scanned: a view must not delay locates."""

_TIERS: Final = {L1: Tier.L1, L2: Tier.L2, L4: Tier.L4}


class ChainView:
    """The copies of a chain, with queries by prefix, node and rank.

    Attributes:
        blocks: leading blocks with any copy; ``copies`` belong to these blocks.
        tiers: tier of each copy.
        nodes: number of each copy's node.
        _single: each block has exactly one copy.
    """

    def __init__(self, blocks: int, copies: Copies, book: NodeBook) -> None:
        self.blocks = blocks
        self.copies = copies
        self.tiers: Ints = copies.holders & _TIER
        self.nodes: Ints = copies.holders >> 8
        self._book = book
        self._single = len(copies.at) == blocks

    def prefix_of(self, chosen: Bools) -> int:
        """Return the number of leading blocks with a ``chosen`` copy."""
        if self._single:
            return self.blocks if chosen.all() else int(chosen.argmin())
        have = np.zeros(self.blocks + 1, bool)
        have[self.copies.at[chosen]] = True
        return int(have.argmin())

    def coverage(self) -> tuple[NodeCoverage, ...]:
        """Return each compute node's part of the beginning of the chain, by node number."""
        nodes = self._first_nodes()
        if self._single:
            return tuple([self._coverage_of(number) for number in nodes])
        if not nodes:
            return ()
        hosts = self._book.hosts[nodes]
        place = np.full(len(self._book.holders), -1)
        place[nodes] = np.arange(len(nodes))
        in_l1 = self._matrix(self.tiers == L1, place[self.nodes], len(nodes))
        host_names, host_of = np.unique(hosts, return_inverse=True)
        host_place = np.full(int(self._book.hosts.max()) + 1, -1)
        host_place[host_names] = np.arange(len(host_names))
        of_copy = host_place[self._book.hosts[self.nodes]]
        on_host = self._matrix(self.tiers == L2, of_copy, len(host_names))
        near = (in_l1 | on_host[host_of]).argmin(axis=1)
        l1 = in_l1.argmin(axis=1)
        return tuple(
            NodeCoverage(self._book.holder(number).info.node_id, l1_blocks=a, l2_blocks=b)
            for number, a, b in zip(nodes, l1.tolist(), near.tolist(), strict=True)
        )

    def _coverage_of(self, number: int) -> NodeCoverage:
        """Return the coverage of one compute node, if each block has a single copy."""
        own = (self.nodes == number) & (self.tiers == L1)
        on_host = self._book.hosts[self.nodes] == self._book.hosts[number]
        return NodeCoverage(
            self._book.holder(number).info.node_id,
            l1_blocks=self.prefix_of(own),
            l2_blocks=self.prefix_of(own | (on_host & (self.tiers == L2))),
        )

    def best_first(
        self, blocks: int, low: U8, *, reader: HostId | None, most: int
    ) -> tuple[Ints, Ints]:
        """Choose up to ``most`` copies of each of the first ``blocks`` blocks, best first.

        Copies on the reader's host come first, then copies in its zone; among these, copies in
        memory come before copies on disk.
        Remaining ties are ordered differently from block to block, to spread readers over the
        nodes.

        Returns:
            Indexes of the chosen copies, block by block, and the number of copies of each block.
        """
        chosen = np.flatnonzero((self.tiers != L1) & (self.copies.at < blocks))
        at = self.copies.at[chosen]
        counts = np.bincount(at, minlength=blocks)
        if len(chosen) == blocks:  # One copy each; copies come in no order.
            in_order = np.empty(blocks, np.int64)
            in_order[at] = chosen
            return in_order, counts
        rank = (low[at] ^ self.nodes[chosen].view(np.uint64) * _SPREAD) * _SPREAD >> _SPREAD_SHIFT
        host = self._book.host_number(reader)
        on_host = self._book.hosts[self.nodes[chosen]] == host
        rank += np.where(on_host, np.uint64(0), _OTHER_HOST)
        if self._book.has_zones:
            in_zone = self._book.zones[self.nodes[chosen]] == self._book.zone_of_host(host)
            rank += np.where(in_zone, np.uint64(0), _OTHER_ZONE)
        rank += np.where(self.tiers[chosen] == L2, np.uint64(0), _ON_DISK)
        order = np.argsort(at.view(np.uint64) << _AT_SHIFT | rank)
        chosen = chosen[order]
        if int(counts.max()) > most:
            begins = np.cumsum(counts) - counts
            within = np.arange(len(chosen)) - np.repeat(begins, counts)
            chosen = chosen[within < most]
            counts = np.minimum(counts, most)
        return chosen, counts

    def in_memory_by_node(self, blocks: int) -> dict[int, Ints]:
        """Return per node the first ``blocks`` that are in its L1 or L2, in order."""
        in_memory = (self.tiers == L1) | (self.tiers == L2)
        held = np.flatnonzero(in_memory & (self.copies.at < blocks))
        if not len(held):
            return {}
        pairs = distinct(self.nodes[held] << 32 | self.copies.at[held])
        nodes = pairs >> 32
        begins = np.flatnonzero(np.diff(nodes, prepend=-1))
        parts = np.split(pairs & 0xFFFFFFFF, begins[1:])
        return dict(zip(nodes[begins].tolist(), parts, strict=True))

    def _first_nodes(self) -> list[int]:
        """Return the compute nodes with the first block in L1 or on their host."""
        if not self.blocks:
            return []
        first = self.copies.at == 0
        found = set(self.nodes[first & (self.tiers == L1)].tolist())
        for host in set(self._book.hosts[self.nodes[first & (self.tiers == L2)]].tolist()):
            found.update(self._book.compute_nodes(host))
        return sorted(found)

    def _matrix(self, chosen: Bools, place: Ints, count: int) -> Bools:
        """Mark which of ``count`` places has which block; the last column is always False."""
        have = np.zeros((count, self.blocks + 1), bool)
        chosen = chosen & (place >= 0)
        have[place[chosen], self.copies.at[chosen]] = True
        return have


def list_blocks(
    ledger: Ledger, book: NodeBook, limit: int, now: float, leased: tuple[bytes, ...]
) -> BlockListing:
    """Return up to ``limit`` copies, copies of the newest blocks first.

    Args:
        ledger: blocks and copies.
        book: the nodes of the copies.
        limit: largest number of copies.
        now: seconds.
        leased: chains of live leases, to be counted per block.
    """
    blocks = ledger.blocks
    rows = blocks.live_rows(newest=_ROWS_LOOKED_AT)
    rows = rows[np.argsort(-blocks.created[rows], kind="stable")[:limit]]
    copies = ledger.copies.of_heads(blocks.head[rows].astype(np.int64))
    order = np.argsort(copies.at, kind="stable")[:limit]
    at, holders = copies.at[order], copies.holders[order]
    rows = rows[at]
    return BlockListing(
        tuple(
            BlockRecord(
                block=BlockSpec(
                    key,
                    parent,
                    tokens,
                    owner=Owner(
                        ledger.models[model], ledger.tenants[tenant], ledger.sessions[session]
                    ),
                ),
                node_id=holder.info.node_id,
                tier=_TIERS[code & 0xFF].value,
                size_bytes=length or _page_bytes(holder, ledger.models[model]),
                age_s=age_s,
                idle_s=idle_s,
                hits=hits,
                heat=heat,
                leases=leases,
            )
            for key, parent, holder, code, tokens, length, model, tenant, session, age_s, idle_s,
            hits, heat, leases in zip(
                _keys(blocks.hot[rows, :2]),
                _keys(blocks.parents[rows]),
                [book.holder(code >> 8) for code in holders.tolist()],
                holders.tolist(),
                blocks.tokens[rows].tolist(),
                ledger.copies.lengths[copies.numbers[order]].tolist(),
                blocks.models[rows].tolist(),
                blocks.tenants[rows].tolist(),
                blocks.sessions[rows].tolist(),
                _ages(blocks.created[rows], blocks.since_born(now)),
                _ages(blocks.touched[rows], blocks.since_born(now)),
                blocks.uses[rows].tolist(),
                blocks.faded_heat(rows, now).tolist(),
                _times_leased(rows, ledger, leased),
                strict=True,
            )
        ),
        total=len(ledger.copies),
    )  # fmt: skip


def _times_leased(rows: Ints, ledger: Ledger, leased: tuple[bytes, ...]) -> list[int]:
    """Count the live leases that cover each of ``rows``."""
    counts = np.zeros(int(rows.max(initial=0)) + 1, np.int64)
    for chain in leased:
        keys = halves(chain)
        found, _ = ledger.blocks.index.find(keys[:, 0].copy(), keys[:, 1].copy())
        counts[distinct(found[(found != 0) & (found < len(counts))])] += 1
    times: list[int] = counts[rows].tolist()
    return times


def _keys(halved: U8) -> list[BlockKey]:
    raw = np.ascontiguousarray(halved).tobytes()
    step = BLOCK_KEY_BYTES
    return [BlockKey(raw[start : start + step]) for start in range(0, len(raw), step)]


def _ages(moments: NDArray[np.float32], now: float) -> list[float]:
    ages: list[float] = np.maximum(0.0, now - moments.astype(np.float64)).tolist()
    return ages


def _page_bytes(holder: Holder, model: str) -> int:
    """Return the size of a block in L1, whose events carry no size; 0 for unknown models."""
    models = holder.info.models
    return next((m.layout.payload_bytes for m in models if m.name == model), 0)


def blocks_after(blocks: BlockTable, keys: bytes) -> tuple[bytes, bytes]:
    """Return the known blocks after the given blocks, direct and indirect followers.

    Args:
        blocks: the table.
        keys: concatenated keys; they need not be in the table.

    Returns:
        Concatenated keys of the blocks, and of the block before each. A block whose parent is not
        in the table is found only after a parent among ``keys``.
    """
    rows = blocks.live_rows()
    order = np.argsort(blocks.parents[rows, 0], kind="stable")
    rows = rows[order]
    parents = np.ascontiguousarray(blocks.parents[rows])
    above = halves(keys)
    found: list[Ints] = []
    seen = np.zeros(len(rows), bool)
    while len(above):
        first = np.searchsorted(parents[:, 0], above[:, 0], side="left")
        counts = np.searchsorted(parents[:, 0], above[:, 0], side="right") - first
        at = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        at = at[parents[at, 1] == np.repeat(above[:, 1], counts)]
        at = np.unique(at[~seen[at]])
        seen[at] = True
        found.append(at)
        above = blocks.hot[rows[at], :2]
    chosen = np.concatenate(found) if found else np.zeros(0, np.int64)
    return blocks.hot[rows[chosen], :2].tobytes(), parents[chosen].tobytes()
