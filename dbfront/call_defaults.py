"""What AI calls take from their session when they don't say it themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tierkv.kvcore.request import BlendSelector
from tierkv.sql.calls.field_reorder import FieldReorder

BULK_PRIORITY: Final = 1
"""Calls of large statements count as if they had come this many steps of priority later."""


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """Values of the session's ``tierkv.*`` settings.

    Attributes:
        timeout_s: time for one call; 0.0 is no limit.
        prefix_order: run neighbours in the prefix tree one after the other.
        plan: and plan which node runs which part of that tree, and what to keep for it.
        max_concurrency: calls in flight.
        blend: False answers exactly where a call does not ask for blending itself.
        recompute_ratio: None takes the namespace's; ``selector`` too.
        chunk_separator: see TextCall.
        field_reorder: how ``context`` fields are ordered.
        priority: lower runs earlier.
        bulk_calls: calls of a batch above which it is bulk; 0: none is.
        max_retries: tries after the first of a call that may pass when tried again.
    """

    model: str | None = None
    system_prompt: str = ""
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int | None = None
    cache: bool = True
    timeout_s: float = 0.0
    prefix_order: bool = True
    plan: bool = True
    max_concurrency: int = 64
    tenant: str = "default"
    blend: bool = True
    recompute_ratio: float | None = None
    selector: BlendSelector | None = None
    chunk_separator: str = ""
    field_reorder: FieldReorder = FieldReorder.STATS
    priority: int = 0
    bulk_calls: int = 32
    max_retries: int = 0

    def for_batch(self, calls: int) -> CallDefaults:
        """Return them for a batch of so many calls: those of bulk go after what a person waits for.

        A priority that the session set stands.
        """
        is_bulk = 0 < self.bulk_calls < calls and not self.priority
        return replace(self, priority=BULK_PRIORITY) if is_bulk else self
