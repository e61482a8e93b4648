"""tierkv.dmp.client.pool.Pool over real nodes: values, ranges, pins, several nodes, failures,
asyncio.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.fix_cluster import free_port, wait_for
from tests.fix_dmp import Rig, blob
from tests.fix_tls import Certificates
from tierkv.dmp.client import pins as pool_pins
from tierkv.dmp.client.async_pool import AsyncPool
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.ring import rank_nodes
from tierkv.dmp.client.values import to_block_key
from tierkv.kvcore import limits
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import AuthenticationError, ConfigError, NoNodeError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvwire.credentials import TlsFiles

pytestmark = pytest.mark.integration

KIB = 1 << 10
PATHS = ("shm", "tcp")
MakeRig = Callable[..., Rig]


@pytest.fixture(params=PATHS)
def pool(request: pytest.FixtureRequest, make_node: MakeRig) -> Iterator[Pool]:
    with Pool.connect(make_node().server.address, transport=request.param) as pool:
        assert pool.stats().members[0].path.transport == request.param
        yield pool


# Values


def test_what_was_put_can_be_read(pool: Pool) -> None:
    assert pool.get("a") is None
    assert pool.put("a", blob(100_000))
    assert pool.get("a") == blob(100_000)
    assert pool.get(b"a") == blob(100_000)
    assert pool.exists("a")
    assert not pool.exists("b")


def test_a_key_keeps_its_first_value(pool: Pool) -> None:
    assert pool.put("a", b"first")
    assert pool.put("a", b"other")
    assert pool.get("a") == b"first"


def test_batches_answer_in_order(pool: Pool) -> None:
    items = {f"k{i}": blob(1000 + i, i) for i in range(12)}
    assert pool.put_many(items) == [True] * 12
    keys = ["k3", "none", "k0", "k3"]
    assert pool.get_many(keys) == [items["k3"], None, items["k0"], items["k3"]]
    assert pool.exists_many(keys) == [True, False, True, True]
    assert pool.put_many([("k0", b"other"), ("new", b"1"), ("new", b"2")]) == [True, True, True]
    assert pool.get_many(["k0", "new"]) == [items["k0"], b"1"]


def test_values_of_all_sizes_in_one_batch(pool: Pool) -> None:
    sizes = [1, 7, 4096, 65_536, 130_000]
    assert all(pool.put_many([(f"s{n}", blob(n, n)) for n in sizes]))
    assert pool.get_many([f"s{n}" for n in sizes]) == [blob(n, n) for n in sizes]


def test_get_into_fills_the_callers_memory(pool: Pool) -> None:
    pool.put("a", blob(5000))
    buffer = bytearray(6000)
    assert pool.get_into("a", buffer) == 5000
    assert buffer[:5000] == blob(5000)
    assert pool.get_into("none", buffer) is None
    with pytest.raises(ValueError, match="a buffer of 10"):
        pool.get_into("a", bytearray(10))
    with pytest.raises(ValueError, match="writable"):
        pool.get_into("a", memoryview(b"x" * 6000))


def test_get_many_into_fills_each_buffer_or_says_none(pool: Pool) -> None:
    pool.put_many([("a", blob(5000, 1)), ("b", blob(130_000, 2))])
    buffers = [bytearray(6000), bytearray(10), bytearray(130_000)]
    asked = list(zip(["a", "none", "b"], buffers, strict=True))
    assert pool.get_many_into(asked) == [5000, None, 130_000]
    assert (buffers[0][:5000], buffers[2]) == (blob(5000, 1), blob(130_000, 2))
    with pytest.raises(ValueError, match="twice"):
        pool.get_many_into([("a", buffers[0]), ("a", buffers[2])])


def test_ranges_are_read_alone(pool: Pool) -> None:
    data = blob(8 * KIB)
    pool.put("a", data, range_bytes=KIB)
    assert pool.get("a") == data
    assert pool.get_ranges("a", [7, 0]) == [data[7 * KIB :], data[:KIB]]
    assert pool.get_span("a", KIB - 3, 6) == data[KIB - 3 : KIB + 3]
    assert pool.get_span("a", 0, 8 * KIB) == data
    assert pool.get_ranges("none", [0]) is None
    assert pool.get_span("none", 0, 1) is None
    with pytest.raises(ValueError, match="8 ranges"):
        pool.get_ranges("a", [8])
    with pytest.raises(ValueError, match="outside a value of 8192"):
        pool.get_span("a", 8 * KIB - 1, 2)


def test_view_lends_a_value(pool: Pool) -> None:
    data = blob(8 * KIB)
    pool.put("a", data, range_bytes=KIB)
    with pool.view("a") as view:
        assert view.readonly
        assert view == data
    with pytest.raises(KeyError, match="none"), pool.view("none"):
        pass


def test_a_viewed_value_is_not_evicted(pool: Pool) -> None:
    pool.put("a", blob(100_000))
    with pool.view("a") as view:
        crowd_out(pool)
        assert view == blob(100_000)
        assert pool.exists("a")
    crowd_out(pool, "more")
    assert not pool.exists("a")


def test_bad_arguments_name_the_limit(pool: Pool) -> None:
    for bad in ("", b"", bytes(16)):
        with pytest.raises(ValueError, match="a key must not be"):
            pool.put(bad, b"x")
    with pytest.raises(ValueError, match="MAX_SLOT_BYTES"):
        pool.put("a", b"")
    with pytest.raises(ValueError, match="MAX_LAYERS"):
        pool.put("a", bytes(limits.MAX_LAYERS + 1), range_bytes=1)
    with pytest.raises(ValueError, match="whole number of ranges"):
        pool.put("a", b"abc", range_bytes=2)
    with pytest.raises(ValueError, match="contiguous"):
        pool.put("a", memoryview(b"abcdef")[::2])


def test_sixteen_bytes_are_a_block_key(pool: Pool) -> None:
    key = to_block_key("a name")
    assert key != to_block_key("another name")
    pool.put("a name", b"x")
    assert pool.get(key) == b"x"


def test_threads_share_a_pool(pool: Pool) -> None:
    wrong: list[str] = []

    def work(worker: int) -> None:
        for i in range(20):
            name, data = f"t{worker}-{i % 3}", blob(3000, worker)
            pool.put(name, data)
            if pool.get(name) not in (None, data):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Room


def crowd_out(pool: Pool, name: str = "x", size: int = 100_000) -> int:
    """Put more than the node holds; how many were taken."""
    return sum(pool.put(f"{name}{i}", blob(size, i)) for i in range(30))


def test_a_pinned_value_outlives_eviction(pool: Pool) -> None:
    assert not pool.pin("a")
    pool.put("a", blob(100_000))
    assert pool.pin("a") and pool.pin("a")
    assert pool.stats().pinned == 1
    crowd_out(pool)
    pool.unpin("a")
    crowd_out(pool, "y")
    assert pool.get("a") == blob(100_000)
    pool.unpin("a")
    crowd_out(pool, "z")
    assert pool.get("a") is None
    with pytest.raises(KeyError, match="a"):
        pool.unpin("a")


def test_a_remembered_place_that_was_reused_is_a_miss(pool: Pool) -> None:
    pool.put("a", blob(100_000))
    assert pool.get("a") == blob(100_000)
    crowd_out(pool)
    assert pool.get("a") is None
    pool.put("a", blob(90_000, 1))
    assert pool.get("a") == blob(90_000, 1)


def test_a_stale_place_does_not_spoil_a_batch(pool: Pool) -> None:
    pool.put("old", blob(100_000))
    pool.get("old")
    crowd_out(pool)
    pool.put("new", blob(100_000, 1))
    assert pool.get_many(["old", "new"]) == [None, blob(100_000, 1)]


def test_a_full_node_refuses(pool: Pool) -> None:
    taken = [f"p{i}" for i in range(30) if pool.put(f"p{i}", blob(100_000)) and pool.pin(f"p{i}")]
    assert 0 < len(taken) < 30
    assert not pool.put("late", blob(100_000))
    assert pool.stats().refused == 31 - len(taken)
    pool.unpin(taken[0])
    assert pool.put("late", blob(100_000))


def test_pins_are_renewed_while_their_client_lives(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierkv.kvcore.clock import ManualClock

    clock = ManualClock()
    rig = make_rig(
        clock=clock, eviction_policy="leaf_lru"
    )  # The crowd goes through all that may go.
    with Pool.connect(rig.server.address) as pool:
        pool.put("a", blob(100_000))
        pool.pin("a")
        for _ in range(6):
            clock.advance(pool_pins.HOLD_S / 2)
            pool._pins.renew()
            rig.node.tick()
        crowd_out(pool)
        assert pool.exists("a")
        clock.advance(pool_pins.HOLD_S + 1)
        crowd_out(pool, "y")
        assert not pool.exists("a")
        pool._pins.renew()
        assert (pool.stats().pinned, pool.stats().pins_lost) == (0, 1)


def test_a_pin_whose_connections_were_lost_is_held_again(make_node: MakeRig) -> None:
    rig = make_node()
    with Pool.connect(rig.server.address) as pool:
        assert pool.put("a", blob(10_000)) and pool.pin("a") and pool.pin("a")
        (slot,) = rig.node._state.table.store.sealed()
        pool._pins.renew()
        (owner,) = slot.holders
        rig.node.puts.release_owner(owner)  # As when the client's last connection breaks.
        pool._pins.renew()
        assert slot.holders
        pool.unpin("a")
        assert slot.holders
        pool.unpin("a")
        assert not slot.holders


def test_close_lets_pinned_values_go(make_node: MakeRig) -> None:
    rig = make_node()
    with Pool.connect(rig.server.address) as pool:
        pool.put("a", blob(100_000))
        pool.pin("a")
    with pytest.raises(ValueError, match="closed"):
        pool.get("a")
    with Pool.connect(rig.server.address) as other:
        crowd_out(other)
        assert not other.exists("a")


# Several nodes


@pytest.fixture
def two(make_node: MakeRig) -> list[Rig]:
    return [make_node("dmp-a"), make_node("dmp-b")]


def connect_all(rigs: list[Rig], **options: object) -> Pool:
    return Pool.connect([rig.server.address for rig in rigs], **options)  # type: ignore[arg-type]


def test_keys_spread_over_the_nodes_by_rendezvous(two: list[Rig]) -> None:
    nodes = [(NodeId("dmp-a"), 1.0), (NodeId("dmp-b"), 1.0)]
    with connect_all(two) as pool, connect_all(two[::-1]) as other:
        assert pool.put_many([(f"k{i}", blob(500, i)) for i in range(16)]) == [True] * 16
        assert other.get_many([f"k{i}" for i in range(16)]) == [blob(500, i) for i in range(16)]
        for rig in two:
            mine = [
                key
                for key in (to_block_key(f"k{i}") for i in range(16))
                if rank_nodes(key, nodes)[0] == rig.node.node_id
            ]
            assert 0 < len(mine) < 16
            assert {event.key for event in rig.node.reports.inventory()} == set(mine)


def test_the_second_node_takes_what_the_first_has_no_room_for(two: list[Rig]) -> None:
    with connect_all(two) as pool:
        stored = [
            f"p{i}" for i in range(30) if pool.put(f"p{i}", blob(100_000)) and pool.pin(f"p{i}")
        ]
        used = [member.stats.memory.blocks_used for member in pool.stats().members if member.stats]
        assert sum(used) == len(stored)
        assert all(pool.exists_many(stored))
        assert used[0] == used[1]  # Both are full, whatever the ranking of the keys.


def test_a_dead_node_is_a_miss_and_is_used_again_when_it_is_back(two: list[Rig]) -> None:
    config = two[1].node.config
    with connect_all(two) as pool:
        keys = [f"k{i}" for i in range(16)]
        pool.put_many([(key, blob(500)) for key in keys])
        port = int(two[1].server.address.rpartition(":")[2])
        two[1].stop()
        got = pool.get_many(keys)
        assert 0 < got.count(None) < 16
        assert all(pool.put_many([(key, blob(500)) for key in keys]))
        assert pool.get_many(keys) == [blob(500)] * 16
        down = pool.stats().members[1]
        assert (down.up, down.stats) == (False, None)
        assert dict(down.errors)["transport_error"] > 0
        two[1].__init__(replace(config, port=port), SystemClock())  # type: ignore[misc]
        wait_for(lambda: pool.stats().members[1].up, what="the node is used again")
        assert pool.get_many(keys) == [blob(500)] * 16


def test_a_node_that_was_down_at_connect_joins_later(make_node: MakeRig) -> None:
    here, port = make_node("dmp-a"), free_port()
    with Pool.connect(f"{here.server.address},127.0.0.1:{port}") as pool:
        assert [member.up for member in pool.stats().members] == [True, False]
        make_node("dmp-b", port=port)
        wait_for(lambda: pool.stats().members[1].up, what="the node joins")
        assert pool.stats().members[1].node_id == "dmp-b"


def test_the_only_node_gone_is_a_miss(make_node: MakeRig) -> None:
    rig = make_node()
    with Pool.connect(rig.server.address, transport="tcp") as pool:
        pool.put("a", b"x")
        rig.stop()
        assert pool.get("a") is None
        assert not pool.put("b", b"x")
        assert not pool.exists("a")
        assert not pool.pin("a")
        assert pool.stats().misses == 1
        with pytest.raises(KeyError), pool.view("a"):
            pass


# Connecting


def test_the_same_host_is_found_by_mapping_whatever_it_is_called(make_node: MakeRig) -> None:
    rig = make_node(host=HostId("some-container"))
    with Pool.connect(rig.server.address) as pool:
        path = pool.stats().members[0].path
        assert (path.transport, path.reason) == ("shm", "same host")


def test_a_segment_of_another_node_is_not_taken_for_its_own(make_node: MakeRig) -> None:
    rig = make_node()
    decoy = make_node("decoy")
    config = replace(rig.node.config, segment_path=str(decoy.node.config.segment_file))
    rig.node.config = config  # As if the same path were another file on another host.
    with Pool.connect(rig.server.address) as pool:
        path = pool.stats().members[0].path
        assert path.transport == "tcp"
        assert "another host" in path.reason
        pool.put("a", b"x")
        assert pool.get("a") == b"x"


def test_a_segment_that_is_not_there_means_tcp(make_node: MakeRig) -> None:
    rig = make_node(nameless=True)
    with Pool.connect(rig.server.address) as pool:
        path = pool.stats().members[0].path
        assert path.transport == "tcp"
        assert "can't be opened" in path.reason


def test_a_wrong_token_is_an_error_at_connect(make_node: MakeRig) -> None:
    rig = make_node(token="right")
    with pytest.raises(AuthenticationError, match="another cluster token"):
        Pool.connect(rig.server.address, token="wrong")
    with Pool.connect(rig.server.address, token="right") as pool:
        assert pool.put("a", b"x")


def test_tls_is_spoken_where_asked_for(
    make_node: MakeRig, get_certificates: Callable[[], Certificates]
) -> None:
    files = get_certificates()
    address = make_node(tls=files.strict_server).server.address
    for transport in PATHS:
        with Pool.connect(address, transport=transport, tls=files.client) as pool:
            assert pool.put("a", blob(100_000), range_bytes=25_000)
            assert pool.get("a") == blob(100_000)
    for stranger in (files.anonymous, files.deceived, None):
        with pytest.raises(NoNodeError, match=address):
            Pool.connect(address, tls=stranger)
    with pytest.raises(ConfigError, match="can't be used"):
        Pool.connect(address, tls=TlsFiles(ca="/no/such/file"))


@pytest.mark.parametrize("address", ["", "host", ":1", "host:port", "host:0", "host:65536", []])
def test_a_malformed_address_is_an_error(address: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="pool address"):
        Pool.connect(address)


def test_no_node_is_an_error_that_says_why() -> None:
    with pytest.raises(NoNodeError, match="refused") as caught:
        Pool.connect(f"127.0.0.1:{free_port()}")
    assert "tierkv serve dmp" in caught.value.hint


def test_an_unknown_transport_is_an_error() -> None:
    with pytest.raises(ConfigError, match="auto, shm, rdma, tcp"):
        Pool.connect("127.0.0.1:1", transport="pigeon")


# asyncio


async def test_the_same_verbs_as_coroutines(make_node: MakeRig) -> None:
    rig = make_node()
    async with await AsyncPool.connect(rig.server.address) as pool:
        data = blob(8 * KIB)
        assert await pool.put("a", data, range_bytes=KIB)
        assert await pool.put_many({"b": b"1", "c": b"2"}) == [True, True]
        assert await asyncio.gather(*(pool.get(key) for key in "abcd")) == [data, b"1", b"2", None]
        assert await pool.get_many(["c", "b"]) == [b"2", b"1"]
        assert await pool.get_ranges("a", [1]) == [data[KIB : 2 * KIB]]
        landed = memoryview(bytearray(KIB))
        assert await pool.get_ranges_into([("a", 7, landed)]) == [True]
        assert landed == data[7 * KIB :]
        assert await pool.get_span("a", 5, 3) == data[5:8]
        buffer = bytearray(8 * KIB)
        assert await pool.get_into("a", buffer) == 8 * KIB
        assert buffer == data
        assert await pool.exists("a")
        assert await pool.exists_many(["a", "z"]) == [True, False]
        assert await pool.pin("a")
        await pool.unpin("a")
        async with pool.view("a") as view:
            assert view == data
        assert (await pool.stats()).hits >= 7
    with pytest.raises(ValueError, match="closed"):
        await pool.get("a")


class Gate:
    """Stands between a call and its thread: opens when told, remembers who passed."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()

    def hold_up(self, call: Callable[..., object]) -> Callable[..., object]:
        def late(*args: object, **options: object) -> object:
            self.entered.set()
            assert self.open.wait(30)
            return call(*args, **options)

        return late


