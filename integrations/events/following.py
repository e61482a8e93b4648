"""Whether what was heard of an engine's cache still holds: gaps, replays and new lives. Pure.

An engine numbers its batches from 0 in each life, and says nothing when it ends. So before anything
that was learned is trusted again, after a lost connection, a gap or a number that goes back, the
engine has to send again the last batch that was heard: the same bytes prove the same life. Who has
no replay to prove it with begins anew. Used by integrations/events/listener.py, one for each rank.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from tierkv.integrations.events.messages import EngineBatch

_MOST_WAITING: Final = 1_024
"""Batches kept that come while others are replayed; those beyond are asked for again."""

_MOST_ASKS: Final = 3
"""Replays in a row without news; what the last one lacks too was never sent (an engine that fails
to pack a batch has used up its number), and is lost."""


@dataclass(frozen=True, slots=True)
class Take:
    """Enter a batch's events."""

    batch: EngineBatch


@dataclass(frozen=True, slots=True)
class Forget:
    """Everything known of this rank is void."""


@dataclass(frozen=True, slots=True)
class Hide:
    """What is known can't be vouched for now; it may prove good later."""


@dataclass(frozen=True, slots=True)
class Show:
    """What is known holds."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask for all batches from a number on."""

    start: int


Instruction = Take | Forget | Hide | Show | AskReplay


class Following:
    """One rank's stream of batches. Mutated only through its methods; each says what to do.

    Attributes:
        counts: ``gaps``, ``replays`` that were needed and those that were ``checks``, ``restarts``,
            ``losses`` (history that can't be had any more), ``late`` (batches of an earlier life,
            or out of turn), ``unreadable``.
        complete: whether everything the engine holds was heard of, as far as can be known.
        last: the last batch that was taken; None when nothing of this life was.
        _heard: number of the last batch of this connection, taken or not.
        _asked: a replay is under way.
        _proof: the batch it has to begin with; None once it did, or where nothing needs proof.
        _needed: live batches wait until that replay has ended; else it only makes sure.
        _holed: it had a gap of its own.
        _asks: replays in a row without news, for ``_MOST_ASKS``.
        _waiting: batches that came while it was under way.
    """

    def __init__(self, *, replays: bool) -> None:
        """Start before the first connection; ``replays``: there is somebody to ask."""
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
        """A connection stands; nothing of an earlier one comes any more."""
        self._heard = -1
        self._waiting.clear()
        self._asks = 0
        if not self._replays:
            return self._begin_anew()
        forget: list[Instruction] = [Forget()] if self.last is None else []
        return [*forget, *self._ask(needed=True)]

    def disconnected(self) -> list[Instruction]:
        """The connection is lost, and with it the assurance that the engine lives."""
        self._asked = False
        self._waiting.clear()
        return [Hide()]

    def check(self) -> list[Instruction]:
        """It is time to make sure that the last batch was the last: ask, if nobody does."""
        if not self._replays or self._asked:
            return []
        self._asks = 0
        return self._ask(needed=False)

    def live(self, batch: EngineBatch) -> list[Instruction]:
        """A batch came as it was published."""
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
            return []  # A replay had it already.
        self.counts["gaps"] += 1
        return self._doubt(batch)

    def replayed(self, batch: EngineBatch) -> list[Instruction]:
        """A batch came that was asked for."""
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
        """All that was asked for has come."""
        if not self._asked:
            return []
        if self._proof is not None:  # It has no batch of that number: a younger life.
            return self._restarted()
        self.counts["replays" if self._needed else "checks"] += 1
        if self._holed:
            return self._ask(needed=self._needed)
        return self._settle()

    def replay_failed(self) -> list[Instruction]:
        """Nobody answered, or no longer."""
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
        """A replay lacks batches: its socket was full, so ask again; or they are nowhere."""
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
        """Look at the first replayed batch: the one asked for, another life's, or a later one."""
        if batch.seq == proof.seq and batch.digest == proof.digest:
            self._proof = None
            return [Show()]
        if batch.seq <= proof.seq:
            return self._restarted()
        # The engine keeps only so many. Which life this is can't be told, nor what is missing.
        self._proof = None
        self.counts["losses"] += 1
        return [*self._begin_anew(), *self._take(batch)]

    def _restarted(self) -> list[Instruction]:
        """Another life: begin with all that it can still tell, which has what waited too."""
        self.counts["restarts"] += 1
        self._waiting.clear()
        self._asks = 0
        forget = self._begin_anew()
        return [*forget, *self._ask(needed=True)]

    def _doubt(self, batch: EngineBatch) -> list[Instruction]:
        """A batch does not follow: find out what was missed, or begin anew with it."""
        if self._replays:
            self._wait(batch)
            self._asks = 0
            return self._ask(needed=True)
        if self.last is not None:
            self.counts["restarts" if batch.seq <= self.last.seq else "losses"] += 1
        return [*self._begin_anew(), *self._take(batch)]

    def _settle(self) -> list[Instruction]:
        """End a replay: take the batches that waited and follow, drop those that don't.

        One that lies further on, though what was before it could be replayed, is of another life
        or was dropped on the way; then the next batch, or the next check, finds the gap.
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
        """Whether a live batch is the next. One made before the last one is of an earlier life."""
        if self.last is None:
            return batch.seq == 0
        return batch.seq == self.last.seq + 1 and batch.time_s >= self.last.time_s

    def _take(self, batch: EngineBatch) -> list[Instruction]:
        if self.last is None:
            self.complete = batch.seq == 0
        self.last = batch
        if batch.readable:
            return [Take(batch)]
        # It may have said that blocks are gone.
        self.counts["unreadable"] += 1
        self.complete = False
        return [Forget()]

    def _wait(self, batch: EngineBatch) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(batch)
