"""Validity of the state learned about an engine's cache: gaps, replays and restarts. Pure.

An engine numbers batches from 0 in each life and ends without notice. After a lost connection, a
gap or a decreasing number, the engine must therefore send the last received batch again before the
state is trusted: equal bytes prove the same life. Without replay the state is discarded. Used by
integrations/events/listener.py, with one instance for each rank.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from tierkv.integrations.events.messages import EngineBatch

_MOST_WAITING: Final = 1_024
"""Most batches kept while others are replayed; batches beyond the limit are requested again."""

_MOST_ASKS: Final = 3
"""Replays in a row without news. Batches missing from the last replay were never sent and are lost
(an engine that fails to pack a batch has used up its number)."""


@dataclass(frozen=True, slots=True)
class Take:
    """Apply a batch's events."""

    batch: EngineBatch


@dataclass(frozen=True, slots=True)
class Forget:
    """Discard all state of this rank."""


@dataclass(frozen=True, slots=True)
class Hide:
    """The state can't be verified now, but may prove valid later."""


@dataclass(frozen=True, slots=True)
class Show:
    """The state is valid again."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Request all batches from number ``start`` on."""

    start: int


Instruction = Take | Forget | Hide | Show | AskReplay


class Following:
    """One rank's stream of batches. Mutated only through methods, which return instructions.

    Attributes:
        counts: ``gaps``; ``replays`` that were needed, and ``checks``; ``restarts``; ``losses``
            (history that is no longer available); ``late`` (batches of an earlier life, or out of
            order); ``unreadable``.
        complete: True if all blocks of the engine have been reported, as far as can be known.
        last: the last batch that was applied; None if no batch of this life was.
        _heard: number of the last batch on this connection, applied or not.
        _asked: a replay is under way.
        _proof: the batch with which the replay must begin; None after the batch came, or if no
            proof is needed.
        _needed: live batches wait until the replay has ended; False: the replay is only a check.
        _holed: the replay had a gap of its own.
        _asks: replays in a row without news, for ``_MOST_ASKS``.
        _waiting: batches received during the replay.
    """

    def __init__(self, *, replays: bool) -> None:
        """Start before the first connection; ``replays``: the engine has a replay address."""
        self.counts: Counter[str] = Counter()
        self.complete = False
        self.last: EngineBatch | None = None
        self._replays = replays
        self._heard = -1
        self._asked = False
        self._proof: EngineBatch | None = None
        self._needed = False
        self._holed = False
        self._asks = 0
        self._waiting: deque[EngineBatch] = deque()

    def connected(self) -> list[Instruction]:
        """A connection is established; batches of an earlier connection no longer arrive."""
        self._heard = -1
        self._waiting.clear()
        self._asks = 0
        if not self._replays:
            return self._begin_anew()
        forget: list[Instruction] = [Forget()] if self.last is None else []
        return [*forget, *self._ask(needed=True)]

    def disconnected(self) -> list[Instruction]:
        """The connection is lost, so the engine may have ended."""
        self._asked = False
        self._waiting.clear()
        return [Hide()]

    def check(self) -> list[Instruction]:
        """Check for batches after the last one: request a replay, unless one is running."""
        if not self._replays or self._asked:
            return []
        self._asks = 0
        return self._ask(needed=False)

    def live(self, batch: EngineBatch) -> list[Instruction]:
        """A batch arrived on the live stream."""
        went_back = batch.seq <= self._heard
        self._heard = batch.seq
        if self._asked and self._needed:
            self._wait(batch)
            return []
        if went_back:
            return self._doubt(batch)
        if self._follows(batch):
            return self._take(batch)
        if self.last is not None and batch.seq <= self.last.seq:
            return []  # A replay has delivered the batch already.
        self.counts["gaps"] += 1
        return self._doubt(batch)

    def replayed(self, batch: EngineBatch) -> list[Instruction]:
        """A batch of a replay arrived."""
        if not self._asked or self._holed:
            return []
        if self._proof is not None:
            return self._judge(self._proof, batch)
        if self.last is not None and batch.seq <= self.last.seq:
            return []
        if self.last is not None and batch.seq > self.last.seq + 1:
            return self._hole(batch)
        self._asks = 0
        return self._take(batch)

    def replay_ended(self) -> list[Instruction]:
        """All requested batches have arrived."""
        if not self._asked:
            return []
        if self._proof is not None:  # No batch of this number: the engine has restarted.
            return self._restarted()
        self.counts["replays" if self._needed else "checks"] += 1
        if self._holed:
            return self._ask(needed=self._needed)
        return self._settle()

    def replay_failed(self) -> list[Instruction]:
        """The replay timed out, at the start or on the way."""
        if not self._asked:
            return []
        if not self._needed or (self._proof is None and self.last is not None):
            return self._settle()
        self.counts["losses"] += self.last is not None
        forget = self._begin_anew()
        first = self._waiting.popleft() if self._waiting else None
        taken = [] if first is None else self._take(first)
        return [*forget, *taken, *self._settle()]

    def _hole(self, batch: EngineBatch) -> list[Instruction]:
        """Handle a gap in a replay: ask again (a full socket drops batches), or give up."""
        if self._asks < _MOST_ASKS:
            self._holed = True
            return []
        self._asks = 0
        self.counts["losses"] += 1
        return [*self._begin_anew(), *self._take(batch)]

    def _ask(self, *, needed: bool) -> list[Instruction]:
        self._asked, self._needed, self._holed = True, needed, False
        self._asks += 1
        self._proof = self.last
        return [AskReplay(0 if self.last is None else self.last.seq)]

    def _judge(self, proof: EngineBatch, batch: EngineBatch) -> list[Instruction]:
        """Compare the first replayed batch with the proof: equal, of another life, or later."""
        if batch.seq == proof.seq and batch.digest == proof.digest:
            self._proof = None
            return [Show()]
        if batch.seq <= proof.seq:
            return self._restarted()
        # The engine keeps a limited number of batches. The engine's life and the missing batches
        # are unknown.
        self._proof = None
        self.counts["losses"] += 1
        return [*self._begin_anew(), *self._take(batch)]

    def _restarted(self) -> list[Instruction]:
        """Start a new life: replay everything available, which includes the waiting batches."""
        self.counts["restarts"] += 1
        self._waiting.clear()
        self._asks = 0
        forget = self._begin_anew()
        return [*forget, *self._ask(needed=True)]

    def _doubt(self, batch: EngineBatch) -> list[Instruction]:
        """Handle a batch after a gap: request the missing batches, or begin anew."""
        if self._replays:
            self._wait(batch)
            self._asks = 0
            return self._ask(needed=True)
        if self.last is not None:
            self.counts["restarts" if batch.seq <= self.last.seq else "losses"] += 1
        return [*self._begin_anew(), *self._take(batch)]

    def _settle(self) -> list[Instruction]:
        """End a replay: apply the waiting batches in sequence, drop the rest.

        A waiting batch beyond a gap, which the replay did not fill, is of another life, or earlier
        batches were lost on the way. The next batch or the next check then finds the gap.
        """
        self._asked = False
        instructions: list[Instruction] = []
        while self._waiting:
            batch = self._waiting.popleft()
            if self._follows(batch):
                instructions += self._take(batch)
            elif self.last is None or batch.seq > self.last.seq:
                self.counts["late"] += 1
        return instructions

    def _begin_anew(self) -> list[Instruction]:
        self.last = None
        self.complete = False
        return [Forget()]

    def _follows(self, batch: EngineBatch) -> bool:
        """True if a live batch is the next in sequence. An older time means an earlier life."""
        if self.last is None:
            return batch.seq == 0
        return batch.seq == self.last.seq + 1 and batch.time_s >= self.last.time_s

    def _take(self, batch: EngineBatch) -> list[Instruction]:
        if self.last is None:
            self.complete = batch.seq == 0
        self.last = batch
        if batch.readable:
            return [Take(batch)]
        # The batch may have contained removals.
        self.counts["unreadable"] += 1
        self.complete = False
        return [Forget()]

    def _wait(self, batch: EngineBatch) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(batch)
