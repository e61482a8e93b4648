"""Frames of locates come out of the buffer as they went in, however the network cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvwire.frames import FrameBuffer
from tierkv.metaserver.rpc.locate_stream import FRAMES, LocateFrame

MOST_BYTES = 1 << 20
heads = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.integers(0, 12_000).map(lambda size: bytes([size % 251]) * size),
        st.just(bytes(700_000)),
    ),
    max_size=6,
)


@given(heads, st.data())
def test_frames_come_out_as_they_went_in(heads: list[bytes], data: st.DataObject) -> None:
    sent = b"".join(
        FRAMES.pack(LocateFrame.LOCATE, number, head_bytes=len(head)) + head
        for number, head in enumerate(heads)
    )
    buffer, at, found = FrameBuffer(FRAMES), 0, []
    while at < len(sent):
        space = buffer.space()
        assert len(space) > 0
        size = min(len(space), len(sent) - at, data.draw(st.sampled_from([1, 19, 4_096, 1 << 20])))
        space[:size] = sent[at : at + size]
        at += size
        buffer.received(size)
        while (frame := buffer.next(most_bytes=MOST_BYTES)) is not None:
            found.append(frame)
    assert [(header.request_id, head) for header, head in found] == list(enumerate(heads))
    assert len(buffer.space()) <= 256 << 10, "a long frame's buffer is given back"


def test_a_frame_longer_than_allowed_is_refused_by_its_header() -> None:
    buffer = FrameBuffer(FRAMES)
    header = FRAMES.pack(LocateFrame.HELLO, 1, head_bytes=5_000)
    buffer.space()[: len(header)] = header
    buffer.received(len(header))
    with pytest.raises(RemoteProtocolError, match="too long"):
        buffer.next(most_bytes=4_096)
