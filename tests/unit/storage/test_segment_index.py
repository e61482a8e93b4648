from __future__ import annotations

import errno

from tests.fix_dmp import block_key
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, RangeShape
from tierkv.storage.disk.segment_format import PAGE, Record
from tierkv.storage.disk.segment_index import FileRole, IndexEntry, SegmentIndex
from tierkv.storage.disk.store_health import RETRY_S, MediumHealth

FILE = PAGE + 3 * 2 * PAGE
"""Three records of two pages."""


def record(name: str, sequence: int = 1) -> Record:
    block = BlockSpec(block_key(name), ROOT_PARENT, 64, ranges=RangeShape(PAGE, 1))
    return Record(block, sequence, bytes(8))


def make_index(files: int = 3) -> SegmentIndex:
    return SegmentIndex(files, FILE)


def begin(index: SegmentIndex) -> int:
    file = index.files.free()
    assert file is not None
    index.files.activate(file, epoch=index.files.next_epoch(), nonce=7)
    return file


def put(index: SegmentIndex, name: str) -> IndexEntry:
    place = index.files.place(2 * PAGE)
    assert place is not None
    entry = IndexEntry(record(name, index.next_sequence()), place)
    index.enter(entry)
    index.files.settle(place)
    return entry


def test_records_follow_each_other_until_the_file_is_full() -> None:
    index = make_index()
    assert index.files.place(2 * PAGE) is None
    begin(index)
    offsets = [put(index, name).place.offset for name in "abc"]
    assert offsets == [PAGE, 3 * PAGE, 5 * PAGE]
    assert index.files.place(PAGE) is None
    assert index.live_bytes == 6 * PAGE
    index.check_invariants()


def test_the_victim_is_the_oldest_file_without_writes() -> None:
    index = make_index()
    first, second = begin(index), None
    place, *_ = (put(index, name).place for name in "abc")
    assert index.files.guard(place)
    index.files.seal_active()
    second = begin(index)
    for name in "def":
        put(index, name)
    index.files.seal_active()
    assert index.files.victim() == second
    index.files.settle(place)
    assert index.files.victim() == first


def test_a_file_with_a_third_deleted_goes_first_and_all_of_it_is_kept() -> None:
    index = make_index()
    for names in ("abc", "def"):
        last = begin(index)
        for name in names:
            put(index, name)
        index.files.seal_active()
    index.remove(block_key("e"))
    assert index.files.victim() == last
    kept = index.survivors(last, budget_bytes=1)
    assert [entry.record.block.key for entry in kept] == [block_key("d"), block_key("f")]
    assert index.survivors(last, budget_bytes=0) == []
    index.check_invariants()


def test_survivors_are_the_last_read_within_the_budget() -> None:
    index = make_index()
    file = begin(index)
    entries = {name: put(index, name) for name in "abc"}
    index.touch(entries["c"])
    index.touch(entries["a"])
    assert index.survivors(file, budget_bytes=2 * PAGE) == [entries["a"]]
    assert index.survivors(file, budget_bytes=FILE) == [entries["a"], entries["c"]]
    assert index.survivors(file, budget_bytes=0) == []


def test_a_moved_entry_is_not_current_and_its_file_may_be_emptied() -> None:
    index = make_index()
    old_file = begin(index)
    old = put(index, "a")
    put(index, "b")
    index.files.seal_active()
    begin(index)
    new = put(index, "a")
    assert not index.is_current(old) and index.is_current(new)
    assert [block.key for block in index.empty(old_file)] == [block_key("b")]
    assert index.files[old_file].role is FileRole.FREE and len(index) == 1
    assert not index.files.guard(old.place)
    index.check_invariants()


def test_no_write_begins_in_a_file_that_is_being_collected() -> None:
    index = make_index()
    begin(index)
    entry = put(index, "a")
    index.files.seal_active()
    assert index.files.begin_collecting() == entry.place.file
    assert not index.files.guard(entry.place) and index.files.victim() is None


def test_an_abandoned_file_is_read_until_collected_and_then_gone() -> None:
    index = make_index()
    file = begin(index)
    put(index, "a")
    index.files.abandon(file)
    assert index.files.active() is None and index.find(block_key("a")) is not None
    assert index.files.victim(reusable=True) is None and index.files.victim() == file
    index.empty(file)
    assert index.files[file].role is FileRole.GONE and index.files.writable() == 2


def test_a_full_disk_is_tried_again_after_a_while() -> None:
    health = MediumHealth()
    full = OSError(errno.ENOSPC, "no space")
    assert not health.refuses(0.0)
    assert health.failed(full, 10.0) and not health.failed(full, 10.0)
    assert health.full and health.refuses(10.0 + RETRY_S / 2)
    assert not health.refuses(10.0 + RETRY_S)
    assert health.refuses(11.0 + RETRY_S)
    assert health.worked() and not health.worked()
    assert not health.refuses(11.0 + RETRY_S)


def test_a_broken_place_on_disk_is_not_a_broken_disk() -> None:
    health = MediumHealth()
    assert not health.failed(OSError(errno.EIO, "Input/output error"), 0.0)
    assert not health.refuses(0.0)
