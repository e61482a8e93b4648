"""Chunks that the pool keeps for us: asked for, let go and touched in the background.

Called by integrations/vllm/tier_core.py in the scheduler's thread; answers come from the door's
threads and wait here until that thread takes them. Nothing is forgotten: what can't be let go now
is let go at the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.client.pool import Pool
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.vllm.tier_names import ChunkNames
from tierkv.kvcore import limits

TOUCH_S: Final = 60.0
"""How often the pool learns of a chunk that vLLM uses from its own memory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the pool has of some chunks; those it has are held, under these names."""

    names: ChunkNames
    there: dict[bytes, bool]


class Holds:
    """Reservations of chunks, as far as they are on their way."""

    def __init__(self, door: PoolDoor) -> None:
        self._door = door
        self._answers: deque[Answer] = deque()
        self._unwanted: deque[tuple[ChunkNames, Sequence[bytes]]] = deque()
        self._touched: dict[bytes, float] = {}

    def ask(self, names: ChunkNames, keys: Sequence[bytes]) -> None:
        """Ask which chunks the pool has, and have it hold those."""

        def hold(pool: Pool) -> list[bool]:
            return pool.pin_many([names.name(key) for key in keys])

        def keep(future: Future[list[bool]]) -> None:
            self._answers.append(Answer(names, dict(zip(keys, future.result(), strict=True))))

        nothing = [False] * len(keys)
        future = self._door.submit(hold, nothing, name="tier_lookup", urgent=True)
        future.add_done_callback(keep)

    @property
    def has_answers(self) -> bool:
        """Whether the pool has answered since the last look."""
        return bool(self._answers)

    def take_answers(self) -> Iterable[Answer]:
        """Yield what the pool has answered."""
        while self._answers:
            yield self._answers.popleft()

    def let_go(self, names: ChunkNames, keys: Sequence[bytes]) -> None:
        """Note chunks that need not be held any more, by ``flush``."""
        if keys:
            self._unwanted.append((names, keys))

    def flush(self) -> None:
        """Have the pool let go of what was noted."""
        if not self._unwanted or not self._door.up:
            return
        some: list[tuple[ChunkNames, Sequence[bytes]]] = []
        while self._unwanted:  # One by one: a thread may put some back meanwhile.
            some.append(self._unwanted.popleft())

        def release(pool: Pool) -> bool:
            pool.unpin_many([names.name(key) for names, keys in some for key in keys])
            return True

        def check(future: Future[bool]) -> None:
            if not future.result():
                self._unwanted.extend(some)

        self._door.submit(release, False, name="tier_release").add_done_callback(check)

    def touch(self, names: ChunkNames, keys: Iterable[bytes], now: float) -> None:
        """Have the pool count a use of those that it has not been told of for a while."""
        while self._touched and now - self._touched[next(iter(self._touched))] >= TOUCH_S:
            del self._touched[next(iter(self._touched))]
        due = [key for key in keys if key not in self._touched][: limits.MAX_CHAIN_BLOCKS]
        if not due:
            return
        self._touched.update(dict.fromkeys(due, now))

        def use(pool: Pool) -> None:
            named = [names.name(key) for key in due]
            held = pool.pin_many(named)
            pool.unpin_many([name for name, ok in zip(named, held, strict=True) if ok])

        self._door.submit(use, None, name="tier_touch")
