"""How models write calls, learned from chat templates; conversations with calls, as models read."""

from __future__ import annotations

import json

import pytest

from tests.tool_templates import BARE, ELEMENTS, LEARNED, LISTED, template
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.tool_conversation import written_calls
from tierkv.dbfront.tool_calls.call_format import FALLBACK, CallId, short_id
from tierkv.dbfront.tool_calls.tool import Tool, ToolCall
from tierkv.kvcore.errors import UdfArgumentError

WEATHER = Tool("get_weather", "Weather of a city", '{"type": "object", "properties": {"city": {}}}')
CALLS = (
    ToolCall("abcdefgh1", "get_weather", '{"city": "Zürich", "days": [1, 2]}'),
    ToolCall("abcdefgh2", "stop", "{}"),
)
ASKED = (Message("user", "Where?"),)


@pytest.mark.parametrize("name", LEARNED)
def test_a_call_written_by_the_template_is_a_call_written_in_the_learned_format(name: str) -> None:
    """The next turn's prompt therefore continues the tokens of the answer."""
    model = template(LEARNED[name])
    form = model.call_format
    assert not form.is_fallback
    for calls in (CALLS[:1], CALLS) if form.separator else (CALLS[:1],):
        # The format's own identifiers: written_calls writes zeros.
        calls = tuple(ToolCall("000000000", call.name, call.arguments) for call in calls)
        talk = (*ASKED, Message("assistant", "", calls), Message("user", "And?"))
        before = model.render(ASKED, tools=[WEATHER] if name != "listed" else ())
        whole = model.render(talk, tools=[WEATHER], add_generation_prompt=False)
        assert whole.startswith(f"{before}{written_calls(calls, form)}</s>"), name


def test_what_templates_write_around_calls() -> None:
    listed = template(LISTED).call_format
    assert listed.tail == (', "id": "', CallId(), '"}]') and listed.has_ids
    assert listed.separator == (', "id": "', CallId(), '"}, {"name": "')
    assert listed.marker == "[TOOL_CALLS]"
    bare = template(BARE).call_format
    assert (bare.separator, bare.marker, bare.has_ids) == (None, "", False)
    assert template(LEARNED["fenced"]).call_format.text_arguments
    assert template(LEARNED["think"]).call_format == template(LEARNED["marked"]).call_format


@pytest.mark.parametrize("source", [None, ELEMENTS, "{{ messages[0].content }}", "{{ 1 // 0 }}"])
def test_other_templates_get_the_fallback(source: str | None) -> None:
    assert template(source).call_format is FALLBACK


def test_a_template_without_tools_gets_them_as_text() -> None:
    model = template(None)
    talk = (
        Message("system", "Be kind."),
        *ASKED,
        Message("assistant", "Wait.", CALLS),
        Message("tool", "sunny", tool_call_id="abcdefgh1"),
        Message("tool", "stopped", tool_call_id="abcdefgh2"),
    )
    text = model.render(talk, tools=[WEATHER])
    system, user, assistant, results = (
        text.index(part) for part in ("system: ", "user: Where?", "assistant: Wait.", "user: <tool")
    )
    assert system < text.index(json.dumps(WEATHER.to_json())) < user < assistant < results
    assert f"Wait.\n{written_calls(CALLS)}" in text
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nstopped\n</tool_response>"
    assert text.count("user: ") == 2 and results in text


def test_a_template_without_system_messages_gets_tools_in_the_first_message() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = template(source).render(ASKED, tools=[WEATHER])
    assert text.startswith("[user]Where?\n\nYou can call") and "get_weather" in text


def test_identifiers_of_clients_fit_templates_that_want_nine_letters() -> None:
    model = template(LISTED)
    call = ToolCall("call_0123456789", "stop", "{}")
    talk = (
        *ASKED,
        Message("assistant", "", (call,)),
        Message("tool", "done", tool_call_id=call.call_id),
    )
    text = model.render(talk, tools=[WEATHER])
    short = short_id(call.call_id)
    assert len(short) == 9 and text.count(short) == 2 and call.call_id not in text
    assert short_id("abcdefgh1") == "abcdefgh1"


@pytest.mark.parametrize("arguments", ["[1]", "{", "nonsense"])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    talk = (*ASKED, Message("assistant", "", (ToolCall("c1", "stop", arguments),)))
    for source in (None, LISTED):
        with pytest.raises(UdfArgumentError, match="'c1'"):
            template(source).render(talk)
