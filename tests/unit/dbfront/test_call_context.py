"""How context fields look in a prompt."""

from __future__ import annotations

from tierkv.dbfront.calls.field_order import render_context


def test_one_line_per_field_in_the_order_asked_for() -> None:
    fields = {"product": "lamp", "stars": "4"}
    assert render_context(fields, ("stars", "product")) == "stars: 4\nproduct: lamp"
    assert render_context({}, ()) == ""


def test_a_value_can_not_pass_for_another_field() -> None:
    fields = {"note": "fine\nstars: 1\r\nstars: 2\u2028stars: 3", "stars": "5"}
    assert render_context(fields, ("note", "stars")) == (
        "note: fine\n  stars: 1\r\n  stars: 2\u2028  stars: 3\nstars: 5"
    )


def test_a_break_at_the_end_of_a_value_stays_its_own() -> None:
    assert render_context({"a": "x\n", "b": ""}, ("a", "b")) == "a: x\n  \nb: "


def test_a_key_that_could_be_read_otherwise_is_written_as_json() -> None:
    fields = {"a: b": "c", "a": "b: c", "": "empty", '"a"': "q", " a": "s", "x\ny": "n"}
    assert render_context(fields, fields) == (
        '"a: b": c\na: b: c\n"": empty\n"\\"a\\"": q\n" a": s\n"x\\ny": n'
    )
