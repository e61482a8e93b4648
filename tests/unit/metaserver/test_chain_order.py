"""Replicas belong to the blocks they are listed for, wherever a block's other copies are."""

from __future__ import annotations

from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockStored, EventBatch
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvwire.event_records import pack_events
from tierkv.metaserver.directory.directory import Directory

LIFE = Incarnation(1)
KEYS = [BlockKey(bytes([n]) * 16) for n in range(1, 4)]


def report(directory: Directory, name: str, *events: BlockStored) -> None:
    batch = EventBatch(NodeId(name), LIFE, 1, events, inventory=True)
    assert directory.apply(pack_events(batch), 0.0)


def test_blocks_that_also_lie_in_l1_keep_their_place_in_the_chain() -> None:
    """The pool's only copy of a block is found after an L1 copy of it: that once swapped blocks."""
    directory = Directory()
    for name, role in (("dmp", NodeRole.DMP), ("cpu", NodeRole.COMPUTE)):
        directory.add_node(NodeInfo(NodeId(name), LIFE, role, HostId("h")))
    in_pool = [
        BlockStored(
            BlockSpec(key, ROOT_PARENT, 16), Tier.L2, Location(NodeId("dmp"), LIFE, 0, slot, 1, 64)
        )
        for slot, key in enumerate(KEYS)
    ]
    report(directory, "dmp", *in_pool)
    report(directory, "cpu", BlockStored(BlockSpec(KEYS[0], ROOT_PARENT, 16), Tier.L1))
    replicas = directory.locate(b"".join(KEYS), 0.0).replicas
    assert [[r.key for r in block] for block in replicas] == [[key] for key in KEYS]
    assert [block[0].location for block in replicas] == [event.location for event in in_pool]
