"""How a model writes calls of tools, learned from the model's own chat template.

A model is trained on a single way to write calls, and the model's template writes earlier calls in
the same way. ``learned_format`` therefore renders a conversation with and without a call of a
made-up function: the text around the made-up name and arguments is the format. No list of model
families is kept.

    <tool_call>\\n{"name": "NAME", "arguments": ARGUMENTS}\\n</tool_call>
    `---------head---------'      `---middle---'         `----tail----'

``FALLBACK`` is for templates without tools, or with calls in another form, for example an element
for each argument. The conversation is then rewritten (dbfront/tokens/tool_conversation.py): the
system message describes the tools, and calls and results are plain text.

``call_grammar`` writes the grammar of an answer with optional calls, in llguidance's Lark dialect
(compiled by compute/engine/guides.py): free text up to the first call, then only calls. Arguments
are written with the separators of the model's chat template. The next turn's prompt therefore
repeats the tokens of the call, and continues with the KV of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from tierkv.dbfront.tool_calls.tool import Tool, ToolChoice, ToolUse
from tierkv.kvcore import limits

_NAME: Final = "probe_function"
_CONTENT: Final = "~probe~"
_IDS: Final = ("probeCAL1", "probeCAL2")
"""Nine letters and digits: some templates refuse other identifiers."""
_ARGUMENTS: Final = {"probe_a": "x", "probe_b": [1, 2]}
_WRITTEN: Final = re.compile(
    r'\{\s*"probe_a"(?P<key>:\s*)"x"(?P<item>,\s*)"probe_b":\s*\[\s*1,\s*2\s*\]\s*\}'
)
_EMPTY_THOUGHT: Final = re.compile(r"^<think>\s*</think>\s*")
_MARKER: Final = re.compile(r"\s*(<[^<>\s]{2,60}>|\[[A-Z_]{2,60}\])")
_NAME_LETTER: Final = re.compile(r"[A-Za-z0-9_.\-]")

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Renders messages with tools as the chat template reads them, without a prompt for an answer.

Raises ValueError if the template refuses them.
"""


@dataclass(frozen=True, slots=True)
class CallId:
    """The place of a call's identifier in a format."""


