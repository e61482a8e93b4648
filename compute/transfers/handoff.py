"""Handoffs whose last event waits until their blocks are in the pool.

Used by the engine only, in the engine's thread. The next node loads the blocks found in the pool by
then and computes the rest.
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
    """One sequence to hand over; ``event`` is set when the sequence has ended here.

    Attributes:
        pending: per job under way, in order, the number of leading tokens completed by the job.
    """

    seq: Sequence
    event: GenerateEvent | None = None
    pending: deque[int] = field(default_factory=deque)
    deadline_s: float = 0.0


class Handoffs:
    """Sequences with ``request.handoff``, from arrival to last event.

    The jobs of a sequence are published in the order of queueing (compute/tiers/publisher.py).
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
            clock: source of deadlines.
            timeout_s: longest wait for blocks after the sequence ended.
            deliver: takes the last events.
            cache_errors: counts handoffs that waited too long.
        """
        self._clock = clock
        self._timeout_s = timeout_s
        self._deliver = deliver
        self._cache_errors = cache_errors
        self._handoffs: dict[int, _Handoff] = {}

    @property
    def seq_ids(self) -> list[int]:
        """Sequences to hand over, ended ones included."""
        return list(self._handoffs)

    def begin(self, seq: Sequence) -> None:
        """Add a new sequence."""
        self._handoffs[seq.seq_id] = _Handoff(seq)

    def forget(self, seq_id: int) -> Sequence | None:
        """Drop a sequence that ended in another way; return the sequence if it was known."""
        handoff = self._handoffs.pop(seq_id, None)
        return handoff.seq if handoff is not None else None

    def queued(self, seq_id: int, tokens: int) -> None:
        """Record a job on its way to the pool, with blocks up to this token of a sequence."""
        if seq_id in self._handoffs:
            self._handoffs[seq_id].pending.append(tokens)

    def published(self, seq_id: int) -> None:
        """Mark a sequence's oldest job as done: report progress, or hand the sequence over."""
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
        """Keep the last event until the blocks are in the pool; False if no job is pending."""
        handoff = self._handoffs.get(seq_id)
        if handoff is None or not handoff.pending:
            return False
        handoff.event = event
        handoff.deadline_s = self._clock.now() + self._timeout_s
        return True

    def check_deadlines(self) -> None:
        """Hand over sequences that waited too long; the next node computes the missing blocks."""
        now = self._clock.now()
        for handoff in list(self._handoffs.values()):
            if handoff.event is not None and handoff.deadline_s < now:
                self._cache_errors["handoff_timeout"] += 1
                self._hand_over(handoff, handoff.event)

    def _hand_over(self, handoff: _Handoff, event: GenerateEvent) -> None:
        del self._handoffs[handoff.seq.seq_id]
        self._deliver(Delivery(handoff.seq.seq_id, event))
