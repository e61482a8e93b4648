"""Grammars of answers that may call tools: what the compiler lets a model write."""

from __future__ import annotations

import json
from functools import lru_cache

import llguidance
import pytest
from tokenizers import Tokenizer

from tests.fix_text import byte_tokenizer
from tests.tool_templates import LEARNED, template
from tierkv.compute.engine.guides import GRAMMAR_HEAD, check_guide, parser_limits
from tierkv.dbfront.tokens.tool_conversation import written_calls
from tierkv.dbfront.tool_calls.call_format import CallFormat, call_grammar
from tierkv.dbfront.tool_calls.tool import Tool, ToolCall, ToolChoice, ToolUse

MARKS = ["[TOOL_CALLS]", "<|calls|>", "<|call|>", "<|end|>", "<tool_call>"]
WEATHER = Tool(
    "get_weather",
    "",
    json.dumps(
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        }
    ),
)
STOP = Tool("stop", "", '{"type": "object", "properties": {}}')
GOOD = ToolCall("", "get_weather", '{"city": "Zürich", "days": 3}')
END = ToolCall("", "stop", "{}")


@lru_cache
def tokenizer(special: bool) -> tuple[Tokenizer, llguidance.LLTokenizer]:
    """A byte tokenizer; with marks of calls as special tokens, or as text."""
    made = byte_tokenizer()
    if special:
        made.add_special_tokens(MARKS)
    size = made.get_vocab_size(with_added_tokens=True)
    return made, llguidance.LLTokenizer(made.to_str(), n_vocab=size, eos_token=[1])


def refused_at(grammar: str, text: str, *, special: bool) -> int | None:
    """Return how many letters were taken before one was refused; None if the answer may end."""
    made, compiled = tokenizer(special)
    check_guide(grammar)
    lark = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(compiled, lark, log_level=0, limits=parser_limits())
    ids = made.encode(text, add_special_tokens=False).ids
    for at, token in enumerate(ids):
        if not matcher.consume_token(token):
            return len(made.decode(ids[:at], skip_special_tokens=False))
    return None if matcher.is_accepting() else len(text)


def grammar_for(
    name: str, *, special: bool, schema: str = "", **use: object
) -> tuple[str, CallFormat]:
    form = template(LEARNED[name]).call_format
    specials = {token: i for i, token in enumerate(MARKS, 261)} if special else {}
    tools = ToolUse((WEATHER, STOP), **use)  # type: ignore[arg-type]
    return call_grammar(form, tools, specials, answer_schema=schema), form


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_calls_are_held_to_names_and_schemas_and_text_is_free(name: str, special: bool) -> None:
    grammar, form = grammar_for(name, special=special)
    assert grammar.startswith(GRAMMAR_HEAD)
    assert refused_at(grammar, "", special=special) is None
    assert refused_at(grammar, "Sunny, I think: [a] <b>", special=special) is None
    one = written_calls([GOOD], form)
    assert refused_at(grammar, one, special=special) is None
    if form.marker:
        assert refused_at(grammar, f"Let me see.{one}", special=special) is None
    for bad, wrong in (
        (ToolCall("", "get_whether", "{}"), "hether"),
        (ToolCall("", "get_weather", '{"town": ""}'), "town"),
        (ToolCall("", "get_weather", '{"city": 1}'), "1}"),
    ):
        text = written_calls([bad], form)
        assert refused_at(grammar, text, special=special) == text.index(wrong)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_required_named_and_single_calls(name: str, special: bool) -> None:
    grammar, form = grammar_for(name, special=special, choice=ToolChoice.REQUIRED)
    assert refused_at(grammar, "Sunny", special=special) == 0
    assert refused_at(grammar, written_calls([END], form), special=special) is None
    two = written_calls([GOOD, END], form)
    if form.separator:
        assert refused_at(grammar, two, special=special) is None
        single, _ = grammar_for(name, special=special, parallel=False)
        assert refused_at(single, two, special=special) is not None
    only, _ = grammar_for(name, special=special, only=("stop",), choice=ToolChoice.REQUIRED)
    assert refused_at(only, written_calls([END], form), special=special) is None
    assert refused_at(only, written_calls([GOOD], form), special=special) is not None


def test_an_answer_with_a_schema_is_json_or_calls() -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    grammar, form = grammar_for("marked", special=False, schema=schema)
    assert refused_at(grammar, '{"a":1}', special=False) is None
    assert refused_at(grammar, written_calls([GOOD, END], form), special=False) is None
    assert refused_at(grammar, "Sunny", special=False) == 0


def test_a_keyword_that_cant_be_followed_matters_only_to_strict_tools() -> None:
    form = template(LEARNED["marked"]).call_format
    parameters = '{"type": "object", "unevaluatedProperties": false}'
    loose = ToolUse((Tool("a", "", parameters),))
    check_guide(call_grammar(form, loose, {}))
    strict = ToolUse((Tool("a", "", parameters, strict=True),))
    with pytest.raises(Exception, match="unevaluatedProperties"):
        check_guide(call_grammar(form, strict, {}))
