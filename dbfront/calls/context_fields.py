"""The contexts of a statement's calls: reads, orders and writes fields as lines of a prompt.

dbfront/statement/ai_statement.py keeps one ``ContextFields`` per statement and calls ``written``
for each batch. The written text can be parsed in only one way, so no value can pass for a field.
The order of fields changes the prompt, not the call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final

from tierkv.dbfront.calls.field_order import FieldOrders
from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.functions import CONTEXT
from tierkv.sql.settings import FieldReorder

_INDENT: Final = "  "


def render_context(fields: Mapping[str, str], order: Iterable[str]) -> str:
    """Write fields as lines in the given order; without fields the text is empty.

    The second and later lines of a value are indented by two spaces. An ambiguous key is written as
    a JSON string. Equal fields in equal order give equal text; different fields or orders never do.

    Args:
        fields: values by key.
        order: keys of ``fields``, each key once.
    """
    return "\n".join(f"{_key(name)}: {_value(fields[name])}" for name in order)


def _key(name: str) -> str:
    plain = name == name.strip() and ":" not in name and len(name.splitlines()) == 1
    return name if plain and name[0] != '"' else json.dumps(name)


def _value(value: str) -> str:
    lines = value.splitlines(keepends=True)
    if lines and lines[-1].splitlines()[0] != lines[-1]:
        lines.append("")  # A line break at the end starts another line.
    return _INDENT.join(lines)


_WRITTEN_AT_ONCE: Final = 256
"""Contexts written in the event loop, a few milliseconds of work; larger batches use a thread."""

_NOT_BEFORE: Final = frozenset({CONTEXT, "options"})
"""Arguments without influence on the text before the fields."""

_BEHIND: Final = frozenset({"input", "predicate", "criteria", "instruction", "categories"})
"""Arguments placed after the fields, if a call has an input: the input and the question about it.
"""


class ContextFields:
    """Writes contexts so that the calls of a statement share long prefixes."""

    def __init__(self, method: FieldReorder = FieldReorder.STATS) -> None:
        self._orders = FieldOrders(method)

    async def written(self, calls: Sequence[AiCall]) -> dict[AiCall, str]:
        """Return the text of the context for each call of a batch with a context."""
        given = [call for call in calls if call.get(CONTEXT) is not None]
        if len(given) <= _WRITTEN_AT_ONCE:
            return self._write(given)
        return await asyncio.to_thread(self._write, given)

    def _write(self, calls: Sequence[AiCall]) -> dict[AiCall, str]:
        by_function: dict[str, list[AiCall]] = {}
        for call in calls:
            by_function.setdefault(call.function, []).append(call)
        written: dict[AiCall, str] = {}
        for function, group in by_function.items():
            rows = [json.loads(call.text(CONTEXT)) for call in group]
            orders = self._orders.arrange(function, rows, heads=[_head(call) for call in group])
            texts = map(render_context, rows, orders)
            written.update(zip(group, texts, strict=True))
        return written


def _head(call: AiCall) -> Hashable:
    """Identify the text before a call's context; calls with different heads share no field."""
    after = _NOT_BEFORE if call.get("input") is None else _NOT_BEFORE | _BEHIND
    return tuple(argument for argument in call.arguments if argument[0] not in after)
