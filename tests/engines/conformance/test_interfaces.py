"""How interfaces.py judges; that it would see a hook that an engine can't call."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.conformance.interfaces import hooks_of, misfits, overridden, refusals


class Base:
    def needs(self, request: object, count: int, extra: object = None, **options: Any) -> int:
        return 0

    @classmethod
    def says(cls, config: dict[str, object]) -> bool:
        return False

    @property
    def role(self) -> str:
        return "base"

    def left(self) -> None:
        return None


def fits(self, request, count, extra=None, more=(), **options): ...
def renames(self, request, number, extra=None, **options): ...
def drops_an_option(self, request, count, **options): ...
def demands_one_more(self, request, count, extra, **options): ...
def takes_no_options(self, request, count, extra=None): ...
def swaps(self, count, request, extra=None, **options): ...


def test_what_takes_every_call_is_accepted() -> None:
    assert refusals(fits, Base.needs) == []


@pytest.mark.parametrize("bad", [renames, demands_one_more, takes_no_options])
def test_what_refuses_a_call_is_named(bad: Any) -> None:
    assert refusals(bad, Base.needs)


def test_an_option_that_vanishes_in_kwargs_by_name_is_refused_by_position() -> None:
    (why,) = refusals(drops_an_option, Base.needs)
    assert "too many positional arguments" in why


def test_arguments_in_another_order_are_refused() -> None:
    assert "order" in refusals(swaps, Base.needs)[0]


def test_kinds_are_compared_and_what_is_left_is_not() -> None:
    Ours = type(
        "Ours", (Base,), {"says": lambda self, config: True, "role": property(lambda self: "us")}
    )
    assert misfits(Ours, Base) == ["says is a method, not a classmethod"]
    assert overridden(Ours, Base) == {"says", "role"}
    assert set(hooks_of(Base)) == {"needs", "says", "role", "left"}
