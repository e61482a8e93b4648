"""The nodes of a Pool and the order in which each key asks them.

Called by dmp/pool.py. Every client that lists the same nodes ranks them alike for a key, by
rendezvous hashing of their names, so no directory is needed; nodes that are down are passed over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dmp.node_link import Act, NodeLink
from dmp.placement import rank_nodes
from dmp.pool_node import PoolNodeStats
from dmp.pool_stats import PoolMember
from dmp.transport.connection import Peer
from dmp.transport.select import PathOptions
from kvcore.errors import AuthenticationError, NoNodeError
from kvcore.ids import BlockKey


class Ring:
    """Some nodes, each known by its address and, once it answered, by its name.

    Attributes:
        links: the nodes, in the order given.
    """

    def __init__(self, links: Sequence[NodeLink]) -> None:
        self.links = links

    def offer(self, keys: Sequence[BlockKey], act: Act) -> None:
        """Offer keys to nodes, in the order of each key's ranking, until a node takes them."""
        left = {key: self._ranked(key) for key in keys}
        for rank in range(len(self.links)):
            groups: dict[NodeLink, list[BlockKey]] = {}
            for key, ranking in left.items():
                if rank < len(ranking) and ranking[rank].up:
                    groups.setdefault(ranking[rank], []).append(key)
            for link, group in groups.items():
                for key in act(link, group):
                    del left[key]

    def reach_again(self) -> None:
        """Try the nodes that are down."""
        for link in self.links:
            if not link.up:
                # A node that came back with another token stays down and says why in stats.
                with contextlib.suppress(AuthenticationError):
                    link.reach()

    def members(self) -> tuple[PoolMember, ...]:
        """Return how each node is doing; asks those that are up."""
        return tuple(_member(link) for link in self.links)

    def close(self) -> None:
        """Let all nodes go."""
        for link in self.links:
            link.close()

    def _ranked(self, key: BlockKey) -> Sequence[NodeLink]:
        if len(self.links) == 1:
            return self.links
        named = {link.node_id: link for link in self.links if link.node_id}
        # Equal weights: every client must rank alike, whatever it knows of capacities.
        return [named[node] for node in rank_nodes(key, [(node, 1.0) for node in named])]


def reach_nodes(peers: Sequence[Peer], options: PathOptions) -> Ring:
    """Reach nodes for the first time; one must answer.

    Raises:
        AuthenticationError: a node wants another token.
        NoNodeError: none answers; the message says why, node by node.
    """
    ring = Ring([NodeLink(peer, options) for peer in peers])
    try:
        reached = [link.reach() for link in ring.links]
        if not any(reached):
            raise NoNodeError(
                "no pool node answers: " + "; ".join(link.reason for link in ring.links),
                hint="start one with `tierkv serve dmp` and give the address it prints; one with a "
                "certificate (dmp.tls_cert) wants tls=TlsFiles(ca=...), pool.tls_ca",
            )
    except BaseException:
        ring.close()
        raise
    return ring


def _member(link: NodeLink) -> PoolMember:
    stats: PoolNodeStats | None = None
    if link.up:
        with link.absorb():
            stats = link.opened.node.stats()
    errors = tuple(sorted(link.errors.items()))
    return PoolMember(link.peer.address, link.node_id, link.up, link.path, errors, stats)
