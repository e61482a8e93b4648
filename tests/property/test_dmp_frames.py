"""The data-plane codec: what is packed comes back; any other bytes are RemoteProtocolError."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_dmp import spec_of
from tierkv.dmp.pool_node import PoolNodeStats
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import parse_header
from tierkv.dmp.wire.packing import Packer
from tierkv.dmp.wire.range_codec import (
    MAX_RANGES,
    pack_ranges,
    pack_sums,
    unpack_ranges,
    unpack_sums,
)
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Expectation, Location, Outlook, Owner, RangeShape, Tier
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import TierStats
from tierkv.kvwire.frames import HEADER_BYTES

NODE = NodeId("dmp-a")
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
keys = st.binary(min_size=16, max_size=16).map(BlockKey)
names = st.sampled_from(["", "demo", "org/model-1.5B:q8", "x" * 128])
texts = st.text(max_size=40)
client_ids = st.text("0123456789abcdef", max_size=64)
ranges = st.tuples(
    u64, u32, u64, u64, st.integers(0, limits.MAX_LAYERS - 1), st.integers(0, limits.MAX_SLOT_BYTES)
)
locations = st.builds(Location, st.just(NODE), u64.map(Incarnation), u32, u64, u64, u64)
puts = st.builds(
    BlockSpec,
    key=keys,
    parent=keys,
    tokens=st.integers(0, 4096),
    ranges=st.builds(RangeShape, st.integers(1, 1 << 20), st.integers(1, limits.MAX_LAYERS)),
    owner=st.builds(Owner, names, names, names),
    outlook=st.builds(
        Outlook,
        st.sampled_from(Expectation),
        st.none() | st.floats(0, 1e6),
        st.integers(0, limits.MAX_CHAIN_BLOCKS),
        st.booleans(),
    ),
).filter(lambda put: put.key != put.parent)
seconds = st.floats(0, 1e6)


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=5)


MESSAGES: dict[type, tuple[st.SearchStrategy[Any], Callable[[bytes], Any]]] = {
    m.Hello: (st.builds(m.Hello, texts, client_ids), m.Hello.unpack),
    m.Welcome: (
        st.builds(m.Welcome, texts.map(NodeId), texts.map(HostId), u64.map(Incarnation), texts),
        m.Welcome.unpack,
    ),
    m.BlockLookup: (st.builds(m.BlockLookup, lists(keys)), m.BlockLookup.unpack),
    m.Reserve: (st.builds(m.Reserve, seconds, lists(puts)), m.Reserve.unpack),
    m.Ranges: (
        st.builds(m.Ranges, lists(st.builds(m.RangeRef, locations, u32))),
        lambda head: m.Ranges.unpack(head, NODE),
    ),
    m.Put: (st.builds(m.Put, lists(puts)), m.Put.unpack),
    m.Seal: (
        st.builds(m.Seal, lists(st.builds(m.Sealing, locations, lists(u64).map(tuple)))),
        lambda head: m.Seal.unpack(head, NODE),
    ),
    m.Refs: (
        st.builds(m.Refs, lists(locations), seconds),
        lambda head: m.Refs.unpack(head, NODE),
    ),
    m.MaybeRefs: (
        st.builds(m.MaybeRefs, lists(st.none() | locations)),
        lambda head: m.MaybeRefs.unpack(head, NODE),
    ),
    m.Flags: (st.builds(m.Flags, lists(st.booleans())), m.Flags.unpack),
    m.ErrorReply: (st.builds(m.ErrorReply, texts, texts), m.ErrorReply.unpack),
}
fixed = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("kind", list(MESSAGES), ids=lambda kind: kind.__name__)
@fixed
@given(data=st.data())
def test_messages_come_back_and_never_short_or_long(kind: type, data: st.DataObject) -> None:
    values, unpack = MESSAGES[kind]
    message = data.draw(values)
    head = message.pack()
    assert unpack(head) == message
    cut = data.draw(st.integers(0, len(head) - 1))
    with pytest.raises(RemoteProtocolError):
        unpack(head[:cut])
    with pytest.raises(RemoteProtocolError):
        unpack(head + b"\0")


@pytest.mark.parametrize("kind", list(MESSAGES), ids=lambda kind: kind.__name__)
@fixed
@given(data=st.data())
def test_damaged_and_random_messages_are_refused_or_sane(kind: type, data: st.DataObject) -> None:
    values, unpack = MESSAGES[kind]
    head = bytearray(data.draw(values).pack())
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    for raw in (bytes(head), data.draw(st.binary(max_size=300))):
        with contextlib.suppress(RemoteProtocolError):
            unpack(raw)


@fixed
@given(raw=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), lead=st.booleans())
def test_any_header_is_refused_or_within_bounds(raw: bytes, lead: bool) -> None:
    raw = b"TKVD\3" + raw[5:6] + b"\0\0" + raw[8:] if lead else raw
    with contextlib.suppress(RemoteProtocolError):
        header = parse_header(raw)
        assert header.head_bytes <= 4 << 20
        assert header.payload_bytes <= limits.MAX_FRAME_BYTES


@fixed
@given(numbers=st.tuples(*[u64] * 19))
def test_stats_come_back_in_the_order_of_older_nodes(numbers: tuple[int, ...]) -> None:
    head = struct.pack("<19Q", *numbers)
    stats = m.unpack_stats(head)
    assert m.pack_stats(stats) == head
    memory = TierStats(
        Tier.L2,
        capacity_bytes=numbers[0],
        used_bytes=numbers[1],
        blocks_total=numbers[2],
        blocks_used=numbers[3],
        evicted_blocks=numbers[5],
        alloc_failures=numbers[7],
        read_bytes=numbers[8],
        write_bytes=numbers[9],
        demoted_blocks=numbers[10],
    )
    disk = TierStats(
        Tier.L4,
        promoted_blocks=numbers[11],
        capacity_bytes=numbers[12],
        used_bytes=numbers[13],
        blocks_used=numbers[14],
        alloc_failures=numbers[15],
    )
    assert stats == PoolNodeStats(memory, disk, numbers[4], numbers[6], *numbers[16:])


@fixed
@given(refs=st.lists(ranges, min_size=1, max_size=6), data=st.data())
def test_ranges_come_back_and_never_short_or_long(refs: list[Any], data: st.DataObject) -> None:
    head = pack_ranges(refs)
    assert unpack_ranges(head) == refs
    cut = data.draw(st.integers(0, len(head) - 1))
    for wrong in (head[:cut], head + b"\0"):
        with pytest.raises(RemoteProtocolError):
            unpack_ranges(wrong)


@fixed
@given(raw=st.binary(max_size=300), refs=st.lists(ranges, min_size=1, max_size=3), at=u32)
def test_damaged_ranges_are_refused_or_sane(raw: bytes, refs: list[Any], at: int) -> None:
    damaged = bytearray(pack_ranges(refs))
    damaged[at % len(damaged)] ^= 1 << at % 8
    for head in (raw, damaged):
        with contextlib.suppress(RemoteProtocolError):
            for ref in unpack_ranges(head):
                assert ref[4] < limits.MAX_LAYERS and ref[5] <= limits.MAX_SLOT_BYTES


@fixed
@given(sums=st.lists(u64, max_size=9))
def test_checksums_come_back(sums: list[int]) -> None:
    head = pack_sums(sums)
    assert list(unpack_sums(head, len(sums))) == sums
    with pytest.raises(RemoteProtocolError):
        unpack_sums(head, len(sums) + 1)


@pytest.mark.parametrize("count", [0, MAX_RANGES + 1, 2**32 - 1])
def test_a_frame_names_some_ranges_and_not_too_many(count: int) -> None:
    head = count.to_bytes(4, "little") + bytes(40 * min(count, MAX_RANGES + 1))
    with pytest.raises(RemoteProtocolError, match="allowed"):
        unpack_ranges(head)


def test_counts_are_bounded_before_memory_is_taken() -> None:
    head = Packer().pack("I", limits.MAX_FRAME_ITEMS + 1).bytes()
    with pytest.raises(RemoteProtocolError, match="allowed"):
        m.BlockLookup.unpack(head)


@pytest.mark.parametrize(
    "changes",
    [
        {"range_count": 0},
        {"range_count": limits.MAX_LAYERS + 1},
        {"range_bytes": 0},
        {"range_bytes": limits.MAX_SLOT_BYTES, "range_count": 2},
        {"tokens": 1 << 31},
        {"model": "two words"},
        {"tenant": "x" * 129},
        {"session": "two words"},
        {"depth": limits.MAX_CONTEXT_TOKENS + 1},
        {"expected_in_s": float("nan")},
        {"expected_in_s": -2.0},
        {"expectation": 4},
        {"key": bytes(16)},
    ],
)
def test_reservations_out_of_bounds_are_refused(changes: dict[str, Any]) -> None:
    values = {
        "key": BlockKey(b"k" * 16),
        "parent": BlockKey(bytes(16)),
        "range_bytes": 10,
        "range_count": 2,
        "tokens": 64,
    }
    head = m.Reserve(1.0, [spec_of(values | changes)]).pack()
    with pytest.raises(RemoteProtocolError):
        m.Reserve.unpack(head)


def test_a_deadline_must_be_a_duration() -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(RemoteProtocolError, match="no sense"):
            m.Reserve.unpack(m.Reserve(value, []).pack())
