"""The numbered sentences of tierkv.storage.block_store.BlockStore, for every store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import obstore
import pytest

from tests.fix_dmp import block_key, make_range
from tests.fix_s3 import S3Server
from tests.memory_store import MemoryBlockStore
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Outlook, Owner, RangeShape
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError, PoolFullError, TransportError
from tierkv.storage.archive import ObjectArchive, _path
from tierkv.storage.block_store import BlockStore
from tierkv.storage.disk.segment_store import SegmentStore

SIZE = 5_000
CAPACITY = 10 * 3 * SIZE


def make_segments(folder: Path) -> SegmentStore:
    """Three files of four blocks each, one file spare."""
    size = 4096 * (1 + 4 * 5)
    return SegmentStore(folder, capacity_bytes=3 * size, segment_bytes=size)


@pytest.fixture(params=["memory", "segments", "archive-memory", "archive-folder", "archive-s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    made = make_store(request, tmp_path)
    yield made
    if isinstance(made, SegmentStore):
        made.check_invariants()
    made.close()


def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStore:
    match request.param:
        case "memory":
            return MemoryBlockStore(capacity_bytes=CAPACITY)
        case "segments":
            return make_segments(tmp_path / "l4")
        case "archive-memory":
            return ObjectArchive.open("memory:///")
        case "archive-folder":
            return ObjectArchive.open(f"file://{tmp_path}/archive")
    server: S3Server = request.getfixturevalue("s3_server")
    return ObjectArchive.open(f"{server.url}/{tmp_path.name}", **server.options())


def make_block(name: str) -> BlockSpec:
    return BlockSpec(
        block_key(name), ROOT_PARENT, 64, ranges=RangeShape(SIZE, 3), owner=Owner("demo", "default")
    )


def payload(name: str) -> memoryview:
    return memoryview(b"".join(make_range(name, i, SIZE) for i in range(3)))


def read(store: BlockStore, name: str, index: int) -> bytes:
    buffer = bytearray(SIZE)
    store.get_range(block_key(name), index, memoryview(buffer))
    return bytes(buffer)


def read_whole(store: BlockStore, name: str) -> bytes:
    buffer = bytearray(3 * SIZE)
    store.get_block(block_key(name), memoryview(buffer))
    return bytes(buffer)


def damage(store: BlockStore, name: str) -> None:
    """Flip one bit of the second range."""
    if isinstance(store, SegmentStore):
        entry = store._index.find(block_key(name))
        assert entry is not None
        path = store._folder.files[entry.place.file].file.path
        with path.open("r+b") as file:
            file.seek(entry.place.offset + 4096 + SIZE + 3)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
    elif isinstance(store, ObjectArchive):
        path = _path(block_key(name))
        data = bytearray(obstore.get(store._store, path).bytes())
        data[4096 + SIZE + 3] ^= 1
        obstore.put(store._store, path, bytes(data))
    else:
        assert isinstance(store, MemoryBlockStore)
        store._held[block_key(name)][1][SIZE + 3] ^= 1


def test_1_a_put_block_is_readable_by_range(store: BlockStore) -> None:
    store.put(make_block("a"), payload("a"))
    assert [read(store, "a", i) for i in (2, 0, 1)] == [make_range("a", i, SIZE) for i in (2, 0, 1)]


def test_1_a_second_put_of_a_block_changes_nothing(store: BlockStore) -> None:
    store.put(make_block("a"), payload("a"))
    store.put(make_block("a"), payload("b"))
    assert read(store, "a", 0) == make_range("a", 0, SIZE)
    assert store.blocks() == [make_block("a")]


def test_1_a_payload_of_another_length_is_a_bug(store: BlockStore) -> None:
    with pytest.raises(ValueError, match="bytes given"):
        store.put(make_block("a"), payload("a")[:-1])
    assert not store.exists(block_key("a"))


def test_2_unknown_blocks_and_ranges_are_not_found(store: BlockStore) -> None:
    with pytest.raises(BlockNotFoundError):
        read(store, "a", 0)
    store.put(make_block("a"), payload("a"))
    with pytest.raises(BlockNotFoundError):
        read(store, "a", 3)
    with pytest.raises(BlockNotFoundError):
        store.get_range(block_key("a"), 0, memoryview(bytearray(SIZE - 1)))


def test_2_bad_bytes_are_found_and_the_block_is_gone(store: BlockStore) -> None:
    store.put(make_block("a"), payload("a"))
    damage(store, "a")
    assert read(store, "a", 0) == make_range("a", 0, SIZE)
    with pytest.raises(ChecksumError):
        read(store, "a", 1)
    assert not store.exists(block_key("a"))
    store.put(make_block("a"), payload("a"))
    assert read(store, "a", 1) == make_range("a", 1, SIZE)


def test_3_neither_session_nor_outlook_is_kept(store: BlockStore) -> None:
    told = replace(make_block("a"), owner=Owner("demo", "ann", "chat"), outlook=Outlook(depth=3))
    store.put(told, payload("a"))
    assert store.find(told.key) == replace(make_block("a"), owner=Owner("demo", "ann"))
    assert list(store.blocks()) == [store.find(told.key)]


def test_3_and_4_exists_and_is_described_until_deleted(store: BlockStore) -> None:
    assert not store.exists(block_key("a")) and store.find(block_key("a")) is None
    store.put(make_block("a"), payload("a"))
    assert store.exists(block_key("a"))
    assert store.find(block_key("a")) == make_block("a")
    store.delete(block_key("a"))
    store.delete(block_key("a"))
    assert not store.exists(block_key("a")) and store.find(block_key("a")) is None
    with pytest.raises(BlockNotFoundError):
        read(store, "a", 0)


def test_5_blocks_are_listed_oldest_first(store: BlockStore) -> None:
    for name in ("c", "a", "b"):
        store.put(make_block(name), payload(name))
    assert store.blocks() == [make_block(name) for name in ("c", "a", "b")]


def test_6_a_full_store_refuses_or_evicts_and_keeps_the_rest(store: BlockStore) -> None:
    names = [f"n{i}" for i in range(30)]
    for name in names:
        try:
            store.put(make_block(name), payload(name))
        except PoolFullError:
            assert not store.exists(block_key(name))
    kept = [name for name in names if store.exists(block_key(name))]
    assert 4 <= len(kept) < len(names) or isinstance(store, ObjectArchive)
    assert store.blocks() == [make_block(name) for name in kept]
    assert [read_whole(store, name) for name in kept] == [bytes(payload(n)) for n in kept]
    store.delete(block_key(kept[0]))
    store.put(make_block("more"), payload("more"))
    assert read(store, "more", 0) == make_range("more", 0, SIZE)


def test_7_threads_may_put_and_read_the_same_blocks(store: BlockStore) -> None:
    def work(i: int) -> bytes:
        name = f"n{i % 5}"
        store.put(make_block(name), payload(name))
        return read(store, name, i % 3)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(40)))
    assert found == [make_range(f"n{i % 5}", i % 3, SIZE) for i in range(40)]
    assert len(store.blocks()) == 5


def test_7_after_close_every_call_raises(store: BlockStore) -> None:
    store.put(make_block("a"), payload("a"))
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.put(make_block("b"), payload("b")),
        lambda: read(store, "a", 0),
        lambda: read_whole(store, "a"),
        lambda: store.exists(block_key("a")),
        lambda: store.delete(block_key("a")),
        lambda: store.blocks(),
    ]
    for call in calls:
        with pytest.raises(TransportError):
            call()


def test_8_a_whole_block_is_read_at_once(store: BlockStore) -> None:
    store.put(make_block("a"), payload("a"))
    assert read_whole(store, "a") == bytes(payload("a"))
    with pytest.raises(BlockNotFoundError):
        store.get_block(block_key("a"), memoryview(bytearray(3 * SIZE - 1)))
    with pytest.raises(BlockNotFoundError):
        read_whole(store, "b")


def test_8_bad_bytes_are_found_in_a_whole_block(store: BlockStore) -> None:
    store.put(make_block("a"), payload("a"))
    damage(store, "a")
    with pytest.raises(ChecksumError):
        read_whole(store, "a")
    assert not store.exists(block_key("a"))
