"""JSON that is passed on keeps every digit, and says when it can't be passed on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.sql.text.exact_values import ExactNumber, exact_argument, exact_text, exact_value

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@pytest.mark.parametrize("number", ["12345678901234567.01", "1.50", "1e400", "-0.0", "1E-2"])
def test_numbers_are_written_as_they_were_read(number: str) -> None:
    text = f'{{"a":[{number}]}}'
    assert exact_text(exact_value(text)) == text


def test_an_exact_number_is_a_number() -> None:
    assert ExactNumber("0.5") == 0.5
    assert isinstance(exact_value("0.5"), float)


@given(values)
def test_everything_else_is_as_the_standard_library_writes_it(value: object) -> None:
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert exact_text(value) == compact
    assert exact_text(value, comma=", ", colon=": ") == json.dumps(value, ensure_ascii=False)
    assert exact_value(compact) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "too deeply"),
        ('{"a": "\\ud800"}', "unpaired surrogate"),
        ('{"\\uDc00": 1}', "unpaired surrogate"),
        ("{", "Expecting"),
    ],
)
def test_what_cannot_be_sent_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_argument(text)


def test_two_halves_are_a_character() -> None:
    assert exact_argument('"\\ud83d\\ude00"') == "\U0001f600"
