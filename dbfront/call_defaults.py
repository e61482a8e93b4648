"""What AI calls take from their session when they don't say it themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tierkv.kvcore.call_options import USUAL, CallOptions
from tierkv.sql.calls.field_reorder import FieldReorder

BULK_PRIORITY: Final = 1
"""Calls of large statements count as if they had come this many steps of priority later."""


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """Values of the session's ``tierkv.*`` settings.

    Attributes:
        options: what a call's own options are put over.
        prefix_order: run neighbours in the prefix tree one after the other.
        plan: and plan which node runs which part of that tree, and what to keep for it.
        max_concurrency: calls in flight.
        field_reorder: how ``context`` fields are ordered.
        bulk_calls: calls of a batch above which it is bulk; 0: none is.
    """

    options: CallOptions = USUAL
    model: str | None = None
    system_prompt: str = ""
    tenant: str = "default"
    prefix_order: bool = True
    plan: bool = True
    max_concurrency: int = 64
    field_reorder: FieldReorder = FieldReorder.STATS
    bulk_calls: int = 32

    def for_batch(self, calls: int) -> CallDefaults:
        """Return them for a batch of so many calls: those of bulk go after what a person waits for.

        A priority that the session set stands.
        """
        if self.options.priority or not 0 < self.bulk_calls < calls:
            return self
        return replace(self, options=replace(self.options, priority=BULK_PRIORITY))
