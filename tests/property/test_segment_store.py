"""The disk tier against a dictionary, through reopens, crashes and arbitrary bytes in its files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.fix_dmp import block_key, make_range
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Owner, RangeShape
from tierkv.kvcore.errors import BlockNotFoundError, CacheError, ConfigError
from tierkv.storage.disk.segment_folder import segment_path
from tierkv.storage.disk.segment_format import (
    PAGE,
    OtherVersionError,
    parse_file_page,
    parse_record,
)
from tierkv.storage.disk.segment_store import SegmentStore

FILES = 4
FILE = PAGE * 13
SIZES = (100, 4_096, 9_000)
NAMES = st.sampled_from([f"n{i}" for i in range(12)])


def make_block(name: str, version: int) -> BlockSpec:
    size = SIZES[version % len(SIZES)]
    return BlockSpec(
        block_key(name),
        ROOT_PARENT,
        version,
        ranges=RangeShape(size, 1 + version % 2),
        owner=Owner("m", "t"),
    )


def payload(name: str, block: BlockSpec) -> bytes:
    return make_range(name, block.tokens, block.ranges.payload_bytes)


def open_store(folder: Path) -> SegmentStore:
    return SegmentStore(folder, capacity_bytes=FILES * FILE, segment_bytes=FILE, io_threads=1)


def read(store: SegmentStore, block: BlockSpec) -> bytes:
    buffer = bytearray(block.ranges.payload_bytes)
    store.get_block(block.key, memoryview(buffer))
    return bytes(buffer)


class StoreAgainstDictionary(RuleBasedStateMachine):
    """What is put is there until it is deleted or said to be evicted; order is that of puts."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="tierkv-l4-"))
        self.lives = 0
        self.model: dict[str, BlockSpec] = {}
        self.version = 0
        self.store = self.open(self.home / "0")

    def open(self, folder: Path) -> SegmentStore:
        store = open_store(folder)
        store.set_listener(self)
        return store

    def fading(self, blocks: Sequence[BlockSpec]) -> None:
        assert {block.key for block in blocks} <= {b.key for b in self.store.blocks()}

    def evicted(self, blocks: Sequence[BlockSpec]) -> None:
        gone = {block.key for block in blocks}
        self.model = {n: b for n, b in self.model.items() if b.key not in gone}

    @rule(name=NAMES)
    def put(self, name: str) -> None:
        self.version += 1
        block = make_block(name, self.version)
        known = name in self.model
        self.store.put(block, memoryview(payload(name, block)))
        if not known:
            self.model[name] = block

    @rule(name=NAMES)
    def get(self, name: str) -> None:
        block = self.model.get(name)
        if block is not None:
            assert read(self.store, block) == payload(name, block)
        else:
            try:
                read(self.store, make_block(name, 0))
            except BlockNotFoundError:
                return
            raise AssertionError(f"{name} is there")

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.store.delete(block_key(name))
        self.model.pop(name, None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open(self.home / str(self.lives))

    @rule()
    def crash(self) -> None:
        """Go on with a copy of the folder as it is while the store is open."""
        old = self.home / str(self.lives)
        self.lives += 1
        shutil.copytree(old, self.home / str(self.lives))
        self.store.close()
        shutil.rmtree(old)
        self.store = self.open(self.home / str(self.lives))

    @invariant()
    def same_blocks_in_the_same_order(self) -> None:
        self.store.check_invariants()
        expected = sorted(self.model.values(), key=lambda block: block.tokens)
        assert self.store.blocks() == expected

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.home)


TestStoreAgainstDictionary = StoreAgainstDictionary.TestCase
TestStoreAgainstDictionary.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, derandomize=True
)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_no_page_crashes_the_parsers(data: bytes, nonce: int) -> None:
    page = data.ljust(PAGE, b"\1")
    assert parse_record(page, nonce=nonce) is None
    try:
        assert parse_file_page(page) is None
    except OtherVersionError:
        raise AssertionError("a page without its checksum was believed") from None


def filled_folder(folder: Path) -> dict[bytes, bytes]:
    """Make a store with blocks in every file; return their payloads."""
    store = open_store(folder)
    held: dict[bytes, bytes] = {}
    for version in range(16):
        block = make_block(f"n{version}", version)
        data = payload(f"n{version}", block)
        store.put(block, memoryview(data))
        held[block.key] = data
    store.close()
    return held


DAMAGE = st.lists(
    st.tuples(
        st.integers(0, FILES - 1),
        st.integers(0, FILE - 1),
        st.binary(min_size=1, max_size=64) | st.just(bytes(PAGE)) | st.just(b"TKVBLK02"),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(damage=DAMAGE, cut=st.none() | st.tuples(st.integers(0, FILES - 1), st.integers(0, FILE)))
def test_no_bytes_in_the_files_crash_the_opener_or_yield_a_wrong_block(
    damage: list[tuple[int, int, bytes]], cut: tuple[int, int] | None
) -> None:
    with tempfile.TemporaryDirectory(prefix="tierkv-l4-") as home:
        folder = Path(home) / "l4"
        held = filled_folder(folder)
        for file, at, data in damage:
            with segment_path(folder, file).open("r+b") as opened:
                opened.seek(at)
                opened.write(data[: FILE - at])
        if cut is not None:
            with segment_path(folder, cut[0]).open("r+b") as opened:
                opened.truncate(cut[1])
        check_store(folder, held)


def check_store(folder: Path, held: dict[bytes, bytes]) -> None:
    try:
        store = open_store(folder)
    except ConfigError:
        return
    for block in store.blocks():
        try:
            assert read(store, block) == held[block.key]
        except CacheError:
            assert not store.exists(block.key)
    fresh = make_block("fresh", 2)
    store.put(fresh, memoryview(payload("fresh", fresh)))
    assert read(store, fresh) == payload("fresh", fresh)
    store.check_invariants()
    store.close()
