"""Checks sealed blocks slowly in the background, to find bad bytes before a reader needs them.

A quarantined slot is tested a round later: patterns are written to the slot and read back. If the
patterns are intact the slot is free again, because most spoilt blocks are not the memory's fault (a
writer with wrong checksums, a stray write). A slot is tested at most three times; after that a bad
slot stays out of use.

``ScrubPlan`` decides which slot is next and when (pure); ``Scrubber`` is the thread that carries
out the plan in the node's life. No lock is held while bytes are hashed: the slot is pinned, and a
reader may share the slot. A test writes, so it holds the lock, but only for a piece at a time.
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
_PIECE_BYTES: Final = 1 << 18
"""Bytes of a slot that are tested under one hold of the lock: about 0.1 ms."""
_TIME_SHARE: Final = 0.02
"""Largest share of a core. Small blocks cost time each, not by their bytes."""
_SHORTEST_PAUSE_S: Final = 0.02
"""Shorter pauses are added up, because waking up costs as much as checking a small block."""
_MOST_HEALS: Final = 3
"""Maximum number of tests of one slot; a slot that goes bad again stays out of use until the
process ends."""


class ScrubPlan:
    """Visits all slots in rounds at a given rate, and in at most ``_TIME_SHARE`` of the time.

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

    def checked(self, size_bytes: int, now: float, took_s: float = 0.0) -> None:
        """Note that ``size_bytes`` were hashed, in ``took_s`` seconds that ended ``now``."""
        pause_s = max(size_bytes / self._rate, took_s / _TIME_SHARE)
        self._free_at = max(self._free_at, now) + pause_s

    def wait_s(self, now: float) -> float:
        """Return how long to pause to keep the rate."""
        return max(0.0, self._free_at - now)


class Scrubber:
    """Hashes the slots that the plan names.

    Attributes:
        checked_bytes: bytes hashed since the process began.
        _suspects: generations of quarantined slots by index, to be tested when seen again.
        _heals: number of tests by index.
    """

    def __init__(self, state: NodeState) -> None:
        self.checked_bytes = 0
        self._state = state
        self._suspects: dict[int, int] = {}
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
        self._begin_round()
        bad = 0
        while (index := self._plan.next()) is not None:
            bad += self._check(index)
        return bad

    def _begin_round(self) -> None:
        with self._state.lock:
            store = self._state.table.store
            self._plan.begin(store.indices())
            quarantined = {i for i in self._suspects if store.in_state(i, SlotState.QUARANTINED)}
        for index in self._suspects.keys() - quarantined:
            del self._suspects[index]

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._begin_round()
            self._run_paced()
            self._stopping.wait(_IDLE_S)

    def _run_paced(self) -> None:
        while (index := self._plan.next()) is not None:
            self._check(index, paced=True)
            if self._pause():
                return

    def _pause(self) -> bool:
        """Keep the rate; return True when the thread must end."""
        wait_s = self._plan.wait_s(self._state.clock.now())
        return self._stopping.wait(wait_s if wait_s >= _SHORTEST_PAUSE_S else 0.0)

    def _check(self, index: int, *, paced: bool = False) -> bool:
        """Check one slot; quarantine the slot if its bytes are bad. Test a quarantined slot."""
        state = self._state
        began_s = state.clock.now()
        with state.lock:
            slot = state.table.store.in_state(index, SlotState.SEALED)
            if slot is not None:
                generation = slot.generation
                state.table.pin(slot)
                view = state.segment.span(slot.offset, 0, slot.length)
                count = slot.block.ranges.count
                sums = [state.segment.stored_checksum(slot, i) for i in range(count)]
        if slot is None:
            self._test(index, paced=paced)
            return False
        bad = not is_sound(slot, view, sums)
        size = len(view)
        view.release()
        with state.lock:
            state.unpin([slot])
            bad = bad and state.running and state.quarantine(index, generation)
        self.checked_bytes += size
        now = state.clock.now()
        self._plan.checked(size, now, now - began_s)
        return bad

    def _test(self, index: int, *, paced: bool) -> None:
        """Free a quarantined slot if its memory passes the test."""
        state = self._state
        with state.lock:
            slot = self._suspect(index)
        if slot is None:
            return
        self._heals[index] += 1
        for start in range(0, slot.extent.slot_bytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, slot.extent.slot_bytes)
            if not self._passes(slot, start, stop):
                return
            self._plan.checked(stop - start, state.clock.now())
            if paced and self._pause():
                return
        with state.lock:
            if self._is_out_of_use(slot):
                state.table.heal(slot)
                state.segment.headers.set_state(index, SlotState.FREE)
                log.warning(
                    "dmp %s: slot %d passed a test, in use again", state.config.node_id, index
                )

    def _suspect(self, index: int) -> Slot | None:
        """Return a quarantined slot that has been seen before and may be tested. Lock held."""
        state = self._state
        slot = state.table.store.in_state(index, SlotState.QUARANTINED)
        if slot is None or slot.pins or self._heals[index] >= _MOST_HEALS:
            return None
        if self._suspects.get(index) != slot.generation:
            self._suspects[index] = slot.generation
            return None
        if not state.segment.backing.back(slot.extent.index):
            return None
        del self._suspects[index]
        return slot

    def _passes(self, slot: Slot, start: int, stop: int) -> bool:
        """Test bytes [start, stop) of a slot that is still out of use."""
        state = self._state
        with state.lock:
            if not self._is_out_of_use(slot):
                return False
            with state.segment.span(slot.offset, start, stop) as memory:
                return keeps_patterns(memory)

    def _is_out_of_use(self, slot: Slot) -> bool:
        """Return True if a slot is the one that was found, quarantined and unread. Lock held."""
        state = self._state
        now = (
            state.table.store.in_state(slot.index, SlotState.QUARANTINED) if state.running else None
        )
        return now is slot and not slot.pins


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
