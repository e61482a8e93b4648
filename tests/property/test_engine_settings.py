"""Whatever an engine is told of the pool: settings, or a refusal in words that can be printed."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierkv.integrations.engine_report import Complaints
from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError

NAMES = st.sampled_from([*PoolAccess.__dataclass_fields__, "pol", "", "\ud800", "mine"])
TEXTS = st.text(st.characters(), max_size=30) | st.sampled_from(
    ["a:1", "a:1,b:2", "[::1]:7401", "a:99999", ":1", "auto", "tcp", "x" * 16, "~nobody-here/x"]
)
VALUES = TEXTS | st.integers() | st.booleans() | st.none() | st.lists(TEXTS, max_size=3)
VALUES |= st.floats() | st.binary(max_size=5) | st.dictionaries(TEXTS, TEXTS, max_size=2)


@given(st.dictionaries(NAMES, VALUES, max_size=5))
@example({"pool": "a:1", "secret": "\ud800" * 16})
@example({"pool": "a:1", "token_file": "a\x00b"})
@example({"pool": "a:1", "token_file": "~nobody-here/x"})
@settings(max_examples=300)
def test_anything_is_settings_or_a_refusal(told: dict[str, Any]) -> None:
    try:
        read = PoolAccess.read(told, also=("mine",))
    except ConfigError as refused:
        assert refused.message
        return
    assert read.pool or read.meta
    assert 1 <= read.threads <= 64 and read.timeout_ms >= 10


@given(
    st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from(["complain", "hold", "settle"])), max_size=99)
)
def test_any_complaint_can_be_shown(said: list[tuple[str, str, str]]) -> None:
    complaints = Complaints()
    for code, text, act in said:
        if act == "settle":
            complaints.settle(code)
        else:
            getattr(complaints, act)(code, text, hint=text)
        notes = complaints.notes()
        assert len(notes) < limits.MAX_NOTES
        for note in notes:
            assert note.isprintable() and len(note) <= limits.MAX_REASON_CHARS
            note.encode()
    assert all(count > 0 for _, count in complaints.counts())
