from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fix_cluster import wait_for
from tests.fix_dmp import Rig, block_key, make_put, store
from tests.fix_small_disk import fill, small_disk  # noqa: F401 - a fixture
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.segment import Segment, map_segment
from tierkv.dmp.segment.segment_file import SegmentScan, open_segment, scan_segment
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.transport.verbs.fabric import address_of
from tierkv.kvcore.block import BlockSpec, Location
from tierkv.kvcore.errors import ConfigError

SHAPE = Geometry.of(extent_count=2, extent_bytes=256 << 10)
SLOT_BYTES = 48 << 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.seg"


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder in memory, where a file takes its pages and nothing else.

    On a disk a page may have no space yet, and what the file system itself needs may be counted.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierkv-test-") as folder:
        yield Path(folder)


def write(segment: Segment, index: int, state: SlotState, *, order: int = 0) -> Slot:
    slot = Slot(index, 5 + index, make_put(f"block-{index}"), state)
    segment.set_extent_size(index // SHAPE.slots_per_extent, SLOT_BYTES)
    segment.write_checksums(index, SLOT_BYTES, [11 + index, 12 + index])
    segment.headers.write(slot, order=order)
    return slot


def slots_of(scan: SegmentScan) -> list[tuple[int, int, BlockSpec]]:
    """Number, generation and content of the readable slots, oldest first."""
    rows = scan.sealed
    return [
        (int(rows.indices[i]), int(rows.generations[i]), rows.block(i)) for i in range(len(rows))
    ]


def test_a_new_segment_is_empty_and_takes_memory_for_its_headers_only(tmpfs: Path) -> None:
    path = tmpfs / "node.seg"
    segment = open_segment(path, SHAPE)
    scan = scan_segment(segment)
    assert (slots_of(scan), scan.dropped, scan.last_order) == ([], [], 0)
    assert os.stat(path).st_size == SHAPE.file_bytes
    assert memory_of(path) == SHAPE.payload_at
    assert segment.backing.back(1)
    assert memory_of(path) == SHAPE.payload_at + SHAPE.extent_bytes
    segment.keep_only([])
    assert memory_of(path) == SHAPE.payload_at
    segment.close()


def test_memory_is_ready_before_blocks_come_and_entered_where_it_is_mapped(tmpfs: Path) -> None:
    path = tmpfs / "node.seg"
    segment = open_segment(path, SHAPE)
    mapped = map_segment(path)
    segment.backing.start(owns=True)
    segment.backing.prepare([1])
    wait_for(lambda: memory_of(path) > SHAPE.payload_at, what="memory for an extent")
    wait_for(lambda: entered(segment) >= SHAPE.extent_bytes, what="its pages at the owner")
    mapped.backing.start(owns=False)
    wait_for(lambda: entered(mapped) >= SHAPE.extent_bytes, what="its pages where it is mapped")
    mapped.backing.prepare([0])
    mapped.close()
    assert memory_of(path) == SHAPE.payload_at + SHAPE.extent_bytes, "mapping it takes none"
    segment.close()


def entered(segment: Segment) -> int:
    """Bytes of a mapping that are in this process's page table."""
    start = f"{address_of(segment.memory):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(start))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10


def memory_of(path: Path) -> int:
    """Bytes of the pages that a file in ``tmpfs`` takes."""
    return os.stat(path).st_blocks * 512


def test_sealed_and_quarantined_slots_come_back_in_order_of_sealing(path: Path) -> None:
    segment = open_segment(path, SHAPE)
    second = write(segment, 1, SlotState.SEALED, order=2)
    first = write(segment, 9, SlotState.SEALED, order=1)
    bad = write(segment, 3, SlotState.QUARANTINED)
    write(segment, 2, SlotState.WRITING)
    segment.set_incarnation(41)
    segment.close()
    again = open_segment(path, SHAPE)
    scan = scan_segment(again)
    assert slots_of(scan) == [(s.index, s.generation, s.block) for s in (first, second)]
    assert [(s.index, s.generation, s.block) for s in scan.quarantined] == [
        (bad.index, bad.generation, bad.block)
    ]
    assert scan.dropped == [2]
    assert scan.last_order == 2
    assert scan.generation == 14, "the highest in use, though the first page says 1"
    assert again.incarnation == 41
    assert again.checksum(9, SLOT_BYTES, 1, 2) == 21
    again.close()


@pytest.mark.parametrize("at", [8, 20, 40, 60, 64, 70, 84, 130, 300])
def test_a_damaged_header_is_dropped(path: Path, at: int) -> None:
    segment = open_segment(path, SHAPE)
    write(segment, 0, SlotState.SEALED, order=1)
    write(segment, 1, SlotState.SEALED, order=2)
    segment.memory[SHAPE.header_offset(0) + at] ^= 0x40
    scan = scan_segment(segment)
    assert [index for index, _, _ in slots_of(scan)] == [1]
    assert scan.dropped == [0]
    segment.close()


def test_waiting_for_the_owner_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segment = open_segment(path, SHAPE)
    with caplog.at_level("INFO"), pytest.raises(ConfigError, match="owned by a running process"):
        open_segment(path, SHAPE, wait_s=0.06)
    assert caplog.messages == [f"segment {path}: waiting 0.06 s for the process that owns it"]
    segment.close()


def test_one_owner_only(path: Path) -> None:
    segment = open_segment(path, SHAPE)
    with pytest.raises(ConfigError, match=r"owned by a running process.*--node-id"):
        open_segment(path, SHAPE)
    segment.close()
    open_segment(path, SHAPE).close()


def test_a_mapping_needs_no_lock_and_sees_the_same_bytes(path: Path) -> None:
    segment = open_segment(path, SHAPE)
    write(segment, 0, SlotState.SEALED)
    mapped = map_segment(path)
    segment.payload(0, SLOT_BYTES, 10, 14)[:] = b"data"
    assert bytes(mapped.payload(0, SLOT_BYTES, 10, 14)) == b"data"
    assert mapped.headers.stamp(0) == segment.headers.stamp(0)
    assert mapped.headers.stamp(0).range_count == 2
    mapped.close()
    segment.close()


def test_another_size_makes_a_new_file_and_leaves_old_mappings_alone(path: Path) -> None:
    segment = open_segment(path, SHAPE)
    write(segment, 0, SlotState.SEALED)
    segment.close()
    mapped = map_segment(path)
    smaller = Geometry.of(extent_count=1, extent_bytes=256 << 10)
    fresh = open_segment(path, smaller)
    assert slots_of(scan_segment(fresh)) == []
    assert mapped.headers.stamp(0).state == SlotState.SEALED
    assert mapped.inode != fresh.inode
    fresh.close()
    mapped.close()


def spoil(path: Path, at: int, data: bytes) -> None:
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, data, at)
    os.close(fd)


