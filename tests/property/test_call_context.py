"""Context lines can be read back in one way only."""

from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.calls.field_order import render_context

nasty = st.text(st.sampled_from('ab :\n\r\u2028\x85\x0b"\\'), max_size=12)
_ENTRY = re.compile(r'("(?:[^"\\]|\\.)*"|[^:]*): (.*)', re.DOTALL)


def read_back(text: str) -> list[tuple[str, str]]:
    """Undo render_context: a line that does not begin with a space begins a field."""
    found: list[tuple[str, str]] = []
    for entry in re.split(r"\n(?! )", text) if text else []:
        match = _ENTRY.fullmatch(entry)
        assert match is not None, entry
        key = json.loads(match[1]) if match[1].startswith('"') else match[1]
        first, *others = match[2].splitlines(keepends=True) or [""]
        assert all(line.startswith("  ") for line in others)
        found.append((key, first + "".join(line[2:] for line in others)))
    return found


@given(st.dictionaries(nasty, nasty, max_size=5))
def test_fields_come_back_as_they_were(fields: dict[str, str]) -> None:
    assert read_back(render_context(fields, fields)) == list(fields.items())


@given(st.dictionaries(nasty, nasty, max_size=5))
def test_any_order_has_the_same_fields(fields: dict[str, str]) -> None:
    order = sorted(fields, reverse=True)
    assert dict(read_back(render_context(fields, order))) == fields
