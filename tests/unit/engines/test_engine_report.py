"""Complaints: one line in the log per code, every one counted, texts fit to be shown."""

from __future__ import annotations

import logging

import pytest

from tierkv.integrations.engine_report import Complaints, clean_text
from tierkv.kvcore import limits


def test_it_is_said_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    with caplog.at_level(logging.WARNING):
        for n in range(3):
            complaints.complain("pool_full", f"no room for {n}", hint="More memory.")
    assert caplog.messages == ["tierkv: pool_full: no room for 0. More memory"]
    assert complaints.counts() == (("pool_full", 3),)
    assert complaints.notes() == ("pool_full (3): no room for 2. More memory",)


def test_what_lasts_counts_once_until_it_is_settled(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    with caplog.at_level(logging.WARNING):
        complaints.hold("pool_down", "refused")
        complaints.hold("pool_down", "timed out")
        assert complaints.notes() == ("pool_down (1): timed out",)
        complaints.settle("pool_down")
        assert complaints.notes() == ()
        complaints.hold("pool_down", "refused")
    assert complaints.counts() == (("pool_down", 2),)
    assert len(caplog.messages) == 1


def test_texts_are_one_bounded_printable_line() -> None:
    complaints = Complaints()
    complaints.complain("Odd\nCode!", "a\x00b\ud800\nc" + "x" * 5_000)
    (note,) = complaints.notes()
    assert note.startswith("odd_code_ (1): a?b??c") and len(note) == limits.MAX_REASON_CHARS
    assert clean_text("größe 模型") == "größe 模型"
    note.encode()


def test_the_number_of_codes_is_bounded() -> None:
    complaints = Complaints()
    for n in range(500):
        complaints.complain(f"code_{n}", "text")
    assert len(complaints.notes()) < limits.MAX_NOTES
    assert sum(count for _, count in complaints.counts()) == 500
    assert dict(complaints.counts())["other"] > 400
