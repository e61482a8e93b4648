from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.fix_dmp import block_key, make_range
from tests.fix_s3 import S3Server, make_s3_server
from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Owner, RangeShape
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError, ConfigError, TransportError
from tierkv.kvcore.ids import BlockKey
from tierkv.storage.archive import ObjectArchive, _path
from tierkv.storage.disk.segment_format import PAGE
from tierkv.storage.l4 import L4Store

RANGE = 6_000
FILE = PAGE + 4 * 4 * PAGE
WAIT_S = 30.0

Opener = Callable[..., L4Store]


@pytest.fixture
def open_l4(tmp_path: Path) -> Iterator[Opener]:
    """L4 on four files of four blocks; the archive is a folder unless another URL is given."""
    opened: list[L4Store] = []

    def make(
        url: str | None = None, folder: str = "disk", options: dict[str, str] | None = None
    ) -> L4Store:
        store = L4Store.open(
            tmp_path / folder,
            capacity_bytes=4 * FILE,
            segment_bytes=FILE,
            archive_url=f"file://{tmp_path}/archive" if url is None else url,
            archive_options=options,
        )
        opened.append(store)
        assert store.wait_archived(WAIT_S)
        return store

    yield make
    for store in opened:
        store.close()


def make_block(name: str) -> BlockSpec:
    return BlockSpec(
        block_key(name), ROOT_PARENT, 64, ranges=RangeShape(RANGE, 2), owner=Owner("demo", "tenant")
    )


def payload(name: str) -> bytes:
    return make_range(name, 0, RANGE) + make_range(name, 1, RANGE)


def put(store: LowerTier, *names: str) -> None:
    for name in names:
        store.put(make_block(name), memoryview(payload(name)))


def read(store: LowerTier, name: str) -> bytes:
    buffer = bytearray(2 * RANGE)
    store.get_block(block_key(name), memoryview(buffer))
    return bytes(buffer)


def fill(store: L4Store, laps: int = 16) -> list[str]:
    """Put four files' worth, letting the archiver keep up."""
    names = [f"n{i}" for i in range(laps)]
    for name in names:
        put(store, name)
        assert store.wait_archived(WAIT_S)
    return names


def keys(names: Sequence[str]) -> list[BlockKey]:
    return [block_key(name) for name in names]


def test_without_an_archive_evicted_blocks_are_told(open_l4: Opener) -> None:
    store = open_l4("")
    gone: list[BlockKey] = []
    store.set_listener(gone.extend)
    names = fill(store)
    assert gone == keys(names[:4])
    assert store.find(gone[0]) is None and not store.exists(gone[0])
    with pytest.raises(BlockNotFoundError):
        read(store, names[0])
    assert store.stats().evicted_blocks == 4


def test_evicted_blocks_are_read_from_the_archive(open_l4: Opener) -> None:
    store = open_l4()
    gone: list[BlockKey] = []
    store.set_listener(gone.extend)
    names = fill(store)
    assert gone == []
    assert store.find(block_key("n0")) == make_block("n0")
    assert [read(store, name) for name in names] == [payload(name) for name in names]
    buffer = bytearray(RANGE)
    store.get_range(block_key("n1"), 1, memoryview(buffer))
    assert bytes(buffer) == make_range("n1", 1, RANGE)
    archiver = store._archiver
    assert archiver is not None and archiver.stats().stored_blocks >= 4
    stats = store.stats()
    assert (stats.evicted_blocks, stats.alloc_failures, stats.medium) == (4, 0, "disk")
    assert store._disk.stats().gets == 12 + archiver.stats().stored_blocks
    assert stats.read_bytes == 16 * 2 * RANGE + RANGE


def test_after_a_restart_archived_blocks_are_learned_when_asked_for(open_l4: Opener) -> None:
    store = open_l4()
    fill(store)
    store.close()
    again = open_l4(folder="another-disk")
    assert again.exists(block_key("n0"))
    assert again.find(block_key("n0")) is None
    assert again.wait_archived(WAIT_S)
    assert again.find(block_key("n0")) == make_block("n0")
    assert read(again, "n0") == payload("n0")


