"""The contexts of a statement's calls, as text: read, ordered, written.

Held by dbfront/statement/ai_statement.py for one statement, asked by dbfront/calls/evaluation.py
for each batch. The order of fields is never part of a call: it decides what a prompt looks like,
not whose it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable, Sequence
from typing import Final

from tierkv.dbfront.calls.call_context import render_context
from tierkv.dbfront.calls.field_order import FieldOrders
from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.field_reorder import FieldReorder
from tierkv.sql.calls.functions import CONTEXT

_WRITTEN_AT_ONCE: Final = 256
"""Contexts written in the event loop, a few milliseconds of work; more are in a thread."""

_NOT_BEFORE: Final = frozenset({CONTEXT, "options"})
"""Arguments that say nothing about the text before the fields."""

_BEHIND: Final = frozenset({"input", "predicate", "criteria", "instruction", "categories"})
"""Where a call has an input, it and what is asked about it follow the fields."""


class ContextFields:
    """Writes contexts so that the calls of a statement share long beginnings."""

    def __init__(self, method: FieldReorder = FieldReorder.STATS) -> None:
        self._orders = FieldOrders(method)

    async def written(self, calls: Sequence[AiCall]) -> dict[AiCall, str]:
        """Write the context of each call of a batch that has one."""
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
    """Name what stands before a call's context; calls that differ in it share no field."""
    after = _NOT_BEFORE if call.get("input") is None else _NOT_BEFORE | _BEHIND
    return tuple(argument for argument in call.arguments if argument[0] not in after)