async def test_a_cancelled_get_into_ends_when_its_buffer_is_free(make_node: MakeRig) -> None:
    rig, gate = make_node(), Gate()
    async with await AsyncPool.connect(rig.server.address, threads=1) as pool:
        await pool.put("a", blob(1000))
        node = pool.pool._ring.links[0].opened
        node.read_ranges = gate.hold_up(node.read_ranges)  # type: ignore[method-assign,assignment]
        buffer = bytearray(1000)
        task = asyncio.create_task(pool.get_into("a", buffer))
        await asyncio.to_thread(gate.entered.wait)
        task.cancel()
        queued = asyncio.create_task(pool.get_into("a", bytearray(1000)))
        await asyncio.sleep(0)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued  # It never began, so it need not wait.
        assert not task.done()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bytes(buffer) == blob(1000)  # Whatever was to be written has been.


async def test_a_cancelled_get_ends_at_once(make_node: MakeRig) -> None:
    rig, gate = make_node(), Gate()
    async with await AsyncPool.connect(rig.server.address) as pool:
        await pool.put("a", blob(1000))
        node = pool.pool._ring.links[0].opened
        node.read_ranges = gate.hold_up(node.read_ranges)  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(pool.get("a"))
        await asyncio.to_thread(gate.entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not gate.open.is_set()
        gate.open.set()
        assert await pool.get("a") == blob(1000)


async def test_a_cancelled_pin_leaves_no_pin(make_node: MakeRig) -> None:
    rig, gate = make_node(), Gate()
    async with await AsyncPool.connect(rig.server.address) as pool:
        await pool.put("a", blob(1000))
        node = pool.pool._ring.links[0].opened
        node.hold = gate.hold_up(node.hold)  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(pool.pin("a"))
        await asyncio.to_thread(gate.entered.wait)
        task.cancel()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pool.stats()).pinned == 0


def test_nothing_of_this_process_is_left_behind() -> None:
    names = {thread.name for thread in threading.enumerate()}
    assert "pool-keeper" not in names, os.getpid()
