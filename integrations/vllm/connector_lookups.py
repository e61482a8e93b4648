"""Background lookups of the leading blocks of a prompt, which also hold the found blocks.

Called by integrations/vllm/connector_scheduler.py in the scheduler's thread; only the work passed
to the door runs in another thread. Found blocks are pinned, so they stay in the pool until the
load. The pin is a reservation, and ends with the load, with the request, or when the answer came
too late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from tierkv.dmp.client.pool import Pool
from tierkv.integrations.keys import rank_key
from tierkv.integrations.pool_door import PoolDoor
from tierkv.kvcore.ids import BlockKey

_AGAIN_S = 0.01
"""Least time between lookups of promised blocks that have not arrived yet."""


@dataclass(slots=True)
class PrefixLookup:
    """One lookup of the blocks [first, first + len(keys)) of a request.

    Attributes:
        first: number of the first block.
        keys: names of the blocks.
        promised: number of leading blocks of the request that another engine has promised.
        answer: number of leading ``keys`` that are held for the request.
        asked_at: time of the request's first lookup; timeouts count from then.
        wanted_at: time when the answer was first needed.
        wait_told: the waiting time was reported.
        answered_at: time of the last answer with less than the promised blocks.
    """

    first: int
    keys: list[BlockKey]
    promised: int
    answer: Future[int]
    asked_at: float
    wanted_at: float | None = None
    wait_told: bool = False
    answered_at: float = 0.0

    @property
    def end(self) -> int:
        """The block after the last held block; only valid after the answer."""
        return self.first + self.answer.result()


class Lookups:
    """The lookups of requests that were not loaded yet; mutated by one thread."""

    def __init__(
        self,
        door: PoolDoor,
        *,
        ranks: int,
        patience_s: float,
        promise_s: float,
        now: Callable[[], float],
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Start empty.

        Args:
            door: the door to the pool.
            ranks: number of workers, each with a part of every block.
            patience_s: longest wait for an answer.
            promise_s: longest wait for blocks that another engine promised.
            now: a clock.
            on_wait: called once per lookup with the waiting time; not called for promised blocks,
                which are worth the wait.
        """
        self._door = door
        self._ranks = ranks
        self._patience_s = patience_s
        self._promise_s = promise_s
        self._now = now
        self._on_wait = on_wait
        self._open: dict[str, PrefixLookup] = {}
        self._owed: deque[BlockKey] = deque()  # Filled by the door's threads.

    def __len__(self) -> int:
        return len(self._open)

    def start(
        self, request_id: str, first: int, keys: Sequence[BlockKey], *, promised: int = 0
    ) -> None:
        """Look up blocks; blocks held by an earlier lookup of the request are released."""
        before = self._open.get(request_id)
        self.release(request_id)
        wanted = list(keys)
        self._open[request_id] = PrefixLookup(
            first,
            wanted,
            promised,
            self._ask(wanted),
            before.asked_at if before is not None else self._now(),
        )

    def result(self, request_id: str, first: int, *, wait_s: float = 0.0) -> int | None:
        """Return the end of the blocks that are held for a request.

        Args:
            request_id: the request.
            first: the first needed block.
            wait_s: longest wait for a pending answer.

        Returns:
            The block after the last held one; None if not known yet, ask again. After the timeout
            the result is ``first``, whatever arrives later.
        """
        lookup = self._open.get(request_id)
        if lookup is None:
            return first
        if lookup.wanted_at is None:
            lookup.wanted_at = self._now()
        if wait_s > 0.0 and not lookup.answer.done():
            wait([lookup.answer], wait_s)
        waited = self._now() - lookup.asked_at
        if not lookup.answer.done():
            if waited < self._limit(lookup):
                return None
            self._door.count("lookup_late")
            self._tell_wait(lookup)
            self.release(request_id)
            return first
        if lookup.end < min(lookup.promised, lookup.first + len(lookup.keys)):
            if waited < self._limit(lookup) and self._door.up:
                self._ask_again(lookup)
                return None
            self._door.count("promise_late")
        self._tell_wait(lookup)
        return lookup.end

    def covers(self, request_id: str, first: int) -> bool:
        """True if the request has a lookup that includes the block ``first``."""
        lookup = self._open.get(request_id)
        return lookup is not None and lookup.first <= first

    def release(self, request_id: str) -> None:
        """Release the blocks held for a request, now or as soon as they are known."""
        lookup = self._open.pop(request_id, None)
        if lookup is not None:
            lookup.answer.add_done_callback(
                lambda answer: self._let_go(lookup.keys[: answer.result()])
            )

    def settle_debts(self) -> None:
        """Release blocks that could not be released while the pool was away; called every step."""
        if self._owed and self._door.up:
            self._let_go([self._owed.popleft() for _ in range(len(self._owed))])

    def _tell_wait(self, lookup: PrefixLookup) -> None:
        if self._on_wait is None or lookup.promised or lookup.wait_told:
            return
        lookup.wait_told = True
        self._on_wait(self._now() - (lookup.wanted_at or self._now()))

    def _limit(self, lookup: PrefixLookup) -> float:
        return self._promise_s if lookup.promised else self._patience_s

    def _ask(self, keys: list[BlockKey]) -> Future[int]:
        parts, ranks = self._parts(keys), self._ranks

        def hold(pool: Pool) -> int:
            there = pool.pin_many(parts)
            missing = there.index(False) if False in there else len(parts)
            held = missing // ranks
            extra = [parts[i] for i in range(held * ranks, len(parts)) if there[i]]
            if extra:
                pool.unpin_many(extra)
            return held

        return self._door.submit(hold, 0, name="lookup", urgent=True)

    def _ask_again(self, lookup: PrefixLookup) -> None:
        now = self._now()
        if now - lookup.answered_at < _AGAIN_S:
            return
        lookup.answered_at = now
        held = lookup.keys[: lookup.answer.result()]
        lookup.answer = self._ask(lookup.keys)
        self._let_go(held)

    def _let_go(self, keys: list[BlockKey]) -> None:
        """Unpin; called by any thread."""
        if not keys:
            return
        parts = self._parts(keys)
        gone = self._door.submit(
            lambda pool: bool(pool.unpin_many(parts)) or True, False, name="unpin"
        )
        gone.add_done_callback(lambda done: None if done.result() else self._owed.extend(keys))

    def _parts(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [rank_key(key, rank, self._ranks) for key in keys for rank in range(self._ranks)]