def test_damaged_files_are_told_and_made_anew_and_a_foreign_one_is_kept(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cases = [
        (lambda: spoil(path, 0, b"NOTOURS!"), "not a TierKV segment"),
        (lambda: spoil(path, 8, (99).to_bytes(4, "little")), "layout version 99"),
        (lambda: spoil(path, 12, (0).to_bytes(4, "little")), "damaged first page"),
        (lambda: os.truncate(path, SHAPE.file_bytes - 4096), "bytes instead of"),
        (lambda: os.truncate(path, 10), "not a TierKV segment"),
    ]
    for damage, message in cases:
        path.unlink(missing_ok=True)
        open_segment(path, SHAPE).close()
        damage()
        with pytest.raises(ConfigError, match=message):
            map_segment(path)
        caplog.clear()
        segment = open_segment(path, SHAPE)
        assert message in caplog.text
        assert [record.levelname for record in caplog.records] == ["CRITICAL"]
        assert slots_of(scan_segment(segment)) == []
        assert (segment.trouble,) == tuple(caplog.messages)
        segment.close()
    assert path.with_name("node.seg.bad").read_bytes()[:8] != b"TIERKVSG", "it may not be ours"


def test_a_pool_that_began_empty_says_so_until_its_next_start(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    assert (rig.node.reports.report().notes, rig.node.reports.report().cache_errors) == ((), ())
    rig.stop()
    spoil(rig.node.config.segment_file, 12, (0).to_bytes(4, "little"))
    rig.restart()
    (note,) = rig.node.reports.report().notes
    assert "damaged first page" in note and "the pool began empty" in note
    assert rig.node.reports.report().cache_errors == (("segment_damaged", 1),)
    rig.restart()
    assert (rig.node.reports.report().notes, rig.node.reports.report().cache_errors) == ((), ())


def test_a_tmpfs_that_fills_up_refuses_puts_and_kills_nobody(
    small_disk: Path,  # noqa: F811
    make_rig: Callable[..., Rig],
) -> None:
    path = small_disk / "node.seg"
    rig = make_rig(segment_path=str(path), capacity_bytes=3 * (256 << 10), ready_ahead_bytes=0)
    pool = InprocPoolNode(rig.node)
    first = store(pool, "first")
    fill(small_disk)
    names = [f"n{i}" for i in range(15)]
    answers = pool.reserve([make_put(name) for name in names])
    assert None in answers, "no memory for another extent"
    assert rig.node.reports.stats().memory.alloc_failures > 0
    assert pool.lookup([block_key("first")]) == [first]


def test_a_clean_stop_keeps_the_memory_of_sealed_blocks_only(
    make_rig: Callable[..., Rig], tmpfs: Path
) -> None:
    rig = make_rig(segment_path=str(tmpfs / "node.seg"))
    pool = InprocPoolNode(rig.node)
    places = [store(pool, f"n{i}") for i in range(7)]
    assert pool.reserve([make_put("never sealed")])[0] is not None
    path = rig.node.config.segment_file
    payload_at = rig.node.segment.geometry.payload_at
    rig.stop()
    assert memory_of(path) == payload_at + 7 * SLOT_BYTES
    rig.restart()
    assert [place and place.slot for place in rig_lookup(rig, 7)] == [p.slot for p in places]
    pool = InprocPoolNode(rig.node)
    for i in range(20):
        store(pool, f"later{i}")
    assert rig.node.scrubber.run_round() == 0


def rig_lookup(rig: Rig, count: int) -> list[Location | None]:
    return InprocPoolNode(rig.node).lookup([block_key(f"n{i}") for i in range(count)])


def test_too_little_space_is_said_in_bytes_before_any_is_taken(path: Path) -> None:
    monster = Geometry.of(extent_count=1 << 20, extent_bytes=1 << 30)
    with pytest.raises(
        ConfigError, match=rf"needs {monster.file_bytes} bytes but \d+ are free"
    ) as c:
        open_segment(path, monster)
    assert "dmp.capacity" in str(c.value)
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_a_config_error(path: Path) -> None:
    path.write_text("in the way")
    with pytest.raises(ConfigError, match="can't be made"):
        open_segment(path / "x" / "node.seg", SHAPE)
    with pytest.raises(ConfigError, match="can't be opened"):
        map_segment(path.with_name("nothing"))


def test_a_segment_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_segment(path, SHAPE).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"belongs to user .* remove it"):
        open_segment(path, SHAPE)
    assert path.exists()


def test_a_half_made_segment_of_another_user_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.with_name(path.name + ".new").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        open_segment(path, SHAPE)


def test_a_second_start_at_the_same_moment_leaves_the_first_one_its_file(path: Path) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.touch()
    with fresh.open("rb") as being_made:
        fcntl.flock(being_made, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="owned by a running process"):
            open_segment(path, SHAPE)
        assert fresh.exists()


def test_what_a_peer_calls_its_segment_may_be_anything(path: Path) -> None:
    os.mkfifo(path)
    for claimed in (
        path,
        path.parent,
        Path("/dev/null"),
        Path("a\0b"),
        path / "x",
        Path("x" * 5000),
    ):
        with pytest.raises(ConfigError, match="can't be opened"):
            map_segment(claimed)
