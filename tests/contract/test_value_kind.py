"""What every ValueKind does, numbered as in kvcore/value_kinds.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tierkv.kvcore.request import BlendSelector
from tierkv.kvcore.value_kinds import (
    Duration,
    Flag,
    Number,
    OneOf,
    Text,
    Texts,
    ValueKind,
    Whole,
)


class Case(NamedTuple):
    """A kind, equal values in JSON and as text, and what is no such value."""

    kind: ValueKind
    equal: tuple[tuple[Any, str], ...]
    bad_json: tuple[Any, ...]
    bad_text: tuple[str, ...]


CASES = [
    Case(
        Number(0, 2),
        ((0, "0"), (1.5, "1.5"), (2, "2.0")),
        (-0.1, 2.1, float("nan"), "1", True, None, [1]),
        ("-0.1", "2.1", "nan", "inf", "one", ""),
    ),
    Case(Number(0, 1, above_low=True), ((1, "1"),), (0, 1.5), ("0", "1.5")),
    Case(
        Whole(-5, 5),
        ((-5, "-5"), (0, "0"), (5, "5")),
        (-6, 6, 1.0, "1", False, None),
        ("-6", "6", "1.5", "x", ""),
    ),
    Case(Whole(), ((1 << 80, str(1 << 80)),), (0.5,), ("0.5",)),
    Case(
        Flag(),
        ((True, "on"), (True, "TRUE"), (False, "off"), (False, "0")),
        (1, 0, "on", None),
        ("maybe", "", "2"),
    ),
    Case(
        OneOf(tuple(BlendSelector)),
        (("hkvd", "HKVD"), ("query", "query")),
        ("HKVD", "other", 1, None, ["hkvd"]),
        ("other", ""),
    ),
    Case(Text(), (("any", "any"), ("", "")), (1, None, ["any"]), ()),
    Case(
        Texts(2, 5),
        (("one", "one"), (["three"], "three")),
        ("", [""], ["a", "b", "c"], ["sixsix"], ["a", 1], 1, None),
        ("", "sixsix"),
    ),
    Case(
        Duration(most_ms=86_400_000),
        ((0, "0"), (500, "500ms"), (30_000, "30 s"), (120_000, "2min"), (86_400_000, "24h")),
        (-1, 86_400_001, 0.5, "30s", None),
        ("-1", "25h", "9" * 400, "2 weeks", "s", ""),
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: type(case.kind).__name__)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def test_1_json_and_text_of_one_meaning_are_equal_values(case: Case) -> None:
    for value, text in case.equal:
        found = case.kind.from_json(value)
        assert found == case.kind.from_text(text) and type(found) is type(case.kind.from_text(text))


def test_2_what_is_no_such_value_is_refused_with_the_end_of_a_sentence(case: Case) -> None:
    for value in case.bad_json:
        with pytest.raises(ValueError, match=r"^must "):
            case.kind.from_json(value)
    for text in case.bad_text:
        with pytest.raises(ValueError, match=r"^must "):
            case.kind.from_text(text)
