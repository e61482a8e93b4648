"""Asking the pool, in the background, which leading blocks of a prompt it has, and holding them.

Called by integrations/vllm/connector_scheduler.py in the scheduler's thread; only the work handed
to the door runs in another. What a lookup counts is pinned, so that it is there when it is loaded:
a reservation, which ends with the load, with the request, or when nobody waited for the answer.
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
"""How often blocks that somebody promised are asked for again while they are on their way."""


@dataclass(slots=True)
class PrefixLookup:
    """One question about blocks [first, first + len(keys)) of a request.

    Attributes:
        first: the first block asked for.
        keys: names of the blocks.
        promised: so many leading blocks of the request were promised by who computes them.
        answer: how many of ``keys``, from the first, are held for us.
        asked_at: when the request was first looked at; patience is counted from there.
        wanted_at: when the answer was first wanted.
        wait_told: how long it was waited for was told.
        answered_at: when an answer was first seen that is less than what was promised.
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
        """The block after the last one held; only once it is answered."""
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
        """Begin with nothing.

        Args:
            door: to the pool.
            ranks: workers that each have a part of every block.
            patience_s: how long an answer is waited for.
            promise_s: how long blocks are waited for that another engine promised.
            now: a clock.
            on_wait: told once per lookup how long its answer was waited for; not told of blocks
                that were promised, which are waited for gladly.
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
        """Ask for blocks; what an earlier lookup of the request holds is let go."""
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
        """Return up to which block of a request blocks are held.

        Args:
            request_id: whose.
            first: the first block that is wanted.
            wait_s: how long to wait for the answer, where it is not there.

        Returns:
            The block after the last one; None: not known yet, ask again. After some time that is
            ``first``, whatever comes later.
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
        """Whether a request's lookup, if it has one, asks for the block ``first`` too."""
        lookup = self._open.get(request_id)
        return lookup is not None and lookup.first <= first

    def release(self, request_id: str) -> None:
        """Let go of what is held for a request, now or as soon as it is known."""
        lookup = self._open.pop(request_id, None)
        if lookup is not None:
            lookup.answer.add_done_callback(
                lambda answer: self._let_go(lookup.keys[: answer.result()])
            )

    def settle_debts(self) -> None:
        """Let go of what could not be let go while the pool was away; called every step."""
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
