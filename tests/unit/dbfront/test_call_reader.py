"""Calls are found in the text of an answer, however the text is cut, and text stays text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tool_templates import LEARNED, template
from tierkv.dbfront.tokens.tool_conversation import written_calls
from tierkv.dbfront.tool_calls.call_format import FALLBACK, CallFormat
from tierkv.dbfront.tool_calls.reader import CallReader
from tierkv.dbfront.tool_calls.tool import ToolCall, joined_calls

FORMATS = {name: template(source).call_format for name, source in LEARNED.items()} | {
    "fallback": FALLBACK
}
NAMES = ("get_weather", "a-b.c", "stop")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=2)
)
CALLS = st.builds(
    lambda name, value: ToolCall("", name, json.dumps(value, ensure_ascii=False)),
    st.sampled_from(NAMES),
    st.dictionaries(st.text(), VALUES, max_size=3),
)


def read(form: CallFormat, pieces: Iterable[str]) -> tuple[str, tuple[ToolCall, ...]]:
    numbers = itertools.count(1)
    reader = CallReader(form, NAMES, lambda: f"id{next(numbers)}")
    readings = [reader.push(piece) for piece in pieces]
    readings.append(reader.flush())
    calls = joined_calls(delta for reading in readings for delta in reading.calls)
    return "".join(reading.text for reading in readings), calls


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    calls = data.draw(st.lists(CALLS, min_size=1, max_size=3 if form.separator else 1))
    # A call without a mark begins an answer; a text that itself begins a call is no text.
    texts = st.text(alphabet="ab {}\n.") if form.marker else st.just("")
    text = data.draw(texts).rstrip()
    written = text + written_calls(calls, form)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    pieces = [written[a:b] for a, b in itertools.pairwise([0, *cuts, len(written)])]
    got_text, got = read(form, pieces)
    assert got_text == text
    assert [(call.name, json.loads(call.arguments)) for call in got] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]
    assert [call.call_id for call in got] == [f"id{n}" for n in range(1, len(calls) + 1)]


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(alphabet=' \n<tol_ca>[T]{"name:}') | st.text())
def test_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert read(FORMATS[name], text) == (text, ())


@pytest.mark.parametrize(
    "text",
    [
        'Use <tool_call> like this: <tool_call>{"name": "x"}',
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "parameters": {}}',
        '<tool_call>\n{"name": "stop", "arguments": [1]}',
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    assert read(FALLBACK, text) == (text, ())


def test_whitespace_does_not_matter_and_what_follows_calls_is_dropped() -> None:
    text = 'Well. \n\n<tool_call>{"name" : "stop","arguments":  {"a": 1} } </tool_call>\nDone!'
    assert read(FALLBACK, text) == ("Well.", (ToolCall("id1", "stop", '{"a": 1}'),))


def test_an_answer_cut_in_the_middle_leaves_the_part_of_its_call() -> None:
    text = '<tool_call>\n{"name": "stop", "arguments": {"a": "b'
    assert read(FALLBACK, text) == ("", (ToolCall("id1", "stop", '{"a": "b'),))
    assert read(FALLBACK, text[:20]) == (text[:20], ())


def test_a_call_cut_off_before_its_arguments_is_no_text() -> None:
    for text in ('Well. <tool_call>\n{"name": "st', "<tool_call>"):
        reader = CallReader(FALLBACK, NAMES, str)
        assert (
            reader.push(text).text + reader.flush(cut=True).text == text.partition("<")[0].strip()
        )
    reader = CallReader(FALLBACK, NAMES, str)
    assert reader.push("a <tool").text + reader.flush(cut=True).text == "a <tool"


def test_long_whitespace_costs_no_recursion() -> None:
    text = "a" + " " * 5_000 + "<tool_call>" + " " * 5_000 + "b"
    assert read(FALLBACK, text) == (text, ())
