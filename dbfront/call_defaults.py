"""What AI calls take from their session when they don't say it themselves."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.request import BlendSelector
from sql.field_reorder import FieldReorder


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
    max_retries: int = 0
