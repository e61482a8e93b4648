"""Small chat templates that write calls of tools as families of models do."""

from __future__ import annotations

from tierkv.dbfront.tokens.chat_template import ChatTemplate

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

MARKED = (
    "{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}"
    "</tool_response>\n{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '<tool_call>{{ \'\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n' }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Text marks around JSON, as Hermes and Qwen write."""

BARE = (
    "{{ bos_token }}{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""JSON without marks, one call, as Llama 3 writes."""

LISTED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}<|system|>{{ tools | tojson }}{% endif %}<|user|>{{ m.content }}"
    "{% elif m.tool_calls %}<|assistant|>[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}"
    "{% elif m.role == 'tool' %}<|user|>{{ m.tool_call_id }}: {{ m.content }}"
    "{% else %}<|{{ m.role }}|>{{ m.content + (eos_token if m.role == 'assistant' else '') }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A list with identifiers of nine letters, as Mistral writes."""

FENCED = (
    "{{ bos_token }}{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{{ m.content }}{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}<|call|>"
    "{{ call['function']['name'] + '\n```json\n' + call['function']['arguments'] + '\n```' }}"
    "{{ '' if loop.last else '\n' }}{% endfor %}<|end|>{% endif %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Arguments as text, fenced, as DeepSeek writes."""

ELEMENTS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>"
    "{% for key, value in call.function.arguments | items %}<{{ key }}>{{ value }}{% endfor %}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""An element for each argument: a form that can't be learned."""

THINKING = MARKED.replace(
    "{{ m.content }}{% for call", "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>"
    "\n\n{% endif %}{{ m.content }}{% for call"
)  # fmt: skip
"""The last answer begins with an empty thought, as Qwen 3 writes."""

LEARNED = {"marked": MARKED, "bare": BARE, "listed": LISTED, "fenced": FENCED, "think": THINKING}


def template(source: str | None) -> ChatTemplate:
    """Compile a template."""
    return ChatTemplate(source, special_tokens=SPECIALS)
