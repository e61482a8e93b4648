from __future__ import annotations

from dataclasses import replace

import pytest

from tierkv.dmp.wire.frame import MAGIC, MAX_HEAD_BYTES, FrameType, pack_header
from tierkv.dmp.wire.frame import parse_header as parse
from tierkv.dmp.wire.messages import Put
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Expectation, Outlook, Owner, RangeShape
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvwire.frames import HEADER, HEADER_BYTES


def raw(**changes: object) -> bytes:
    fields = {"magic": MAGIC, "version": 3, "kind": 1, "flags": 0, "id": 7, "head": 3, "load": 0}
    return HEADER.pack(*(fields | changes).values())


def test_the_bytes_are_as_documented() -> None:
    header = pack_header(FrameType.READ, 7, head_bytes=3)
    assert header.hex() == "544b564403070000070000000300000000000000"
    header = pack_header(FrameType.WRITE, 7, head_bytes=3, payload_bytes=258)
    assert header.hex() == "544b564403040000070000000300000002010000"
    assert HEADER_BYTES == 20


def test_a_put_is_laid_out_as_documented() -> None:
    put = BlockSpec(
        BlockKey(b"k" * 16),
        BlockKey(b"p" * 16),
        64,
        ranges=RangeShape(258, 2),
        owner=Owner("m", "te", "ses"),
        outlook=Outlook(expectation=Expectation.TURN, expected_in_s=1.5, depth=7, tail=True),
    )
    sizes = "02010000000000000200000040000000"
    names = "010002000300"
    future = "070000000102000000000000f83f"
    head = Put([put]).pack().hex()
    texts = b"mteses".hex()
    assert head == "01000000" + "6b" * 16 + "70" * 16 + sizes + names + future + texts
    unknown = Put([replace(put, outlook=replace(put.outlook, expected_in_s=None))]).pack().hex()
    assert unknown == head.replace("000000000000f83f", "000000000000f0bf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"HTTP"}, "not a TierKV"),
        ({"version": 1}, "version 1"),
        ({"kind": 0}, "frame type 0"),
        ({"kind": 63}, "frame type 63"),
        ({"flags": 1}, "flags"),
        ({"head": MAX_HEAD_BYTES + 1}, "too long"),
        ({"kind": 7, "load": 1}, "READ frame carries no payload"),
        ({"kind": 4, "load": limits.MAX_FRAME_BYTES + 1}, "too long"),
    ],
)
def test_a_bad_header_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        parse(raw(**changes))


@pytest.mark.parametrize("changes", [{"kind": 2}, {"head": 5_000}])
def test_a_stranger_may_only_say_a_short_hello(changes: dict[str, object]) -> None:
    assert parse(raw(), trusted=False).type is FrameType.HELLO
    with pytest.raises(RemoteProtocolError, match="short HELLO"):
        parse(raw(**changes), trusted=False)
