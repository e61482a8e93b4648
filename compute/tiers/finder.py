"""Where the pool holds a chain of blocks, best source first.

Used by loader threads (to read) and by the publisher (to place). A lookup asks the meta server once
for the whole chain; for blocks unknown to the meta server, the home node and the rendezvous nodes
are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tierkv.dmp.client.ring import rank_nodes
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore import limits
from tierkv.kvcore.block import Location, Replica, Tier, tier_seen_from
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.ids import BlockKey, HostId, NodeId, ZoneId
from tierkv.metaserver.client import LocateReply


@dataclass(slots=True)
class Attempt:
    """The outcome of guarded cache work; ``error`` is None on success."""

    error: CacheError | None = None

    @property
    def ok(self) -> bool:
        """Whether no error was absorbed."""
        return self.error is None


Absorb = Callable[[], AbstractContextManager[Attempt]]
"""Guards cache work: errors are counted and swallowed (compute/tiers/tiers.py)."""

Directory = Callable[[Sequence[BlockKey]], LocateReply]
"""Blocking ``MetaClient.locate``; raises DirectoryUnavailableError."""


Promote = Callable[[PoolNode, Sequence[BlockKey]], Sequence[Location | None]]
"""Has a node bring blocks from disk into memory; guarded and measured (compute/tiers/tiers.py)."""


@dataclass(frozen=True, slots=True)
class Source:
    """One copy of a block.

    Attributes:
        node: the pool node with the copy.
        location: where the copy can be read; None while the copy rests on the node's disk or
            archive. The loader promotes a resting copy only when loading was found worth the time.
        tier: the tier as seen from here.
        key: key of the block, for a copy that rests or rested.
    """

    node: PoolNode
    location: Location | None
    tier: Tier
    key: BlockKey | None = None


class BlockFinder:
    """Knows the connected pool nodes, and asks the nodes and the directory about blocks.

    Attributes:
        directory: the meta server; None without a meta server.
        archive: tier L4 outside the DMP nodes; asked last, None by default.
    """

    def __init__(
        self,
        *,
        host: HostId,
        directory: Directory | None,
        absorb: Absorb,
        promote: Promote,
        archive: PoolNode | None = None,
    ) -> None:
        self.directory = directory
        self.archive = archive
        self._host = host
        self._absorb = absorb
        self._promote = promote
        self._nodes: dict[NodeId, PoolNode] = {}

    @property
    def nodes(self) -> list[PoolNode]:
        """Connected pool nodes."""
        return list(self._nodes.values())

    def set_nodes(self, nodes: Sequence[PoolNode]) -> None:
        """Replace the connected pool nodes; may be called from any thread."""
        self._nodes = {node.node_id: node for node in nodes}

    @property
    def home(self) -> PoolNode | None:
        """The pool node of this host, or None."""
        return next((n for n in self._nodes.values() if n.host == self._host), None)

    def place(self, key: BlockKey) -> PoolNode | None:
        """Return the node to write a new block to.

        The home node; without one, the rendezvous node of the own zone; without one, of all zones.
        """
        return self.home or next(iter(self._rendezvous(key)), None)

    def find(self, keys: Sequence[BlockKey], *, thorough: bool) -> list[tuple[Source, ...]]:
        """Return the sources of the longest prefix of ``keys`` in the pool.

        Args:
            keys: a chain, or the rest of a chain.
            thorough: ask every node about blocks unknown to the directory (after a handoff, when
                the directory may not know the newest blocks yet).
        """
        keys = keys[: limits.MAX_CHAIN_BLOCKS]
        found, answered = self._from_directory(keys)
        rest = keys[len(found) :]
        if rest:
            found += self._from_nodes(rest, everywhere=thorough, by_rendezvous=not answered)
        if self.archive is not None and len(found) < len(keys):
            known: dict[BlockKey, list[Source]] = {key: [] for key in keys[len(found) :]}
            self._ask(self.archive, list(known), known, tier=Tier.L4)
            found += _leading(known)
        return found

    def _from_directory(self, keys: Sequence[BlockKey]) -> tuple[list[tuple[Source, ...]], bool]:
        found: list[tuple[Source, ...]] = []
        if self.directory is None:
            return found, False
        reply = LocateReply()
        with self._absorb() as attempt:
            reply = self.directory(keys)
        for replicas in reply.replicas:
            sources = [self._source(r) for r in replicas if self._is_reachable(r)]
            if not sources:
                break
            found.append(tuple(sorted(sources, key=_nearness)))
        return found, attempt.ok

    def _is_reachable(self, replica: Replica) -> bool:
        node = self._nodes.get(replica.node)
        can_be_read = replica.location is not None or replica.tier is Tier.L4
        return can_be_read and node is not None and _has_room(node)

    def _source(self, replica: Replica) -> Source:
        tier = tier_seen_from(replica, self._host)
        key = replica.key if replica.location is None else None
        return Source(self._nodes[replica.node], replica.location, tier, key)

    def _from_nodes(
        self, keys: Sequence[BlockKey], *, everywhere: bool, by_rendezvous: bool
    ) -> list[tuple[Source, ...]]:
        """Ask the nodes directly: always the home node, further nodes only with a reason.

        Without the directory (``by_rendezvous``) no process knows which blocks rest on disks, and
        the nodes are asked to promote missing blocks.
        """
        known: dict[BlockKey, list[Source]] = {key: [] for key in keys}
        if self.home is not None:
            self._ask(self.home, keys, known, tier=Tier.L2, promote=by_rendezvous)
        if everywhere:
            for node in self.nodes:
                if node is not self.home:
                    self._ask(node, keys, known, tier=Tier.L3, promote=by_rendezvous)
        elif by_rendezvous:
            for node, wanted in self._by_rendezvous(keys, known):
                self._ask(node, wanted, known, tier=Tier.L3, promote=True)
        return _leading(known)

    def _by_rendezvous(
        self, keys: Sequence[BlockKey], known: dict[BlockKey, list[Source]]
    ) -> list[tuple[PoolNode, list[BlockKey]]]:
        wanted: dict[NodeId, list[BlockKey]] = {}
        for key in keys:
            for node in () if known[key] else self._rendezvous(key):
                if node is not self.home:
                    wanted.setdefault(node.node_id, []).append(key)
        return [(self._nodes[node_id], missing) for node_id, missing in wanted.items()]

    def _ask(
        self,
        node: PoolNode,
        keys: Sequence[BlockKey],
        known: dict[BlockKey, list[Source]],
        *,
        tier: Tier,
        promote: bool = False,
    ) -> None:
        found: list[Location | None] = []
        if not _has_room(node):
            return
        with self._absorb():
            found = node.lookup(keys)
        for key, location in zip(keys, found, strict=False):
            if location is not None:
                known[key].append(Source(node, location, tier))
        missing = [key for key in keys[: len(found)] if not known[key]]
        if promote and missing:
            for key, location in zip(missing, self._promote(node, missing), strict=False):
                if location is not None:
                    known[key].append(Source(node, location, Tier.L4, key))

    def _rendezvous(self, key: BlockKey) -> list[PoolNode]:
        """Return the node of each zone where its writers store a block, the own zone first."""
        nodes = self._nodes
        # Equal weights: every reader and writer must rank alike, with or without known capacities.
        ranked = rank_nodes(key, [(node_id, 1.0) for node_id in nodes])
        first: dict[ZoneId | None, PoolNode] = {}
        for node_id in ranked:
            zone = nodes[node_id].other_zone
            first.setdefault(None if zone is None else zone.name, nodes[node_id])
        return sorted(first.values(), key=lambda node: node.other_zone is not None)


def _nearness(source: Source) -> tuple[bool, Tier]:
    """Order copies: the own zone first, even its disks, because bytes between zones cost money."""
    return source.node.other_zone is not None, source.tier


def _has_room(node: PoolNode) -> bool:
    return node.other_zone is None or node.other_zone.traffic.has_room


def _leading(known: dict[BlockKey, list[Source]]) -> list[tuple[Source, ...]]:
    """Return the sources of the longest prefix without a gap."""
    found: list[tuple[Source, ...]] = []
    for sources in known.values():
        if not sources:
            break
        found.append(tuple(sources))
    return found
