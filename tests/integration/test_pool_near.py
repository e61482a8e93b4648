"""Clients that say their host: blocks are put near, found from anywhere, and nothing else moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.fix_cluster import wait_for
from tests.fix_dmp import Rig, blob
from tests.fix_door import MakeDoor
from tierkv.dmp.client.node_link import NodeLink
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.ring import Ring, reach_nodes
from tierkv.dmp.client.values import PutNotes, to_block_key
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.select import PathOptions, Transport
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

pytestmark = pytest.mark.integration

KEYS = [f"k{i}" for i in range(16)]
SIZE = 500


@pytest.fixture
def hosts(make_node: Callable[..., Rig]) -> list[Rig]:
    """Three pool nodes, each on a host of its own."""
    return [make_node(f"dmp-{name}", host=HostId(name)) for name in "abc"]


def ring(rigs: list[Rig], host: str) -> Ring:
    peers = [Peer(NodeId(""), rig.server.address, "", 1.0, 5.0) for rig in rigs]
    return reach_nodes(peers, PathOptions(Transport.TCP), host=HostId(host))


def on(rigs: list[Rig], host: str) -> Pool:
    return Pool(ring(rigs, host), SystemClock())


def put_blocks(pool: Pool, keys: list[str]) -> None:
    items = [(key, blob(SIZE)) for key in keys]
    assert all(pool.put_many(items, notes=[PutNotes(tokens=16)] * len(items)))


def put_by_layers(pool: Pool, keys: list[str]) -> None:
    puts = pool.open_puts([(key, SIZE, SIZE) for key in keys])
    opened = [put for put in puts if put is not None]
    assert all(pool.write_ranges([(put, 0, blob(SIZE)) for put in opened]))
    assert pool.seal_puts(opened) == [True] * len(keys)


def held(rig: Rig) -> set[BlockKey]:
    return {event.key for event in rig.node.reports.inventory()}


@pytest.mark.parametrize("put", [put_blocks, put_by_layers])
def test_blocks_go_near_and_are_found_from_anywhere(
    hosts: list[Rig], put: Callable[[Pool, list[str]], None]
) -> None:
    with on(hosts, "b") as writer, on(hosts, "c") as neighbour, on(hosts, "") as anywhere:
        put(writer, KEYS)
        assert [len(held(rig)) for rig in hosts] == [0, 16, 0]
        for reader in (writer, neighbour, anywhere):
            assert reader.exists_many(KEYS) == [True] * 16
            assert reader.get_many(KEYS) == [blob(SIZE)] * 16
            assert reader.pin_many(KEYS) == [True] * 16


def test_what_was_put_by_rendezvous_is_found_from_every_host(hosts: list[Rig]) -> None:
    with on(hosts, "") as anywhere, on(hosts, "a") as reader, on(hosts, "nowhere") as stranger:
        put_blocks(anywhere, KEYS)
        assert all(held(rig) for rig in hosts)
        for pool in (reader, stranger):
            assert pool.get_many(KEYS) == [blob(SIZE)] * 16


def test_a_near_node_that_is_down_is_passed_over(hosts: list[Rig]) -> None:
    with on(hosts, "b") as pool:
        hosts[1].stop()
        put_blocks(pool, KEYS)
        assert held(hosts[0]) | held(hosts[2]) == {to_block_key(key) for key in KEYS}
        assert pool.get_many(KEYS) == [blob(SIZE)] * 16


def test_a_near_node_that_is_full_leaves_the_rest_to_others(hosts: list[Rig]) -> None:
    with on(hosts, "b") as pool:
        names = [f"big{i}" for i in range(12)]
        for name in names:
            assert pool.put_many([(name, blob(100_000))], notes=[PutNotes(tokens=16)]) == [True]
            assert pool.pin(name)
        assert held(hosts[1]) and held(hosts[0]) | held(hosts[2])
        assert pool.exists_many(names) == [True] * 12


def test_hosts_agree_on_the_first_value_of_what_is_no_block(hosts: list[Rig]) -> None:
    with on(hosts, "a") as one, on(hosts, "b") as other:
        for key in KEYS:
            assert one.put(key, b"first") and other.put(key, b"second")
        assert one.get_many(KEYS) == other.get_many(KEYS) == [b"first"] * 16


@pytest.mark.parametrize("host", ["", "b"])
def test_a_miss_asks_every_node_once(hosts: list[Rig], host: str) -> None:
    asked: Counter[tuple[NodeId, BlockKey]] = Counter()
    calls: list[NodeId] = []

    def miss(link: NodeLink, keys: list[BlockKey]) -> set[BlockKey]:
        asked.update((link.node_id, key) for key in keys)
        calls.append(link.node_id)
        return set()

    nodes = ring(hosts, host)
    try:
        nodes.seek([to_block_key(key) for key in KEYS], miss)
    finally:
        nodes.close()
    assert len(asked) == 3 * 16 and set(asked.values()) == {1}
    assert len(calls) <= 2 * len(hosts)
    assert not host or (calls[0] == "dmp-b" and len(calls) == 3)


def test_an_engine_keeps_its_blocks_on_its_host(hosts: list[Rig], make_door: MakeDoor) -> None:
    door = make_door({"pool": ",".join(rig.server.address for rig in hosts), "host": "c"})
    wait_for(lambda: door.up, what="the door is up")
    door.submit(lambda pool: put_by_layers(pool, KEYS), None, name="store").result(30)
    assert {to_block_key(key) for key in KEYS} <= held(hosts[2])
