from __future__ import annotations

import mmap
import os
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from tests.fix_dmp import block_key, make_range
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Owner, RangeShape
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError, ConfigError, PoolFullError
from tierkv.storage.block_store import BlockRead, DiskRangeRead
from tierkv.storage.disk.segment_folder import segment_path
from tierkv.storage.disk.segment_format import PAGE, pack_checksums
from tierkv.storage.disk.segment_store import SegmentStore

RANGE = 6_000
RECORD = PAGE * 4
"""A record page and 12000 bytes of payload in three pages."""

FILE = PAGE + 4 * RECORD

Opener = Callable[..., SegmentStore]


class Listener:
    def __init__(self) -> None:
        self.gone: list[bytes] = []
        self.announced: list[list[bytes]] = []

    def fading(self, blocks: Sequence[BlockSpec]) -> None:
        self.announced.append([block.key for block in blocks])

    def evicted(self, blocks: Sequence[BlockSpec]) -> None:
        self.gone += [block.key for block in blocks]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Opener]:
    opened: list[SegmentStore] = []

    def make(folder: str | Path = "l4", *, files: int = 4, **settings: object) -> SegmentStore:
        values: dict[str, object] = {
            "segment_bytes": FILE,
            "capacity_bytes": files * FILE,
        } | settings
        store = SegmentStore(tmp_path / folder, **values)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.check_invariants()
        store.close()


def make_block(name: str, size: int = RANGE, count: int = 2) -> BlockSpec:
    return BlockSpec(
        block_key(name),
        ROOT_PARENT,
        64,
        ranges=RangeShape(size, count),
        owner=Owner("m" * 128, "tenant"),
    )


def payload(name: str) -> memoryview:
    return memoryview(make_range(name, 0, RANGE) + make_range(name, 1, RANGE))


def put(store: SegmentStore, *names: str) -> None:
    for name in names:
        store.put(make_block(name), payload(name))


def read(store: SegmentStore, name: str) -> bytes:
    buffer = bytearray(2 * RANGE)
    store.get_block(block_key(name), memoryview(buffer))
    return bytes(buffer)


def numbered(start: int, stop: int) -> list[str]:
    return [f"n{i}" for i in range(start, stop)]


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    with path.open("rb") as file:
        file.seek(at)
        byte = file.read(1)[0]
    patch(path, at, bytes([byte ^ 4]))


def test_blocks_come_back_with_order_names_and_bytes(open_store: Opener) -> None:
    store = open_store()
    put(store, "b", "a", "c", "d", "e")
    listed = store.blocks()
    store.close()
    again = open_store()
    assert again.blocks() == listed == [make_block(name) for name in "bacde"]
    put(again, "f")
    assert [read(again, name) for name in "bacdef"] == [bytes(payload(name)) for name in "bacdef"]
    assert again.stats().tier.blocks_used == 6


def test_deleted_blocks_stay_deleted(open_store: Opener) -> None:
    store = open_store()
    put(store, "a", "b")
    store.delete(block_key("a"))
    store.close()
    again = open_store()
    assert again.blocks() == [make_block("b")]
    put(again, "a")
    again.close()
    assert open_store().blocks() == [make_block("b"), make_block("a")]


def test_the_oldest_file_is_evicted_when_the_last_is_begun(open_store: Opener) -> None:
    listener = Listener()
    store = open_store(listener=listener)
    put(store, *numbered(0, 12))
    assert listener.gone == []
    put(store, "n12")
    assert listener.gone == [block_key(name) for name in numbered(0, 4)]
    assert listener.announced[-1] == [block_key(name) for name in numbered(4, 8)]
    assert store.blocks() == [make_block(name) for name in numbered(4, 13)]
    stats = store.stats()
    assert (stats.tier.evicted_blocks, stats.puts, stats.copied_bytes) == (4, 13, 0)
    assert stats.tier.used_bytes == 9 * RECORD and stats.tier.capacity_bytes == 4 * FILE


def test_blocks_read_since_they_came_are_copied_within_a_quarter(open_store: Opener) -> None:
    store = open_store()
    put(store, *numbered(0, 12))
    for name in ("n0", "n2"):
        read(store, name)
    put(store, "n12")
    kept = [name for name in numbered(0, 13) if store.exists(block_key(name))]
    assert kept == ["n2", *numbered(4, 13)]  # A quarter of a file is one of these blocks.
    assert store.stats().copied_bytes == 2 * RANGE
    assert read(store, "n2") == bytes(payload("n2"))
    store.close()
    assert [b.key for b in open_store().blocks()] == [block_key(name) for name in kept]


def test_many_laps_keep_the_newest_blocks(open_store: Opener) -> None:
    store = open_store()
    for i in range(100):
        put(store, f"n{i}")
        if i % 7 == 0:
            read(store, f"n{i}")
        store.check_invariants()
    assert [read(store, n) for n in numbered(92, 100)] == [
        bytes(payload(n)) for n in numbered(92, 100)
    ]
    listed = store.blocks()
    store.close()
    assert open_store().blocks() == listed