Part = str | CallId


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written: head, calls with ``separator`` between them, tail.

    A call is a name, ``middle`` and arguments.

    Attributes:
        head: before the first name.
        middle: between a name and the arguments.
        tail: behind the arguments of the last call.
        separator: from one call's arguments to the next name; None if an answer has one call only.
        key_separator: text between key and value in the arguments.
        item_separator: text between two members of the arguments.
        text_arguments: the template wants the arguments as text, not as an object.
        is_fallback: the model's template does not write calls.
    """

    head: tuple[Part, ...]
    middle: tuple[Part, ...]
    tail: tuple[Part, ...]
    separator: tuple[Part, ...] | None
    key_separator: str = ": "
    item_separator: str = ", "
    text_arguments: bool = False
    is_fallback: bool = False

    @property
    def marker(self) -> str:
        """The beginning of a call at any place of an answer, such as ``<tool_call>``.

        Empty if calls begin otherwise, for example with ``{"name": "``: calls then stand at the
        beginning of an answer only.
        """
        first = self.head[0] if self.head and isinstance(self.head[0], str) else ""
        found = _MARKER.match(first)
        return "" if found is None else found[1]

    @property
    def has_ids(self) -> bool:
        """Whether calls carry identifiers, which then have nine letters and digits."""
        parts = (*self.head, *self.middle, *self.tail, *(self.separator or ()))
        return any(isinstance(part, CallId) for part in parts)


FALLBACK: Final = CallFormat(
    head=('<tool_call>\n{"name": "',),
    middle=('", "arguments": ',),
    tail=("}\n</tool_call>",),
    separator=('}\n</tool_call>\n<tool_call>\n{"name": "',),
    is_fallback=True,
)


def learned_format(render: Render) -> CallFormat:
    """Learn how a template writes calls; FALLBACK for no calls, or an unknown form."""
    for follows in (True, False):
        for text_arguments in (False, True):
            found = _learned(render, follows=follows, text_arguments=text_arguments)
            if found is not None:
                return found
    return FALLBACK


def short_id(call_id: str) -> str:
    """Return an identifier of nine letters and digits for any identifier."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def _learned(render: Render, *, follows: bool, text_arguments: bool) -> CallFormat | None:
    """Compare renderings; None if the comparison has no clear result.

    Args:
        render: see Render.
        follows: another turn follows the answer. Templates may write the last answer in another
            way, for example with an empty thought.
        text_arguments: see CallFormat.
    """
    calls = [_call(call_id, text_arguments) for call_id in _IDS]
    after = [{"role": "user", "content": "probe"}] if follows else []

    def rendered(answer: Mapping[str, Any]) -> str:
        asked = {"role": "user", "content": "probe"}
        return render([asked, {"role": "assistant", **answer}, *after], [_TOOL])

    try:
        plain = rendered({"content": _CONTENT})
        one = rendered({"content": "", "tool_calls": calls[:1]})
    except ValueError:
        return None
    single = _between(one, plain)
    if single is None:
        return None
    try:
        several = _between(rendered({"content": "", "tool_calls": calls}), plain)
    except ValueError:
        several = None  # The template writes one call per answer.
    return _format_of(single, several, text_arguments)


def _between(text: str, plain: str) -> str | None:
    """Return the answer in ``text``, where ``plain`` has the answer ``_CONTENT``."""
    before, found, after = plain.partition(_CONTENT)
    if not found:
        return None
    start = _common(text, before)
    # Whitespace that only the plain answer has, such as a line break before its text.
    if before[start:].strip():
        return None
    end = _common(text[::-1], after[::-1])
    return _EMPTY_THOUGHT.sub("", text[start : len(text) - end])


def _common(some: str, others: str) -> int:
    """Return the length of the longest common beginning."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(some), len(others)))


def _format_of(single: str, several: str | None, text_arguments: bool) -> CallFormat | None:
    """Find name and arguments in an answer with a single call, and in an answer with two."""
    first = _cut(single)
    if first is None:
        return None
    head, middle, tail, written = first
    separator = None
    if several is not None and (pair := _cut(several)) is not None:
        other = _cut(pair[2])
        if other is not None and _same((pair[0], *other[1:3]), (head, middle, tail)):
            separator = other[0]
    if not head.strip() or not middle.strip() or _NAME_LETTER.match(middle):
        return None  # The beginning or the end of a name could not be seen.
    return CallFormat(
        _parts(head),
        _parts(middle),
        _parts(tail),
        None if separator is None else _parts(separator),
        key_separator=written["key"],
        item_separator=written["item"],
        text_arguments=text_arguments,
    )


def _same(some: Sequence[str], others: Sequence[str]) -> bool:
    """Compare texts of different calls, whose identifiers differ."""
    return [*map(_parts, some)] == [*map(_parts, others)]


def _cut(text: str) -> tuple[str, str, str, re.Match[str]] | None:
    """Cut a text at the first name and at the arguments behind the name."""
    head, named, rest = text.partition(_NAME)
    written = _WRITTEN.search(rest) if named else None
    if written is None or _NAME in rest[: written.start()]:
        return None
    return head, rest[: written.start()], rest[written.end() :], written


def _parts(text: str) -> tuple[Part, ...]:
    """Replace the identifiers of the made-up calls by CallId."""
    parts: list[Part] = []
    for number, piece in enumerate(re.split("|".join(_IDS), text)):
        if number:
            parts.append(CallId())
        if piece:
            parts.append(piece)
    return tuple(parts)


_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_a": {"type": "string"}}},
    },
}


def _call(call_id: str, text_arguments: bool) -> Mapping[str, Any]:
    arguments = json.dumps(_ARGUMENTS) if text_arguments else _ARGUMENTS
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": _NAME, "arguments": arguments},
    }


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
