"""Pool verbs for many ranges at once: open puts, scattered reads, pins; over shm and tcp."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tests.fix_cluster import wait_for
from tests.fix_dmp import Rig, blob
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.values import PutNotes, to_block_key
from tierkv.dmp.client.writes import OpenPut
from tierkv.kvcore.block import Expectation, Outlook, Owner
from tierkv.kvcore.clock import ManualClock, SystemClock

pytestmark = pytest.mark.integration

MakeRig = Callable[..., Rig]
RANGE = 4_000
SIZE = 3 * RANGE


@pytest.fixture
def rig(make_node: MakeRig) -> Rig:
    return make_node()


@pytest.fixture(params=("shm", "tcp"))
def pool(request: pytest.FixtureRequest, rig: Rig) -> Iterator[Pool]:
    with Pool.connect(rig.server.address, transport=request.param) as pool:
        assert pool.stats().members[0].path.transport == request.param
        yield pool


def parts(seed: int = 0) -> list[bytes]:
    data = blob(SIZE, seed)
    return [data[i * RANGE : (i + 1) * RANGE] for i in range(3)]


def opened(pool: Pool, *names: str, **options: float) -> list[OpenPut]:
    puts = pool.open_puts([(name, SIZE, RANGE) for name in names], **options)  # type: ignore[arg-type]
    return [put for put in puts if put is not None]


def fill(pool: Pool, puts: Sequence[OpenPut], seed: int = 0) -> list[bool]:
    return pool.write_ranges([(put, i, part) for put in puts for i, part in enumerate(parts(seed))])


def writing(rig: Rig) -> int:
    return rig.node.reports.stats().slots_writing


# Writing


def test_an_open_put_is_seen_when_it_is_sealed(pool: Pool, rig: Rig) -> None:
    a, b = opened(pool, "a", "b")
    assert (a.key, a.size_bytes, pool.stats().open_puts) == (to_block_key("a"), SIZE, 2)
    assert fill(pool, [a, b]) == [True] * 6
    assert pool.exists_many(["a", "b"]) == [False, False]
    assert pool.seal_puts([a, b]) == [True, True]
    assert pool.get_many(["a", "b"]) == [blob(SIZE), blob(SIZE)]
    assert (writing(rig), pool.stats().open_puts, pool.stats().stored) == (0, 0, 2)


def test_ranges_are_written_in_any_order_by_any_thread(pool: Pool) -> None:
    puts = opened(pool, "a", "b", "c")
    threads = [
        threading.Thread(target=lambda i=i: [put.write(i, parts()[i]) for put in puts])
        for i in (2, 0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.seal_puts(puts) == [True] * 3
    assert pool.get_many("abc") == [blob(SIZE)] * 3


def test_there_is_nothing_to_open_where_a_value_is_stored_or_being_written(pool: Pool) -> None:
    pool.put("there", b"x")
    items = [("there", SIZE, RANGE), ("new", SIZE, RANGE), ("new", SIZE, RANGE)]
    there, new, again = pool.open_puts(items)
    assert there is None and again is None and new is not None
    assert pool.open_puts([("new", SIZE, RANGE)]) == [None]
    assert pool.get("there") == b"x"


def test_what_is_not_wholly_written_is_given_up(pool: Pool, rig: Rig) -> None:
    whole, part = opened(pool, "whole", "part")
    fill(pool, [whole])
    assert part.write(0, parts()[0])
    assert pool.seal_puts([part, whole, part]) == [False, True, False]
    assert (pool.get("part"), pool.get("whole")) == (None, blob(SIZE))
    assert writing(rig) == 0
    assert opened(pool, "part")


def test_a_put_ends_once(pool: Pool, rig: Rig) -> None:
    sealed, dropped = opened(pool, "sealed", "dropped")
    fill(pool, [sealed, dropped])
    assert pool.seal_puts([sealed]) == [True]
    pool.abort_puts([sealed, dropped, dropped])
    assert pool.seal_puts([sealed, dropped]) == [False, False]
    assert not sealed.write(0, parts()[0])
    assert pool.get_many(["sealed", "dropped"]) == [blob(SIZE), None]
    assert writing(rig) == 0


def test_closing_gives_open_puts_up(make_node: MakeRig) -> None:
    rig = make_node()
    with Pool.connect(rig.server.address) as pool:
        (put,) = opened(pool, "a")
        assert writing(rig) == 1
    assert writing(rig) == 0
    assert not put.write(0, parts()[0])
    with pytest.raises(ValueError, match="closed"):
        pool.seal_puts([put])


def test_a_put_past_its_deadline_is_lost_and_spoils_no_other(make_rig: MakeRig) -> None:
    clock = ManualClock()
    rig = make_rig(clock=clock)
    with Pool.connect(rig.server.address) as pool:
        (late,) = opened(pool, "late", deadline_s=5.0)
        (fresh,) = opened(pool, "fresh", deadline_s=60.0)
        clock.advance(10.0)
        rig.node.tick()
        assert fill(pool, [late, fresh]) == [False] * 3 + [True] * 3
        assert pool.seal_puts([late, fresh]) == [False, True]
        assert pool.get_many(["late", "fresh"]) == [None, blob(SIZE)]


def test_forgotten_puts_are_not_kept(make_node: MakeRig) -> None:
    with Pool.connect(make_node().server.address) as pool:
        opened(pool, "a", deadline_s=0.01)
        wait_for(lambda: pool.stats().open_puts == 0, what="the keeper forgets them")


def test_a_full_node_opens_nothing_and_says_so(pool: Pool) -> None:
    taken = [f"p{i}" for i in range(30) if pool.put(f"p{i}", blob(100_000)) and pool.pin(f"p{i}")]
    before = pool.stats().refused
    assert pool.open_puts([("late", 100_000, 50_000)]) == [None]
    assert pool.stats().refused == before + 1
    assert pool.unpin_many(taken) == [True] * len(taken)
    (late,) = pool.open_puts([("late", 100_000, 50_000)])
    assert late is not None


def test_what_is_known_of_a_value_travels_with_it(pool: Pool, rig: Rig) -> None:
    parent = to_block_key("parent")
    note = PutNotes(
        parent=parent,
        tokens=64,
        owner=Owner("m", "t", "s"),
        outlook=Outlook(expectation=Expectation.TURN, expected_in_s=1.5, depth=3, tail=True),
    )
    (put,) = pool.open_puts([("opened", SIZE, RANGE)], notes=[note])
    assert put is not None and fill(pool, [put]) == [True] * 3
    assert pool.seal_puts([put]) == [True]
    assert pool.put_many([("whole", blob(SIZE))], range_bytes=RANGE, notes=[note]) == [True]
    for name in ("opened", "whole"):
        slot = rig.node._state.table.store.peek(to_block_key(name))
        assert slot is not None
        stored = slot.block
        assert (stored.parent, stored.tokens) == (parent, 64)
        assert stored.owner == Owner("m", "t", "s")
        assert stored.outlook == note.outlook
        assert stored.ranges.count == 3
    with pytest.raises(ValueError, match="1 notes for 2 values"):
        pool.open_puts([("a", 1, 1), ("b", 1, 1)], notes=[note])


def test_bad_ranges_are_refused_before_anything_is_written(pool: Pool) -> None:
    (put,) = opened(pool, "a")
    for index, data in ((3, parts()[0]), (-1, parts()[0]), (0, b"short"), (0, b"")):
        with pytest.raises(ValueError, match="3 ranges of 4000"):
            put.write(index, data)
    for size, part in ((0, 1), (10, 3), (1000, 1)):
        with pytest.raises(ValueError, match=r"MAX_SLOT_BYTES|whole number|MAX_LAYERS"):
            pool.open_puts([("b", size, part)])
    assert fill(pool, [put]) == [True] * 3


# Reading


def test_ranges_of_several_values_land_where_they_are_wanted(pool: Pool) -> None:
    pool.put_many([("a", blob(SIZE, 1)), ("b", blob(SIZE, 2))], range_bytes=RANGE)
    memory = bytearray(5 * RANGE)
    places = [memoryview(memory)[i * RANGE : (i + 1) * RANGE] for i in range(5)]
    asked = [("a", 2), ("b", 0), ("none", 0), ("a", 0), ("b", 2)]
    reads = [(key, index, place) for (key, index), place in zip(asked, places, strict=True)]
    assert pool.get_ranges_into(reads) == [True, True, False, True, True]
    a, b = parts(1), parts(2)
    assert [bytes(p) for p in places] == [a[2], b[0], bytes(RANGE), a[0], b[2]]
    assert (pool.stats().hits, pool.stats().misses) == (2, 1)


def test_a_value_of_another_shape_is_no_answer_and_is_counted(pool: Pool) -> None:
    pool.put_many([("right", blob(SIZE)), ("wrong", blob(SIZE))], range_bytes=RANGE)
    pool.put("other", blob(SIZE), range_bytes=RANGE // 2)
    views = [memoryview(bytearray(RANGE)) for _ in range(4)]
    reads = [("right", 1), ("other", 1), ("wrong", 3), ("wrong", 0)]
    got = pool.get_ranges_into([(*read, view) for read, view in zip(reads, views, strict=True)])
    assert got == [True, False, False, True]
    assert (bytes(views[0]), bytes(views[3])) == (parts()[1], parts()[0])
    assert pool.stats().misfits == 2
    with pytest.raises(ValueError, match="writable"):
        pool.get_ranges_into([("right", 0, memoryview(bytes(RANGE)))])


def test_bad_bytes_are_no_answer_and_spoil_no_other(pool: Pool, rig: Rig) -> None:
    pool.put_many([("bad", blob(SIZE)), ("good", blob(SIZE))], range_bytes=RANGE)
    slot = rig.node._state.table.store.peek(to_block_key("bad"))
    assert slot is not None
    with rig.node._state.lock:
        rig.node.segment.span(slot.offset, RANGE, RANGE + 1)[0] ^= 0xFF
    buffers = [memoryview(bytearray(RANGE)) for _ in range(2)]
    assert pool.get_ranges_into([("bad", 1, buffers[0]), ("good", 1, buffers[1])]) == [False, True]
    assert bytes(buffers[1]) == parts()[1]


# Pinning


def test_many_pins_are_kept_and_let_go(pool: Pool) -> None:
    pool.put_many([("a", blob(50_000)), ("b", blob(50_000))])
    assert pool.pin_many(["a", "none", "b", "a"]) == [True, False, True, True]
    crowd_out(pool, "x")
    assert pool.unpin_many(["a", "none"]) == [True, False]
    crowd_out(pool, "y")
    assert pool.exists_many(["a", "b"]) == [True, True]
    assert pool.unpin_many(["a", "b"]) == [True, True]
    crowd_out(pool, "z")
    assert pool.exists_many(["a", "b"]) == [False, False]
    assert pool.stats().pinned == 0


def test_many_pins_take_one_question_each_way(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.put_many([(f"k{i}", blob(2_000)) for i in range(8)])
    keys = [f"k{i}" for i in range(8)]
    assert all(pool.exists_many(keys))  # Now their places are known.
    link = pool._ring.links[0].opened
    asked: list[str] = []
    ask = link._ask

    def counted(kind, head, **options):
        asked.append(kind.name)
        return ask(kind, head, **options)

    monkeypatch.setattr(link, "_ask", counted)
    pool.pin_many(keys)
    pool.pin_many(keys)
    pool.unpin_many(keys)
    assert asked == ["HOLD"]
    pool.unpin_many(keys)
    assert asked == ["HOLD", "RELEASE"]
    puts = opened(pool, "x", "y", "z")
    fill(pool, puts)
    pool.seal_puts(puts)
    assert [name for name in asked if name in ("RESERVE", "SEAL")] == ["RESERVE", "SEAL"]


def crowd_out(pool: Pool, name: str) -> None:
    for i in range(30):
        pool.put(f"{name}{i}", blob(100_000, i))


# A node that goes away


@pytest.fixture
def two(make_node: MakeRig) -> list[Rig]:
    return [make_node("dmp-a"), make_node("dmp-b")]


@pytest.fixture(params=("shm", "tcp"))
def both(request: pytest.FixtureRequest, two: list[Rig]) -> Iterator[Pool]:
    addresses = [rig.server.address for rig in two]
    with Pool.connect(addresses, transport=request.param) as pool:
        yield pool


def test_open_puts_spread_over_the_nodes(both: Pool, two: list[Rig]) -> None:
    names = [f"k{i}" for i in range(12)]
    puts = opened(both, *names)
    assert fill(both, puts) == [True] * 36
    assert both.seal_puts(puts) == [True] * 12
    assert all(0 < len(rig.node.reports.inventory()) < 12 for rig in two)
    buffers = [memoryview(bytearray(RANGE)) for _ in names]
    reads = [(name, 2, buffer) for name, buffer in zip(names, buffers, strict=True)]
    assert both.get_ranges_into(reads) == [True] * 12
    assert {bytes(buffer) for buffer in buffers} == {parts()[2]}


def test_a_node_that_dies_takes_its_puts_with_it(both: Pool, two: list[Rig]) -> None:
    names = [f"k{i}" for i in range(12)]
    puts = opened(both, *names)
    assert fill(both, puts[:6]) == [True] * 18
    on_dead = [put.link.peer.address == two[1].server.address for put in puts]
    two[1].stop()
    assert 0 < sum(on_dead) < 12
    fill(both, puts[6:])
    assert both.seal_puts(puts) == [not dead for dead in on_dead]
    buffers = [(name, 0, memoryview(bytearray(RANGE))) for name in names]
    assert both.get_ranges_into(buffers) == [not dead for dead in on_dead]
    assert both.pin_many(names) == [not dead for dead in on_dead]
    assert all(opened(both, *[f"new{i}" for i in range(6)]))


def test_a_restarted_node_knows_no_open_put(rig: Rig) -> None:
    with Pool.connect(rig.server.address) as pool:
        lost, kept = opened(pool, "lost", "kept")
        fill(pool, [lost, kept])
        pool.seal_puts([kept])
        config, port = rig.node.config, int(rig.server.address.rpartition(":")[2])
        rig.stop()
        rig.__init__(replace(config, port=port), SystemClock())  # type: ignore[misc]
        assert pool.seal_puts([lost]) == [False]
        wait_for(lambda: pool.exists("kept"), what="the node is used again")
        assert pool.get("lost") is None
