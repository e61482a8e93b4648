"""Session defaults for AI calls without explicit options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tierkv.kvcore.call_options import USUAL, CallOptions
from tierkv.sql.calls.field_reorder import FieldReorder

BULK_PRIORITY: Final = 1
"""Priority of calls in large batches: this many steps behind interactive calls."""


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """Values of the session's ``tierkv.*`` settings.

    Attributes:
        options: defaults for the options of each call.
        prefix_order: True to run neighbours in the prefix tree consecutively.
        plan: True to also plan which node runs which part of the prefix tree, and which blocks to
            hold.
        max_concurrency: maximum number of calls in flight.
        field_reorder: how ``context`` fields are ordered.
        bulk_calls: batches with more calls are bulk; 0 disables the bulk priority.
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
        """Return the defaults for a batch of ``calls`` calls.

        Bulk calls get a lower priority, so interactive calls go first. A priority set by the
        session is kept.
        """
        if self.options.priority or not 0 < self.bulk_calls < calls:
            return self
        return replace(self, options=replace(self.options, priority=BULK_PRIORITY))
