"""A template rendered once gives what Jinja gives for every text, or is not rendered once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.dbfront.test_tokenizer import LLAMA3, LOOPS, QWEN
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.chat_template import PLAIN_TEMPLATE, ChatTemplate
from tierkv.dbfront.tokens.template_form import TextCopies

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ message['content'].strip() + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """{% set first = '' %}{% if messages[0].role == 'system' %}
{% set first = messages[0].content + '\n' %}{% set messages = messages[1:] %}{% endif %}
{% for m in messages %}{% set text = (first if loop.first else '') + (m.content | trim) %}
<turn>{{ m.role }} {{ text }}
{% endfor %}{{ messages[-1].content if messages | length > 1 else '' }}"""
EMPTIES = """{% for m in messages %}{% if m.content and not m.tool_calls %}
{{ m.content }}{% endif %};{% endfor %}"""
COPYING = {
    "plain": (PLAIN_TEMPLATE, TextCopies.ALWAYS),
    "llama": (LLAMA3, TextCopies.ALWAYS),
    "qwen": (QWEN, TextCopies.ALWAYS),
    "mistral": (MISTRAL, TextCopies.ALWAYS),
    "gemma": (GEMMA, TextCopies.ALWAYS),
    "empties": (EMPTIES, TextCopies.NOT_EMPTY),
}
DEPENDING = {
    "json": LOOPS,
    "date": "{{ strftime_now('%S') }}{{ messages[0].content }}",
    "length": "{{ messages[0].content | length }}",
    "equal": "{% for m in messages %}{% if m.content == 'a' %}x{% endif %}{% endfor %}",
    "inside": "{{ 'x' if 'a' in messages[0].content else 'y' }}",
    "split": "{{ messages[0].content.split('a')[-1] }}",
    "method": "{{ messages[0].get('content') }}",
    "items": "{% for k, v in messages[0].items() %}{{ v }}{% endfor %}",
    "alias": "{% set c = messages[0].content %}{% if c == 'a' %}x{% endif %}",
    "or": "{% set m = messages[0] or {} %}{{ m.content | upper }}",
    "whole": "{{ (messages[0].content + ' ') | trim }}",
    "neighbour": "{% for m in messages %}{{ loop.previtem.content | upper }}{% endfor %}",
    "macro": "{% macro f(c) %}{{ c | upper }}{% endmacro %}{{ f(messages[0].content) }}",
    "hidden": "{% macro f() %}{{ messages[0].content | upper }}{% endmacro %}{{ f() }}",
    "key": "{% set k = 'content' %}{{ messages[0][k] | upper }}",
    "namespace": "{% set n = namespace() %}{% set n.c = messages[0].content %}{{ n.c | upper }}",
    "block": "{% set c %}{{ messages[0].content }}{% endset %}{{ c | upper }}",
    "filter": "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "call": "{% set d = {'a': messages[0].content} %}{{ d.a | upper }}",
    "index": "{{ [1, 2][messages[0].content | length] }}",
    "later": "{% for m in messages %}{{ x | upper }}{% endfor %}{% set x = messages[0].content %}",
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = st.text() | st.sampled_from(["", " ", " a ", "\u2003", "{{ x }}", "a\n", "\ue0000\ue001"])


@pytest.mark.parametrize("source", [s for s, _ in COPYING.values()], ids=list(COPYING))
@given(first=st.tuples(TEXTS, TEXTS, TEXTS), texts=st.tuples(TEXTS, TEXTS, TEXTS))
def test_a_kept_rendering_equals_jinjas(
    source: str, first: tuple[str, str, str], texts: tuple[str, str, str]
) -> None:
    roles = ("user", "assistant", "user")
    template = ChatTemplate(source, special_tokens=SPECIALS)
    for contents in (first, texts):
        talk = [Message(role, text) for role, text in zip(roles, contents, strict=True)]
        assert template.render(talk) == template._render(roles, contents, True)


@pytest.mark.parametrize(("source", "copies"), COPYING.values(), ids=list(COPYING))
def test_templates_of_known_families_are_rendered_once(source: str, copies: TextCopies) -> None:
    template = ChatTemplate(source, special_tokens=SPECIALS)
    talk = [Message("user", " a "), Message("assistant", "b"), Message("user", "c")]
    text = template.render(talk)
    assert template._copies is copies and len(template._skeletons) == 1
    template._render = None  # type: ignore[method-assign,assignment]
    assert template.render(talk) == text


@pytest.mark.parametrize("source", DEPENDING.values(), ids=list(DEPENDING))
def test_templates_that_look_at_a_text_are_rendered_each_time(source: str) -> None:
    assert ChatTemplate(source, special_tokens=SPECIALS)._copies is TextCopies.NEVER
