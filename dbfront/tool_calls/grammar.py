"""The grammar of an answer with optional calls of tools: known names, arguments of the schema.

Pure. The grammar is text in llguidance's Lark dialect, compiled by compute/engine/guides.py. An
answer is free text up to the first call; only calls follow. Arguments are written with the
separators of the model's chat template. The next turn's prompt therefore repeats the tokens of the
call, and continues with the KV of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tierkv.dbfront.tool_calls.call_format import CallFormat, CallId, Part
from tierkv.dbfront.tool_calls.tool import Tool, ToolChoice, ToolUse
from tierkv.kvcore import limits

_ID: Final = "/[A-Za-z0-9]{9}/"


def call_grammar(
    form: CallFormat, use: ToolUse, specials: Mapping[str, int], *, answer_schema: str = ""
) -> str:
    """Write the grammar.

    Args:
        form: how the model writes calls.
        use: the tools and the caller's choice.
        specials: ids of the model's special tokens, by spelling.
        answer_schema: JSON Schema of an answer without calls; empty: free text.
    """
    lines = ["%llguidance {}"]
    names = []
    for number, tool in enumerate(use.callable):
        names.append(f"call_{number}")
        middle = _literals((tool.name, *form.middle), specials)
        schema = json.dumps(arguments_schema(tool, form), ensure_ascii=False)
        lines.append(f"call_{number}: {middle} args_{number}")
        lines.append(f"args_{number}: %json {schema}")
    lines.append(f"call: {' | '.join(names)}")
    more = ""
    if use.parallel and form.separator is not None:
        separator = _literals(form.separator, specials)
        more = f" ({separator} call){{0,{limits.MAX_TOOL_CALLS - 1}}}"
    calls = f"call{more} {_literals(form.tail, specials)}"
    head = _literals(form.head, specials)
    if use.choice is ToolChoice.REQUIRED:
        return "\n".join([*lines, f"start: {head} {calls}"])
    if answer_schema:
        return "\n".join(
            [*lines, f"answer: %json {answer_schema}", f"start: answer | {head} {calls}"]
        )
    return "\n".join([*lines, *_optional(form, head, calls, specials)])


def _optional(
    form: CallFormat, head: str, calls: str, specials: Mapping[str, int]
) -> Sequence[str]:
    """Write the rules of an answer of text, or of text and then calls."""
    first = form.head[0] if form.head and isinstance(form.head[0], str) else ""
    if form.marker in specials:
        return ["TEXT: /(.|\\n)*/", f"start: TEXT | TEXT {head} {calls}"]
    if form.marker:
        rest = _literals((first.partition(form.marker)[2], *form.head[1:]), specials)
        return [
            "TEXT: /(.|\\n)*/",
            f"begun[lazy]: TEXT {json.dumps(form.marker)}",
            f"start: TEXT | begun {rest} {calls}",
        ]
    letter = re.escape((first.lstrip() or "{")[0])
    return [f"TEXT: /[^{letter}](.|\\n)*/", f'start: "" | TEXT | {head} {calls}']


def _literals(parts: Sequence[Part], specials: Mapping[str, int]) -> str:
    """Write consecutive parts; special tokens by number, neighbouring texts as one."""
    written: list[str] = []
    text = ""
    spelled = re.compile(
        "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)"
    )
    for part in (*parts, None):
        if isinstance(part, str):
            text += part
            continue
        at = 0
        for found in spelled.finditer(text):
            written += [_text(text[at : found.start()]), f"<[{specials[found[0]]}]>"]
            at = found.end()
        written.append(_text(text[at:]))
        text = ""
        if isinstance(part, CallId):
            written.append(_ID)
    return " ".join(filter(None, written))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def arguments_schema(tool: Tool, form: CallFormat) -> dict[str, Any]:
    """Return the schema of a tool's arguments with the compiler's options.

    Only arguments named by the schema are written, unless the schema permits others.
    """
    schema: dict[str, Any] = json.loads(tool.parameters)
    schema.setdefault("type", "object")
    if "properties" in schema and not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema.setdefault("additionalProperties", False)
    options: dict[str, Any] = {"lenient": not tool.strict, "coerce_one_of": not tool.strict}
    if "\n" in form.key_separator + form.item_separator:
        options |= {"whitespace_flexible": True, "whitespace_pattern": "[ ]?"}
    else:
        options |= {
            "whitespace_flexible": False,
            "key_separator": form.key_separator,
            "item_separator": form.item_separator,
        }
    return schema | {"x-guidance": options}
