"""The directory's edges: what it refuses, room that ends, heat that fades, replicas' order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Owner, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, EventBatch
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId, ZoneId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvwire.event_records import RECORD_BYTES, EventRecords, pack_events
from tierkv.metaserver.directory.arrays import distinct
from tierkv.metaserver.directory.block_table import HEAT_FADES_S
from tierkv.metaserver.directory.directory import Directory
from tierkv.metaserver.directory.event_columns import RECORD
from tierkv.metaserver.directory.ledger import Names

DMP = NodeInfo(NodeId("dmp-0"), Incarnation(7), NodeRole.DMP, HostId("a"))
FAR = NodeInfo(NodeId("dmp-1"), Incarnation(7), NodeRole.DMP, HostId("b"))
COMPUTE = NodeInfo(NodeId("cpu-0"), Incarnation(7), NodeRole.COMPUTE, HostId("a"))
KEYS = [BlockKey((n + 1).to_bytes(16, "little")) for n in range(300)]


def stored(key: BlockKey, node: NodeInfo = DMP, tier: Tier = Tier.L2, **place: int) -> BlockStored:
    where = {"segment": 0, "slot": 1, "generation": 1, "length": 64} | place
    location = Location(node.node_id, node.incarnation, **where)
    return BlockStored(BlockSpec(key, ROOT_PARENT, 4), tier, None if tier is Tier.L1 else location)


def batch(node: NodeInfo, seq: int, *events: BlockEvent) -> EventRecords:
    return pack_events(EventBatch(node.node_id, node.incarnation, seq, events))


@pytest.fixture
def directory() -> Iterator[Directory]:
    core = Directory(max_blocks=1_024)
    for info in (DMP, FAR, COMPUTE):
        core.add_node(info)
    yield core
    core.check_invariants()


def prefix(directory: Directory, *keys: BlockKey) -> int:
    return directory.locate(b"".join(keys), 0.0).prefix_blocks


@pytest.mark.parametrize(
    ("reason", "event"),
    [
        ("size", stored(KEYS[1], length=0)),
        ("size", stored(KEYS[1], length=limits.MAX_SLOT_BYTES + 1)),
        ("slot", stored(KEYS[1], slot=1 << 32)),
        ("owner", stored(KEYS[1], FAR)),
        ("owner", stored(KEYS[1], replace(DMP, incarnation=Incarnation(6)))),
        ("owner", stored(KEYS[1], tier=Tier.L1)),
        ("owner", replace(stored(KEYS[1]), location=None)),
        ("tier", stored(KEYS[1], tier=Tier.L3)),
        ("tier", BlockRemoved(KEYS[0], Tier.L3)),
        ("key", stored(BlockKey(b"\xff" * 16))),
    ],
)
def test_a_lie_is_refused_counted_and_disturbs_nothing(
    directory: Directory, reason: str, event: BlockEvent
) -> None:
    assert directory.apply(batch(DMP, 1, stored(KEYS[0]), event, stored(KEYS[2])), 0.0)
    assert dict(directory.ledger.refused) == {reason: 1}
    assert directory.refused_events == 1
    assert [prefix(directory, key) for key in KEYS[:3]] == [1, 0, 1]


@pytest.mark.parametrize(
    ("field", "reason"), [("kind", "kind"), ("tier", "tier"), ("model", "name")]
)
def test_unknown_codes_are_refused_one_by_one(
    directory: Directory, field: str, reason: str
) -> None:
    packed = batch(DMP, 1, stored(KEYS[0]), stored(KEYS[1]))
    records = np.frombuffer(packed.records, RECORD).copy()
    records[field][0] = 77
    assert directory.apply(replace(packed, records=records.tobytes()), 0.0)
    assert dict(directory.ledger.refused) == {reason: 1}
    assert [prefix(directory, key) for key in KEYS[:2]] == [0, 1]


@pytest.mark.parametrize("field", ["model", "tenant", "session"])
def test_a_removal_with_a_name_that_is_not_there_is_refused_too(
    directory: Directory, field: str
) -> None:
    directory.apply(batch(DMP, 1, stored(KEYS[0]), stored(KEYS[1])), 0.0)
    packed = batch(DMP, 2, BlockRemoved(KEYS[0], Tier.L2), BlockRemoved(KEYS[1], Tier.L2))
    records = np.frombuffer(packed.records, RECORD).copy()
    records[field][0] = 7
    assert directory.apply(replace(packed, records=records.tobytes()), 0.0)
    assert dict(directory.ledger.refused) == {"name": 1}
    assert [prefix(directory, key) for key in KEYS[:2]] == [1, 0]


@pytest.mark.parametrize(
    "size", [RECORD_BYTES - 1, RECORD_BYTES * (limits.MAX_EVENTS_PER_BATCH + 1)]
)
def test_broken_records_are_the_peers_mistake(directory: Directory, size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="records"):
        directory.apply(replace(batch(DMP, 1), records=bytes(size)), 0.0)
    assert directory.apply(batch(DMP, 1, stored(KEYS[0])), 0.0), "its number was not used up"


def test_batches_of_lives_that_are_not_registered_are_counted(directory: Directory) -> None:
    old = replace(DMP, incarnation=Incarnation(6))
    nobody = replace(DMP, node_id=NodeId("nobody"))
    for info in (old, nobody):
        assert not directory.apply(batch(info, 1, stored(KEYS[0], info)), 0.0)
    assert (directory.stale_batches, directory.refused_events) == (2, 0)


def test_of_several_news_in_one_batch_the_last_counts(directory: Directory) -> None:
    a, b, c = KEYS[:3]
    news = [
        stored(a, slot=1), BlockRemoved(a, Tier.L2), stored(a, slot=3),
        stored(b), stored(b, tier=Tier.L4), BlockRemoved(b, Tier.L2),
        stored(c), BlockRemoved(c, Tier.L2), stored(c, length=0),
    ]  # fmt: skip
    directory.apply(batch(DMP, 1, *news), 0.0)
    reply = directory.locate(a + b + c, 0.0)
    seen = [
        [(r.tier, r.location.slot if r.location else 0) for r in some] for some in reply.replicas
    ]
    assert seen == [[(Tier.L2, 3)], [(Tier.L4, 1)]]


def test_a_full_directory_refuses_what_is_new_and_keeps_what_it_has() -> None:
    small = Directory(max_blocks=64)
    small.add_node(DMP)
    small.apply(batch(DMP, 1, *[stored(key) for key in KEYS[:60]]), 0.0)
    small.apply(batch(DMP, 2, *[stored(key) for key in KEYS[58:70]]), 0.0)
    assert dict(small.ledger.refused) == {"full": 7}
    assert prefix(small, *KEYS[:70]) == 63
    small.apply(batch(DMP, 3, *[BlockRemoved(key, Tier.L2) for key in KEYS[:10]]), 0.0)
    small.apply(batch(DMP, 4, *[stored(key) for key in KEYS[65:75]]), 0.0)
    assert prefix(small, *KEYS[65:75]) == 10
    small.check_invariants()


def test_an_unfinished_inventory_removes_nothing_and_the_next_one_does(
    directory: Directory,
) -> None:
    directory.apply(batch(DMP, 1, *[stored(key) for key in KEYS[:4]]), 0.0)
    first = replace(batch(DMP, 2, stored(KEYS[0])), inventory=True, more=True)
    directory.apply(first, 0.0)
    directory.apply(batch(DMP, 3, stored(KEYS[4])), 0.0)  # No part: the inventory is given up.
    assert prefix(directory, *KEYS[:5]) == 5
    directory.apply(replace(batch(DMP, 4, stored(KEYS[1])), inventory=True), 0.0)
    assert [prefix(directory, key) for key in KEYS[:5]] == [0, 1, 0, 0, 0]


def test_replicas_are_spread_so_that_no_node_is_everybodys_first(directory: Directory) -> None:
    keys = KEYS[:200]
    for node in (DMP, FAR):
        directory.apply(batch(node, 1, *[stored(key, node) for key in keys]), 0.0)
    chain = b"".join(keys)
    first = [some[0].node for some in directory.locate(chain, 0.0).replicas]
    assert 60 < first.count(DMP.node_id) < 140
    assert first == [some[0].node for some in directory.locate(chain, 0.0).replicas]
    near = directory.locate(chain, 0.0, reader=FAR.host, max_replicas=1)
    assert {some[0].node for some in near.replicas} == {FAR.node_id}


def test_copies_of_the_readers_zone_come_before_others_wherever_they_rest() -> None:
    def node(name: str, zone: str, role: NodeRole = NodeRole.DMP) -> NodeInfo:
        return NodeInfo(NodeId(name), Incarnation(7), role, HostId(f"h-{name}"), ZoneId(zone))

    far, near, unzoned = node("far", "b"), node("near", "a"), node("unzoned", "")
    reader = node("reader", "a", NodeRole.COMPUTE)
    core = Directory(max_blocks=1_024)
    for info in (far, near, unzoned, reader):
        core.add_node(info)
    keys = KEYS[:20]
    core.apply(batch(far, 1, *[stored(key, far) for key in keys]), 0.0)
    core.apply(batch(unzoned, 1, *[stored(key, unzoned) for key in keys]), 0.0)
    core.apply(batch(near, 1, *[stored(key, near, Tier.L4) for key in keys]), 0.0)
    chain = b"".join(keys)

    def first(host: HostId | None) -> set[NodeId]:
        return {some[0].node for some in core.locate(chain, 0.0, reader=host).replicas}

    assert first(reader.host) == {near.node_id}
    assert first(far.host) == {far.node_id}
    assert first(None) == {far.node_id, unzoned.node_id}  # Memory, from anywhere.
    for info in (near, far):
        core.drop_node(info.node_id)
    assert first(reader.host) == {unzoned.node_id}
    core.check_invariants()


def test_heat_is_uses_per_hour_and_fades(directory: Directory) -> None:
    directory.apply(batch(DMP, 1, stored(KEYS[0])), 0.0)
    for minute in range(60 * 24):
        directory.use(KEYS[0], 60.0 * minute)
    (record,) = directory.list_blocks(1, 60.0 * 60 * 24).blocks
    assert record.hits == 60 * 24
    assert record.heat == pytest.approx(60, rel=0.02)
    (later,) = directory.list_blocks(1, 60.0 * 60 * 24 + HEAT_FADES_S).blocks
    assert later.heat == pytest.approx(record.heat / np.e, rel=0.01)


def test_a_block_keeps_the_names_it_was_first_known_by(directory: Directory) -> None:
    plain = stored(KEYS[0])

    def of(session: str, tier: Tier = Tier.L2) -> BlockStored:
        block = replace(plain.block, owner=Owner("m", "t", session))
        return replace(plain, block=block, tier=tier)

    directory.apply(batch(DMP, 1, plain), 0.0)
    directory.apply(batch(DMP, 2, of("s1"), of("s2", Tier.L4)), 0.0)
    directory.apply(batch(DMP, 3, of("s3")), 0.0)
    listed = {(b.tier, b.block.owner) for b in directory.list_blocks(9, 0.0).blocks}
    assert listed == {("L2", Owner("m", "t", "s1")), ("L4", Owner("m", "t", "s1"))}


def test_names_nobody_has_any_more_make_room() -> None:
    names = Names(limit=4)
    assert names.numbers(["a", "b", ""], list).tolist() == [1, 2, 0]
    assert names.numbers(["c", "d"], lambda: [2]).tolist() == [1, 3]
    assert [names[n] for n in (0, 1, 2, 3)] == ["", "c", "b", "d"]
    assert names.numbers(["e"], lambda: [1, 2, 3]).tolist() == [0], "full: no name"
    assert names.numbers(["b"], lambda: [1, 2, 3]).tolist() == [2]


def test_a_table_full_of_used_names_is_not_searched_for_each_batch() -> None:
    names = Names(limit=1 << 16)
    sweeps = 0

    def all_in_use() -> range:
        nonlocal sweeps
        sweeps += 1
        return range(1 << 16)

    names.numbers([f"n{n}" for n in range((1 << 16) - 1)], all_in_use)
    known = names.numbers(["n7", ""], all_in_use).tolist()
    for n in range(500):
        numbers = names.numbers(["n7", "", f"late{n}", f"later{n}"], all_in_use)
        assert numbers.tolist() == [*known, 0, 0]
    assert sweeps <= 1


@pytest.mark.parametrize("numbers", [[], [3], [2, 2, 2], [5, 1, 5, 0, 1]])
def test_distinct_numbers_come_once_in_order(numbers: list[int]) -> None:
    found = distinct(np.array(numbers, np.uint32))
    assert found.tolist() == sorted(set(numbers)) and found.dtype == np.uint32
