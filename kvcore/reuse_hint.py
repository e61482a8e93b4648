"""What the caller knows about when a request's KV will be wanted again.

Made by the front (a session's client, or the plan of a statement), carried with the request, used
by eviction (policies/). A hint moves blocks up or down in the order of eviction; it never changes
an answer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReuseHint:
    """The future of one prompt and its answer, as far as it is known.

    Attributes:
        next_turn: True: the session goes on from this answer (an agent's step, a tool call); False:
            this was its last one; None: nobody said.
        next_turn_s: seconds until that turn is expected; None: nobody said.
        pending_calls: calls of the same statement that are still to come and share a prefix.
        pending_tokens: leading tokens of the prompt that those calls share. What comes after them
            belongs to this call alone.
    """

    next_turn: bool | None = None
    next_turn_s: float | None = None
    pending_calls: int = 0
    pending_tokens: int = 0

    def __post_init__(self) -> None:
        if self.next_turn_s is not None and not 0.0 <= self.next_turn_s < float("inf"):
            raise ValueError(f"next_turn_s must be finite and not negative, got {self.next_turn_s}")
        if self.pending_calls < 0 or self.pending_tokens < 0:
            raise ValueError("pending calls and tokens can't be negative")
