from __future__ import annotations

import pytest

from tierkv.sql.text.durations import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1 hour", 3600.0), ("90 s", 90.0), ("1.5h", 5400.0), ("2 days 03:04:05.5", 183845.5),
        ("01:00:00", 3600.0), ("0 s", 0.0), (" 1 day  2 min ", 86520.0), ("3 WEEKS", 1814400.0),
        ("100:00:01", 360001.0),
    ],
)  # fmt: skip
def test_times_as_databases_write_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "soon", "1", "1 month", "-1 hour", "1 hour ago", ".", "1:2:3"]
)
def test_other_text_is_none(text: str) -> None:
    assert seconds_of(text) is None
