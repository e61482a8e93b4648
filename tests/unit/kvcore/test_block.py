"""The block value: what rests of it, which parts are shared, and its bytes in files.

The digests were made by the release before BlockSpec. A change of them needs a new layout version:
a node that starts over older files must find the blocks there, or drop them.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from tierkv.dmp.segment.geometry import SLOT_HEADER_BYTES, Geometry
from tierkv.dmp.segment.segment_file import open_segment, scan_segment
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.wire.messages import Put
from tierkv.kvcore.block import BlockSpec, Expectation, Outlook, Owner, RangeShape
from tierkv.kvcore.ids import BlockKey
from tierkv.storage.disk.segment_format import Record, pack_record, parse_record

BLOCK = BlockSpec(
    BlockKey(bytes(range(16))),
    BlockKey(bytes(range(16, 32))),
    64,
    RangeShape(24_000, 2),
    Owner("qwen3-32b", "ann", "chat"),
    Outlook(Expectation.TURN, 3.5, depth=4, tail=True),
)


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def test_what_rests_has_neither_session_nor_outlook() -> None:
    resting = BLOCK.at_rest()
    assert resting == BlockSpec(
        BLOCK.key, BLOCK.parent, 64, BLOCK.ranges, Owner("qwen3-32b", "ann")
    )
    assert resting.at_rest() is resting


def test_blocks_of_one_owner_share_it() -> None:
    first, second = (Put.unpack(Put([BLOCK]).pack()).puts[0] for _ in range(2))
    assert first == second == BLOCK
    assert first.owner is second.owner and first.ranges is second.ranges


def test_a_record_of_an_older_release_is_read() -> None:
    page = pack_record(Record(BLOCK, 7, bytes(range(32, 48))), nonce=9)
    assert digest(page) == "c3abe2607b6fc44bda462c1862d27aed"
    found = parse_record(page, nonce=9)
    assert found == Record(BLOCK.at_rest(), 7, bytes(range(32, 48)))


def test_a_slot_of_an_older_release_is_found(tmp_path: Path) -> None:
    shape = Geometry.of(extent_count=2, extent_bytes=256 << 10)
    segment = open_segment(tmp_path / "node.seg", shape)
    segment.set_extent_size(0, 48 << 10)
    segment.write_checksums(3, 48 << 10, [11, 12])
    segment.headers.write(Slot(3, 8, BLOCK, SlotState.SEALED), order=5)
    at = shape.header_offset(3)
    header = bytes(segment.memory[at : at + SLOT_HEADER_BYTES])
    assert digest(header) == "dd65f34d89a51f70400afdd5ea35b88a"
    assert scan_segment(segment).sealed.block(0) == BLOCK.at_rest()
    segment.close()