def test_a_deleted_block_is_gone_from_disk_and_archive(open_l4: Opener) -> None:
    store = open_l4()
    fill(store)
    store.delete(block_key("n0"))
    store.delete(block_key("n15"))
    assert not store.exists(block_key("n0")) and not store.exists(block_key("n15"))
    assert store.wait_archived(WAIT_S)
    store.close()
    again = open_l4(folder="another-disk")
    assert not again.exists(block_key("n0")) and again.exists(block_key("n1"))


def test_a_damaged_object_is_a_miss_and_is_told(open_l4: Opener, tmp_path: Path) -> None:
    store = open_l4()
    gone: list[BlockKey] = []
    store.set_listener(gone.extend)
    fill(store)
    path = tmp_path / "archive" / _path(block_key("n0"))
    data = bytearray(path.read_bytes())
    data[PAGE + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError):
        read(store, "n0")
    assert gone == keys(["n0"]) and not path.exists()
    path = tmp_path / "archive" / _path(block_key("n1"))
    path.write_bytes(b"short")
    with pytest.raises(ChecksumError):
        read(store, "n1")


def test_other_objects_in_the_archive_are_ignored(tmp_path: Path) -> None:
    archive = ObjectArchive.open(f"file://{tmp_path}/archive")
    archive.put(make_block("a"), memoryview(payload("a")))
    (tmp_path / "archive" / "README").write_text("mine")
    (tmp_path / "archive" / "zz").mkdir()
    (tmp_path / "archive" / "zz" / ("0" * 32)).write_text("not under its prefix")
    again = ObjectArchive.open(f"file://{tmp_path}/archive")
    assert again.blocks() == [make_block("a")]


@pytest.fixture
def own_server() -> Iterator[S3Server]:
    """A server that a test may stop."""
    server = make_s3_server()
    server.start()
    yield server
    server.stop()


def test_a_dead_archive_is_said_and_disturbs_nobody(open_l4: Opener, own_server: S3Server) -> None:
    server = own_server
    store = open_l4(f"{server.url}/dead", options=server.options())
    fill(store, laps=12)
    server.stop()
    gone: list[BlockKey] = []
    store.set_listener(gone.extend)
    put(store, "n12")
    assert store.wait_archived(WAIT_S)
    put(store, *[f"n{i}" for i in range(13, 20)])
    assert read(store, "n19") == payload("n19")
    with pytest.raises(TransportError):
        read(store, "n0")
    stats = store.stats()
    assert stats.alloc_failures >= 1 and "disk (degraded: " in stats.medium
    assert "archive" in stats.medium


@pytest.mark.parametrize("url", ["what://ever", "s3://", "not a url"])
def test_an_archive_that_makes_no_sense_is_refused(open_l4: Opener, url: str) -> None:
    with pytest.raises(ConfigError, match="can't be opened"):
        open_l4(url)


def test_erase_leaves_no_byte_on_disk_and_no_object(open_l4: Opener, tmp_path: Path) -> None:
    store = open_l4()
    put(store, *(f"n{i}" for i in range(8)))
    assert store.wait_archived(WAIT_S)
    archived = next(
        name for name in (f"n{i}" for i in range(8)) if store._in_archive(block_key(name))
    )
    keys = [block_key(archived), block_key("n7"), block_key("never")]
    blocks, size = store.erase(keys)
    assert (blocks, size) == (3, 2 * 2 * RANGE)
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for name in (archived, "n7"):
        assert payload(name)[:RANGE] not in raw and not store.exists(block_key(name))
    assert payload("n6")[:RANGE] in raw and read(store, "n6") == payload("n6")
    assert store.erase(keys) == (0, 0)
    put(store, "n7")
    assert read(store, "n7") == payload("n7")
    store.close()
    assert read(open_l4(), "n7") == payload("n7")


def test_an_erase_that_the_archive_refuses_says_so(open_l4: Opener, tmp_path: Path) -> None:
    store = open_l4()
    put(store, *(f"n{i}" for i in range(8)))
    assert store.wait_archived(WAIT_S)

    def refuse(key: BlockKey) -> None:
        raise TransportError("the archive is gone")

    assert store._archiver is not None and store._archive is not None
    store._archive.delete = refuse  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="has not deleted 1"):
        store._archiver.erase([block_key("n0")], timeout_s=0.1)
