"""The nodes of a Pool, and each key's ranking of the nodes.

Called by dmp/client/pool.py. All clients with the same list of nodes compute the same ranking for a
key, by weighted rendezvous hashing of the node names. No directory is needed, and a joining or
leaving node moves only its own share of the blocks. Nodes that are down are skipped. A client that
names its own host or zone may prefer nodes of these.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Final

import xxhash

from tierkv.dmp.client.node_link import Act, NodeLink
from tierkv.dmp.client.values import PoolMember
from tierkv.dmp.pool_node import PoolNodeStats
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.select import PathOptions
from tierkv.kvcore.errors import AuthenticationError, NoNodeError
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

NO_HOST: Final = HostId("")


def rank_nodes(key: BlockKey, nodes: Sequence[tuple[NodeId, float]]) -> list[NodeId]:
    """Rank nodes for a block, best first; nodes without weight are left out.

    Each node draws a number from the key and the node's name; a node of twice the weight ranks
    first twice as often.

    Args:
        key: key of the block.
        nodes: (node, weight), for example the node's capacity in bytes; order does not matter.

    Ref: Schindler & Schomaker 2005, "Weighted distributed hash tables" (logarithmic method).
    """
    scored = [(_score(key, node, weight), node) for node, weight in nodes if weight > 0]
    return [node for _, node in sorted(scored, key=lambda pair: (-pair[0], pair[1]))]


def _score(key: BlockKey, node: NodeId, weight: float) -> float:
    draw = xxhash.xxh3_64_intdigest(key + node.encode())
    # 53 bits, shifted by a half: exact in a float and never 0 or 1.
    return -weight / math.log(((draw >> 11) + 0.5) / (1 << 53))


class Ring:
    """Nodes, each known by address and, after the first answer, by name.

    Attributes:
        links: the nodes, in the order given.
    """

    def __init__(self, links: Sequence[NodeLink], *, host: HostId = NO_HOST) -> None:
        self.links = links
        self._host = host

    def offer(self, keys: Sequence[BlockKey], act: Act, *, near: bool = False) -> None:
        """Offer keys to nodes, in the order of each key's ranking, until a node accepts the key.

        Args:
            keys: keys to offer.
            act: offers keys to a node; returns the accepted keys.
            near: nodes of this host come first, then those of this zone. Not for values on which
                clients must agree: the first value under a key must stay, so all clients must use
                the same ranking.
        """
        left = {key: self._ranked(key, near=near) for key in keys}
        for rank in range(len(self.links)):
            groups: dict[NodeLink, list[BlockKey]] = {}
            for key, ranking in left.items():
                if rank < len(ranking) and ranking[rank].up:
                    groups.setdefault(ranking[rank], []).append(key)
            for link, group in groups.items():
                for key in act(link, group):
                    del left[key]

    def seek(self, keys: Sequence[BlockKey], act: Act) -> None:
        """Ask nodes for keys: the first node of each key's ranking, then every other node once.

        A value may be on any node: near another host, or on a lower rank because a better node was
        full or down. No ranking tells where.
        """
        left = {key: self._ranked(key, near=True)[:1] for key in keys}
        for first in (True, False):
            for link in self.links:
                group = [key for key, ranking in left.items() if (link in ranking) is first]
                for key in act(link, group) if group and link.up else ():
                    del left[key]

    def reach_again(self) -> None:
        """Try to reach the nodes that are down."""
        for link in self.links:
            if not link.up:
                # A node that returns with another token stays down, with the reason in stats.
                with contextlib.suppress(AuthenticationError):
                    link.reach()

    def members(self) -> tuple[PoolMember, ...]:
        """Return the state of each node; asks the nodes that are up."""
        return tuple(_member(link) for link in self.links)

    def close(self) -> None:
        """Close all links."""
        for link in self.links:
            link.close()

    def _ranked(self, key: BlockKey, *, near: bool) -> Sequence[NodeLink]:
        if len(self.links) == 1:
            return self.links
        named = {link.node_id: link for link in self.links if link.node_id}
        # Equal weights: every client must compute the same ranking, whatever capacities it knows.
        ranked = [named[node] for node in rank_nodes(key, [(node, 1.0) for node in named])]
        if near:
            ranked.sort(
                key=lambda link: (not self._host or link.host != self._host, not link.is_near)
            )
        return ranked


def reach_nodes(peers: Sequence[Peer], options: PathOptions, *, host: HostId = NO_HOST) -> Ring:
    """Reach nodes for the first time; at least one must answer.

    Args:
        peers: the nodes.
        options: how to reach the nodes.
        host: this machine, if values may go to nodes of this machine first.

    Raises:
        AuthenticationError: a node requires another token.
        NoNodeError: no node answers; the message gives the reason for each node.
    """
    ring = Ring([NodeLink(peer, options) for peer in peers], host=host)
    try:
        reached = [link.reach() for link in ring.links]
        if not any(reached):
            raise NoNodeError(
                "no pool node answers: " + "; ".join(link.reason for link in ring.links),
                hint="Start one with `tierkv serve dmp` and give the address it prints; one with a "
                "certificate (dmp.tls_cert) wants tls=TlsFiles(ca=...), pool.tls_ca.",
            )
    except BaseException:
        ring.close()
        raise
    return ring


def _member(link: NodeLink) -> PoolMember:
    stats: PoolNodeStats | None = None
    if link.up:
        with link.absorb():
            stats = link.opened.stats()
    errors = tuple(sorted(link.errors.items()))
    return PoolMember(link.peer.address, link.node_id, link.up, link.path, errors, stats)
