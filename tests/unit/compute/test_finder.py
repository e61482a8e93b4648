"""Zones in the finder: own copies first, one node per zone, and a limit that means a miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.fix_dmp import block_key
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.tiers.finder import Attempt, BlockFinder, Directory
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.zone_traffic import OtherZone, ZoneTraffic
from tierkv.kvcore.block import Location, Replica, Tier
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import BlockKey, HostId, ZoneId
from tierkv.metaserver.client import LocateReply

HERE = ZoneId("a")
KEYS = [block_key(f"k{i}") for i in range(40)]


class Elsewhere(MemoryPoolNode):
    """A pool node that may be in another zone."""

    def __init__(self, name: str, other: OtherZone | None = None) -> None:
        super().__init__(name, host=name)
        self._other = other
        self.asked: list[str] = []

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        self.asked.append(self.node_id)
        return super().lookup(keys)

    @property
    def other_zone(self) -> OtherZone | None:
        return self._other


@contextmanager
def absorb() -> Iterator[Attempt]:
    yield Attempt()


def finder_of(nodes: Sequence[PoolNode], directory: Directory | None = None) -> BlockFinder:
    finder = BlockFinder(
        host=HostId("h"),
        directory=directory,
        absorb=absorb,
        promote=lambda node, keys: [None] * len(keys),
    )
    finder.set_nodes(nodes)
    return finder


def zones(*, bytes_per_s: float = 0.0) -> tuple[ZoneTraffic, list[Elsewhere]]:
    """Two nodes of the own zone, two of zone b and one of zone c."""
    traffic = ZoneTraffic(HERE, clock=ManualClock(), bytes_per_s=bytes_per_s)
    where = {"a1": HERE, "a2": HERE, "b1": ZoneId("b"), "b2": ZoneId("b"), "c1": ZoneId("c")}
    return traffic, [Elsewhere(name, traffic.other(zone)) for name, zone in where.items()]


def places(finder: BlockFinder) -> set[str]:
    """Return the nodes where the keys would be stored."""
    found = [finder.place(key) for key in KEYS]
    return {node.node_id for node in found if node is not None}


def test_blocks_are_stored_in_the_own_zone_and_spread_there() -> None:
    finder = finder_of(zones()[1])
    assert places(finder) == {"a1", "a2"}
    assert places(finder_of(zones()[1][2:])) == {"b1", "b2", "c1"}


def test_without_a_directory_the_writers_node_of_every_zone_is_asked() -> None:
    _, nodes = zones()
    asked: list[str] = []
    for node in nodes:
        node.asked = asked
    finder_of(nodes).find(KEYS[:1], thorough=False)
    assert asked[0] in ("a1", "a2") and asked[1:] and {"b1", "b2", "c1"} >= set(asked[1:])
    assert len(asked) == 3
    as_in_b = [Elsewhere(node.node_id, None) for node in nodes[2:4]]
    writer = finder_of(as_in_b).place(KEYS[0])
    assert writer is not None and writer.node_id in asked


def knows(*nodes: PoolNode) -> Directory:
    """A directory with a resting copy of the first block on each node, in this order."""
    copies = tuple(Replica(KEYS[0], node.node_id, node.host, Tier.L4) for node in nodes)
    return lambda keys: LocateReply(replicas=(copies,))


def test_a_copy_of_the_own_zone_is_tried_first_and_others_only_within_the_limit() -> None:
    traffic, nodes = zones(bytes_per_s=10)
    finder = finder_of(nodes, knows(nodes[4], nodes[2], nodes[1]))
    (found,) = finder.find(KEYS[:1], thorough=False)
    assert [source.node.node_id for source in found] == ["a2", "c1", "b1"]
    traffic.received(100)
    (found,) = finder.find(KEYS[:1], thorough=False)
    assert [source.node.node_id for source in found] == ["a2"]
    only_far = finder_of(nodes, knows(nodes[4], nodes[2]))
    assert only_far.find(KEYS[:1], thorough=False) == []
