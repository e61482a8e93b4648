from __future__ import annotations

import pytest

from dmp.frame import HEADER, HEADER_BYTES, MAGIC, MAX_HEAD_BYTES, FrameType, pack_header
from dmp.frame import parse_header as parse
from kvcore import limits
from kvcore.errors import RemoteProtocolError


def raw(**changes: object) -> bytes:
    fields = {"magic": MAGIC, "version": 2, "kind": 1, "flags": 0, "id": 7, "head": 3, "load": 0}
    return HEADER.pack(*(fields | changes).values())


def test_the_bytes_are_as_documented() -> None:
    header = pack_header(FrameType.READ, 7, head_bytes=3)
    assert header.hex() == "544b564402070000070000000300000000000000"
    header = pack_header(FrameType.WRITE, 7, head_bytes=3, payload_bytes=258)
    assert header.hex() == "544b564402040000070000000300000002010000"
    assert HEADER_BYTES == 20


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