def test_a_batch_answers_each_read(open_store: Opener) -> None:
    store = open_store()
    put(store, "a", "b")
    buffers = [memoryview(bytearray(2 * RANGE)) for _ in range(3)]
    reads = [BlockRead(block_key(n), b) for n, b in zip("axb", buffers, strict=True)]
    first, missing, last = store.get_blocks(reads)
    assert first is None and last is None and isinstance(missing, BlockNotFoundError)
    assert (bytes(buffers[0]), bytes(buffers[2])) == (bytes(payload("a")), bytes(payload("b")))
    part = memoryview(bytearray(RANGE))
    assert store.get_ranges([DiskRangeRead(block_key("b"), 1, part)]) == [None]
    assert bytes(part) == make_range("b", 1, RANGE)


def test_aligned_memory_is_read_and_written_in_place(open_store: Opener) -> None:
    store = open_store()
    with mmap.mmap(-1, 3 * PAGE) as source, mmap.mmap(-1, 3 * PAGE) as target:
        source[: 2 * RANGE] = bytes(payload("a"))
        with memoryview(source)[: 2 * RANGE] as view:
            store.put(make_block("a"), view)
        with memoryview(target)[: 2 * RANGE] as view:
            store.get_block(block_key("a"), view)
        assert target[: 2 * RANGE] == bytes(payload("a"))
    assert read(store, "a") == bytes(payload("a"))


def test_a_large_block_is_read_in_pieces_and_each_is_verified(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store(segment_bytes=8 << 20, capacity_bytes=24 << 20)
    block = make_block("big", size=80 << 12, count=13)
    data = make_range("big", 0, block.ranges.payload_bytes)
    store.put(block, memoryview(data))
    buffer = bytearray(block.ranges.payload_bytes)
    store.get_block(block.key, memoryview(buffer))
    assert buffer == data
    assert (store.stats().gets, store.stats().tier.read_bytes) == (1, len(data))
    flip(segment_path(tmp_path / "l4", 0), 2 * PAGE + 3 * (1 << 20))
    with pytest.raises(ChecksumError):
        store.get_block(block.key, memoryview(buffer))
    assert not store.exists(block.key) and store.stats().checksum_errors == 1


def test_the_callers_checksums_find_what_flipped_before_the_put(open_store: Opener) -> None:
    store = open_store()
    sums = pack_checksums(make_block("a"), payload("a"))
    store.put(make_block("a"), payload("a"), checksums=sums)
    store.put(make_block("b"), payload("b"), checksums=sums)
    assert read(store, "a") == bytes(payload("a"))
    with pytest.raises(ChecksumError):
        read(store, "b")
    with pytest.raises(ValueError, match="checksums"):
        store.put(make_block("c"), payload("c"), checksums=sums[:-1])


def test_threads_race_with_eviction_and_never_see_wrong_bytes(open_store: Opener) -> None:
    store = open_store()
    names = numbered(0, 30)

    def work(seed: int) -> int:
        hits = 0
        for step in range(120):
            name = names[(seed * 7 + step * (seed + 3)) % len(names)]
            if step % 11 == 10:
                store.delete(block_key(name))
                continue
            put(store, name)
            try:
                assert read(store, name) == bytes(payload(name))
                hits += 1
            except BlockNotFoundError:
                continue  # Evicted or deleted by another thread.
        return hits

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(6))) > 100
    store.check_invariants()
    stats = store.stats()
    assert stats.checksum_errors == stats.io_errors == 0 and stats.tier.evicted_blocks > 50
    listed = store.blocks()
    store.close()
    again = open_store()
    assert again.blocks() == listed
    assert again.get_blocks(whole_reads(again)) == [None] * len(listed)


def whole_reads(store: SegmentStore) -> list[BlockRead]:
    return [BlockRead(b.key, memoryview(bytearray(b.ranges.payload_bytes))) for b in store.blocks()]


def test_a_block_larger_than_a_file_is_refused(open_store: Opener) -> None:
    store = open_store()
    big = make_block("big", size=FILE, count=1)
    with pytest.raises(PoolFullError, match="does not fit"):
        store.put(big, memoryview(bytes(FILE)))
    assert not store.exists(big.key)


def test_a_torn_tail_is_dropped_at_open(open_store: Opener, tmp_path: Path) -> None:
    store = open_store()
    put(store, "a", "b", "c")
    store.close()
    patch(segment_path(tmp_path / "l4", 0), PAGE + 2 * RECORD + 2 * PAGE, bytes(2 * PAGE))
    again = open_store()
    assert again.blocks() == [make_block("a"), make_block("b")]
    put(again, "c", "d")
    assert read(again, "c") == bytes(payload("c"))


@pytest.mark.parametrize("at", [0, 9, 30, 41, 60, 200, 600, PAGE - 1])
def test_a_damaged_record_page_costs_that_block_only(
    open_store: Opener, tmp_path: Path, at: int
) -> None:
    store = open_store()
    put(store, "a", "b", "c")
    store.close()
    flip(segment_path(tmp_path / "l4", 0), PAGE + RECORD + at)

    assert open_store().blocks() == [make_block("a"), make_block("c")]


