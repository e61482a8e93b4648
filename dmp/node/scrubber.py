"""Checks sealed blocks slowly in the background, to find bad bytes before a reader needs them.

A quarantined slot is tested a round later: patterns are written to the slot and read back. If the
patterns are intact the slot is free again, because most spoilt blocks are not the memory's fault (a
writer with wrong checksums, a stray write). A slot is tested at most three times; after that a bad
slot stays out of use.

``ScrubPlan`` decides which slot is next and when (pure); ``Scrubber`` is the thread that carries
out the plan in the node's life. No lock is held while bytes are hashed: the slot is pinned, and a
reader may share the slot.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final

import xxhash

from tierkv.dmp.node.state import NodeState
from tierkv.dmp.segment.slots import Slot, SlotState

log = logging.getLogger(__name__)
_IDLE_S: Final = 1.0
"""Pause between rounds; a stop is noticed at once."""

_PATTERNS: Final = (b"\x55", b"\xaa")
_MOST_HEALS: Final = 3
"""Maximum number of tests of one slot; a slot that goes bad again stays out of use until the
process ends."""


class ScrubPlan:
    """Visits all slots in rounds at a given rate.

    Attributes:
        rounds: number of completed rounds.
    """

    def __init__(self, rate_bytes_per_s: int) -> None:
        self.rounds = 0
        self._rate = rate_bytes_per_s
        self._todo: list[int] = []
        self._free_at = 0.0

    def begin(self, indices: Sequence[int]) -> None:
        """Begin a round over slots, in the order of memory."""
        self._todo = sorted(indices, reverse=True)

    def next(self) -> int | None:
        """Return the next slot; None at the end of a round."""
        if self._todo:
            return self._todo.pop()
        self.rounds += 1
        return None

    def checked(self, size_bytes: int, now: float) -> None:
        """Note that ``size_bytes`` were hashed."""
        self._free_at = max(self._free_at, now) + size_bytes / self._rate

    def wait_s(self, now: float) -> float:
        """Return how long to pause to keep the rate."""
        return max(0.0, self._free_at - now)


class Scrubber:
    """Hashes the slots that the plan names.

    Attributes:
        checked_bytes: bytes hashed since the process began.
    """

    def __init__(self, state: NodeState) -> None:
        self.checked_bytes = 0
        self._state = state
        self._suspects: set[int] = set()
        self._heals: Counter[int] = Counter()
        self._plan = ScrubPlan(max(1, state.config.scrub_rate_bytes_per_s))
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless the rate is 0."""
        if self._state.config.scrub_rate_bytes_per_s > 0:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="dmp-scrub", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def run_round(self) -> int:
        """Check every sealed slot once, without pauses; return the number of bad slots."""
        with self._state.lock:
            self._plan.begin(self._state.table.store.indices())
        bad = 0
        while (index := self._plan.next()) is not None:
            bad += self._check(index)
        return bad

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._state.lock:
                self._plan.begin(self._state.table.store.indices())
            self._run_paced()
            self._stopping.wait(_IDLE_S)

    def _run_paced(self) -> None:
        while (index := self._plan.next()) is not None:
            self._check(index)
            if self._stopping.wait(self._plan.wait_s(self._state.clock.now())):
                return

    def _check(self, index: int) -> bool:
        """Check one slot; quarantine the slot if its bytes are bad."""
        state = self._state
        with state.lock:
            slot = state.table.store.in_state(index, SlotState.SEALED)
            if slot is None:
                return self._test(index)
            generation = slot.generation
            state.table.pin(slot)
            view = state.segment.span(slot.offset, 0, slot.length)
            sums = [state.segment.stored_checksum(slot, i) for i in range(slot.block.ranges.count)]
        bad = not is_sound(slot, view, sums)
        size = len(view)
        view.release()
        with state.lock:
            state.unpin(slot)
            bad = bad and state.running and state.quarantine(index, generation)
        self.checked_bytes += size
        self._plan.checked(size, state.clock.now())
        return bad

    def _test(self, index: int) -> bool:
        """Free a quarantined slot if its memory passes the test. Lock held.

        Returns:
            False: the test finds no new bad block.
        """
        state = self._state
        slot = state.table.store.in_state(index, SlotState.QUARANTINED)
        if slot is None or slot.pins or self._heals[index] >= _MOST_HEALS:
            return False
        if index not in self._suspects:
            self._suspects.add(index)
            return False
        if not state.segment.backing.back(slot.extent.index):
            return False
        self._suspects.discard(index)
        self._heals[index] += 1
        if keeps_patterns(state.segment.span(slot.offset, 0, slot.extent.slot_bytes)):
            state.table.heal(slot)
            state.segment.set_state(index, SlotState.FREE)
            log.warning("dmp %s: slot %d passed a test, in use again", state.config.node_id, index)
        return False


def keeps_patterns(memory: memoryview) -> bool:
    """Return True if written patterns read back intact; the memory is zero afterwards."""
    kept = True
    for pattern in _PATTERNS:
        memory[:] = pattern * len(memory)
        kept &= memory == pattern * len(memory)
    memory[:] = bytes(len(memory))
    return kept


def is_sound(slot: Slot, view: memoryview, sums: Sequence[int]) -> bool:
    """Return True if a payload has the checksums of its writer."""
    size = slot.block.ranges.size_bytes
    return all(
        xxhash.xxh3_64_intdigest(view[i * size : (i + 1) * size]) == stored
        for i, stored in enumerate(sums)
    )
