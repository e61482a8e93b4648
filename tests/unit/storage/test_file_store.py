from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.block_key import ROOT_PARENT
from kvcore.errors import ConfigError, PoolFullError
from storage.block_store import StoredBlock
from storage.file_store import FileBlockStore
from tests.fix_dmp import block_key, make_range

SIZE = 1_000


def open_store(folder: Path, *, capacity_bytes: int = 20 * SIZE) -> FileBlockStore:
    return FileBlockStore(folder, capacity_bytes=capacity_bytes)


def put(store: FileBlockStore, name: str) -> StoredBlock:
    block = StoredBlock(block_key(name), ROOT_PARENT, SIZE, 2, 64, "m" * 128, "t" * 128)
    store.put(block, memoryview(make_range(name, 0, SIZE) + make_range(name, 1, SIZE)))
    return block


def read(store: FileBlockStore, name: str, index: int) -> bytes:
    buffer = bytearray(SIZE)
    store.get_range(block_key(name), index, memoryview(buffer))
    return bytes(buffer)


def test_blocks_come_back_with_their_order_and_names(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = [put(store, name) for name in ("b", "a", "c")]
    store.close()
    again = open_store(tmp_path)
    assert again.blocks() == blocks
    assert read(again, "a", 1) == make_range("a", 1, SIZE)
    blocks.append(put(again, "d"))
    assert again.blocks() == blocks


def test_the_capacity_counts_what_came_back(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    put(first, "a")
    again = open_store(tmp_path, capacity_bytes=3 * SIZE)
    with pytest.raises(PoolFullError):
        put(again, "b")


@pytest.mark.parametrize("at", [0, 9, 30, 42, 60, 200, 340])
def test_a_damaged_header_removes_the_file_at_the_next_start(tmp_path: Path, at: int) -> None:
    store = open_store(tmp_path)
    put(store, "a")
    kept = put(store, "b")
    path = store._path(block_key("a"))
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)
    assert open_store(tmp_path).blocks() == [kept]
    assert not path.exists()


def test_cut_off_misplaced_and_half_written_files_are_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name in ("cut", "moved", "tiny"):
        put(store, name)
    kept = put(store, "kept")
    cut, moved, tiny = (store._path(block_key(name)) for name in ("cut", "moved", "tiny"))
    cut.write_bytes(cut.read_bytes()[:-1])
    moved.rename(moved.with_name("00" * 16 + ".block"))
    tiny.write_bytes(b"TKVBLK01")
    tiny.with_name("half.part").write_bytes(b"x")
    assert open_store(tmp_path).blocks() == [kept]
    assert [p.name for p in tmp_path.glob("??/*")] == [store._path(kept.key).name]


def test_a_folder_that_can_not_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="can't be used"):
        open_store(tmp_path / "file")
