"""Events out of bytes: however the bytes are cut, whatever line ends texts hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.integrations.remote.http import EventDecoder
from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError

TEXTS = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(TEXTS, max_size=5), st.data())
def test_events_come_out_whole_however_bytes_are_cut(texts: list[str], data: st.DataObject) -> None:
    stream = b"".join(f"data: {text}\n\n".encode() for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder, got = EventDecoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.push(stream[start:stop])
    assert got == texts


def test_other_line_ends_are_text() -> None:
    assert EventDecoder().push("data: a\u2028b\x85c\x0bd\n\n".encode()) == ["a\u2028b\x85c\x0bd"]


def test_comments_names_and_carriage_returns_are_passed_over() -> None:
    sent = b": ping\r\n\r\nevent: x\r\nid: 7\r\ndata:1\r\ndata: 2\r\n\r\n"
    assert EventDecoder().push(sent) == ["1\n2"]


def test_what_never_ends_or_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENGINE_REPLY_BYTES", 64)
    with pytest.raises(RemoteProtocolError, match="exceeds 64 bytes"):
        EventDecoder().push(b"data: " + b"x" * 100)
    decoder = EventDecoder()
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        for _ in range(20):
            decoder.push(b"data: 12345678\n")
    with pytest.raises(RemoteProtocolError, match="UTF-8"):
        EventDecoder().push(b"data: \xff\n\n")