def test_bad_payload_is_found_by_the_read_and_stays_gone(
    open_store: Opener, tmp_path: Path
) -> None:
    listener = Listener()
    store = open_store(listener=listener)
    put(store, "a")
    flip(segment_path(tmp_path / "l4", 0), 2 * PAGE + 7)
    with pytest.raises(ChecksumError):
        read(store, "a")
    assert listener.gone == [block_key("a")] and store.stats().checksum_errors == 1
    store.close()
    assert open_store().blocks() == []


def test_a_record_of_an_earlier_life_is_not_believed(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(files=3)
    put(store, *numbered(0, 9))
    old = segment_path(tmp_path / "l4", 0).read_bytes()
    put(store, *numbered(9, 13))
    store.close()
    path = segment_path(tmp_path / "l4", 0)
    patch(path, PAGE, old[PAGE:])  # The old records, under the file page of the new life.
    again = open_store(files=3)
    for block in again.blocks():
        buffer = memoryview(bytearray(block.ranges.payload_bytes))
        again.get_block(block.key, buffer)
    names = {block_key(name) for name in numbered(0, 4)}
    assert not names & {block.key for block in again.blocks()}


def test_a_damaged_or_truncated_file_is_set_aside(open_store: Opener, tmp_path: Path) -> None:
    store = open_store()
    put(store, *numbered(0, 12))
    store.close()
    flip(segment_path(tmp_path / "l4", 0), 20)
    os.truncate(segment_path(tmp_path / "l4", 1), FILE - PAGE)
    again = open_store()
    assert again.blocks() == [make_block(name) for name in numbered(8, 12)]
    names = sorted(os.listdir(tmp_path / "l4"))
    assert [n for n in names if n.endswith(".bad")] == ["segment-00000.bad", "segment-00001.bad"]
    put(again, *numbered(20, 30))
    assert read(again, "n29") == bytes(payload("n29"))


def test_another_layout_version_is_refused_with_the_cure(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store()
    put(store, "a")
    store.close()
    path = segment_path(tmp_path / "l4", 0)
    page = bytearray(path.read_bytes()[:PAGE])
    page[8:12] = struct.pack("<I", 99)
    page[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:-8])))
    patch(path, 0, bytes(page))
    with pytest.raises(ConfigError, match="layout version 99") as caught:
        open_store()
    assert "empty the folder" in caught.value.hint


def test_a_folder_of_other_files_is_refused(open_store: Opener, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("do not eat")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_store("home")
    assert os.listdir(tmp_path / "home") == ["thesis.tex"]


def test_other_files_beside_ours_are_left_alone(open_store: Opener, tmp_path: Path) -> None:
    store = open_store()
    put(store, "a")
    store.close()
    (tmp_path / "l4" / "note.txt").write_text("mine")
    assert open_store().blocks() == [make_block("a")]
    assert (tmp_path / "l4" / "note.txt").exists()


def test_a_folder_has_one_owner(open_store: Opener) -> None:
    open_store()
    with pytest.raises(ConfigError, match="in use by another process"):
        open_store()


def test_capacity_may_grow_and_shrink(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(files=4)
    put(store, *numbered(0, 12))
    store.close()
    larger = open_store(files=6)
    assert len(larger.blocks()) == 12
    larger.close()
    smaller = open_store(files=3)
    assert len(os.listdir(tmp_path / "l4")) == 3 and smaller.stats().tier.capacity_bytes == 3 * FILE
    put(smaller, *numbered(12, 30))
    assert read(smaller, "n29") == bytes(payload("n29"))
    smaller.close()
    other = open_store(segment_bytes=2 * FILE, capacity_bytes=6 * FILE)
    assert other.blocks() == []


@pytest.mark.parametrize("settings", [{"capacity_bytes": 2 * FILE}, {"segment_bytes": PAGE}])
def test_sizes_that_make_no_sense_are_refused(open_store: Opener, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        open_store(**settings)


def test_a_file_in_place_of_the_folder_is_refused(open_store: Opener, tmp_path: Path) -> None:
    (tmp_path / "l4").write_text("a file")
    with pytest.raises(ConfigError, match="can't be used"):
        open_store()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tierkv-test", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"tmpfs can't be mounted here: {made.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_no_room_for_the_files_is_said_at_open(open_store: Opener, tiny_disk: Path) -> None:
    with pytest.raises(ConfigError, match="has no room") as caught:
        open_store(tiny_disk / "l4", files=40)
    assert "lower the capacity" in caught.value.hint
    assert os.listdir(tiny_disk / "l4") == []
    store = open_store(tiny_disk / "l4", files=4)
    put(store, *numbered(0, 40))
    assert read(store, "n39") == bytes(payload("n39"))


def test_files_that_are_deleted_under_a_running_store_are_told(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store()
    put(store, "a")
    assert store.stats().degraded == ""
    segment_path(tmp_path / "l4", 1).unlink()
    assert "1 of 4 files" in store.stats().degraded
    assert read(store, "a") == bytes(payload("a")), "what is open is still read"
    store.close()
    assert store.stats().degraded == ""
