"""Handoffs whose last event waits until their blocks are in the pool.

Used by the engine only, in its thread. The next node loads what is there by then; what is not, for
whatever reason, it computes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.compute.batching.answers import Delivery
from tierkv.compute.batching.sequence import Sequence
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.request import GenerateEvent


@dataclass(slots=True)
class _Handoff:
    """One sequence that is handed over; ``event`` is set when it has ended here.

    Attributes:
        pending: for each job on its way, in order, how many leading tokens it completes.
    """

    seq: Sequence
    event: GenerateEvent | None = None
    pending: deque[int] = field(default_factory=deque)
    deadline_s: float = 0.0


class Handoffs:
    """Sequences with ``request.handoff`` from their arrival to their last event.

    Their jobs are published in the order in which they were queued (compute/tiers/publisher.py).
    """

    def __init__(
        self,
        *,
        clock: Clock,
        timeout_s: float,
        deliver: Callable[[Delivery], None],
        cache_errors: Counter[str],
    ) -> None:
        """Make an empty set.

        Args:
            clock: where deadlines come from.
            timeout_s: longest wait for blocks after the sequence ended.
            deliver: takes the last events.
            cache_errors: counts those that waited too long.
        """
        self._clock = clock
        self._timeout_s = timeout_s
        self._deliver = deliver
        self._cache_errors = cache_errors
        self._handoffs: dict[int, _Handoff] = {}

    @property
    def seq_ids(self) -> list[int]:
        """Sequences that are to be handed over, ended ones included."""
        return list(self._handoffs)

    def begin(self, seq: Sequence) -> None:
        """Take a new sequence in."""
        self._handoffs[seq.seq_id] = _Handoff(seq)

    def forget(self, seq_id: int) -> Sequence | None:
        """Drop a sequence that ended in another way; returns it if it was known."""
        handoff = self._handoffs.pop(seq_id, None)
        return handoff.seq if handoff is not None else None

    def queued(self, seq_id: int, tokens: int) -> None:
        """Take note that blocks up to a token of a sequence are on their way to the pool."""
        if seq_id in self._handoffs:
            self._handoffs[seq_id].pending.append(tokens)

    def published(self, seq_id: int) -> None:
        """Take note that a sequence's oldest job is done; tell how far it is, or hand it over."""
        handoff = self._handoffs.get(seq_id)
        if handoff is None:
            return
        tokens = handoff.pending.popleft()
        if handoff.event is None:
            whole = tokens - tokens % handoff.seq.block_tokens
            self._deliver(Delivery(seq_id, GenerateEvent(published_tokens=whole)))
        elif not handoff.pending:
            self._hand_over(handoff, handoff.event)

    def finish(self, seq_id: int, event: GenerateEvent) -> bool:
        """Keep the last event until the blocks are out; False when nothing is pending."""
        handoff = self._handoffs.get(seq_id)
        if handoff is None or not handoff.pending:
            return False
        handoff.event = event
        handoff.deadline_s = self._clock.now() + self._timeout_s
        return True

    def check_deadlines(self) -> None:
        """Hand over what waited too long; the next node computes what it does not find."""
        now = self._clock.now()
        for handoff in list(self._handoffs.values()):
            if handoff.event is not None and handoff.deadline_s < now:
                self._cache_errors["handoff_timeout"] += 1
                self._hand_over(handoff, handoff.event)

    def _hand_over(self, handoff: _Handoff, event: GenerateEvent) -> None:
        del self._handoffs[handoff.seq.seq_id]
        self._deliver(Delivery(handoff.seq.seq_id, event))
