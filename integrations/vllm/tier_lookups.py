"""Which chunks the pool has, as far as vLLM's scheduler asked: a book, kept by the tier.

Called by integrations/vllm/tier.py in the scheduler's thread. A chunk that is found is held for us
from then on (a reservation), until it is loaded, nobody wants it any more, or too much time has
passed; what has to be let go is what these methods return. No pool, no clock, no threads, no vLLM
here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from tierkv.kvcore import limits


class Phase(Enum):
    """What is known of a chunk. Only HELD and LOADING chunks are held in the pool."""

    WANTED = auto()
    ASKED = auto()
    HELD = auto()
    LOADING = auto()
    ABSENT = auto()


@dataclass(slots=True)
class _Chunk:
    """A chunk somebody asked for.

    Attributes:
        phase: what is known.
        since: when it was asked for or, from HELD on, when that became known.
        requests: those that asked and are not over; in HELD and ABSENT never empty.
    """

    phase: Phase
    since: float
    requests: set[str] = field(default_factory=set)


class LookupBook:
    """Chunks by key, and the requests that asked for them; mutated by one thread only."""

    def __init__(self, *, patience_s: float, hold_s: float) -> None:
        self._patience_s = patience_s
        self._hold_s = hold_s
        self._chunks: dict[bytes, _Chunk] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._wanted: list[bytes] = []
        self._held: dict[bytes, float] = {}  # In the order of time, so that old ones come first.

    @property
    def held(self) -> int:
        """Chunks held and not yet being loaded."""
        return len(self._held)

    def look(self, key: bytes, request: str, now: float) -> bool | None:
        """Say whether the pool has a chunk; None: not known yet, ask again.

        Nobody waits longer than the patience: then the answer is no, whatever comes later.
        """
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = _Chunk(Phase.WANTED, now)
            self._wanted.append(key)
        if request not in chunk.requests:
            chunk.requests.add(request)
            self._asked_by.setdefault(request, set()).add(key)
        match chunk.phase:
            case Phase.HELD:
                return True
            case Phase.ABSENT:
                return False
            case _:
                return False if now - chunk.since > self._patience_s else None

    def take_wanted(self) -> list[bytes]:
        """Return the chunks that the pool is to be asked for now, in the order of their asking."""
        if not self._wanted:
            return []
        ask = [key for key in dict.fromkeys(self._wanted) if self._is(key, Phase.WANTED)]
        self._wanted = ask[limits.MAX_CHAIN_BLOCKS :]
        del ask[limits.MAX_CHAIN_BLOCKS :]
        for key in ask:
            self._chunks[key].phase = Phase.ASKED
        return ask

    def answer(self, there: Mapping[bytes, bool], now: float) -> list[bytes]:
        """Take the pool's answer; a chunk that is there is held. Returns what to let go."""
        unwanted: list[bytes] = []
        for key, found in there.items():
            chunk = self._chunks.get(key)
            if chunk is None or chunk.phase is not Phase.ASKED or not chunk.requests:
                if self._is(key, Phase.ASKED):
                    del self._chunks[key]
                if found:
                    unwanted.append(key)
                continue
            chunk.phase, chunk.since = (Phase.HELD if found else Phase.ABSENT), now
            if found:
                self._held[key] = now
        return unwanted

    def begin_load(self, keys: Iterable[bytes]) -> list[bytes]:
        """Note that held chunks are being loaded; returns those that are held for it."""
        held = [key for key in keys if key in self._held]
        for key in held:
            del self._held[key]
            self._chunks[key].phase = Phase.LOADING
        return held

    def end_load(self, held: Iterable[bytes], loaded: Collection[bytes]) -> None:
        """Note that a load is over; the caller lets go what was held for it.

        A chunk that could not be loaded counts as absent for those that asked for it, or they would
        have it loaded again and again.
        """
        for key in held:
            if not self._is(key, Phase.LOADING):
                continue  # The book was cleared meanwhile.
            chunk = self._chunks[key]
            if key in loaded or not chunk.requests:
                del self._chunks[key]
            else:
                chunk.phase = Phase.ABSENT

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note that chunks are in the pool now: those said to be absent are asked for again."""
        for key in keys:
            if self._is(key, Phase.ABSENT):
                del self._chunks[key]

    def forget(self, request: str) -> list[bytes]:
        """Note that a request asks no more. Returns what to let go."""
        unwanted: list[bytes] = []
        for key in self._asked_by.pop(request, ()):
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            chunk.requests.discard(request)
            # What is being asked for or loaded waits for its answer.
            if not chunk.requests and chunk.phase not in (Phase.ASKED, Phase.LOADING):
                del self._chunks[key]
                if self._held.pop(key, None) is not None:
                    unwanted.append(key)
        return unwanted

    def expire(self, now: float) -> list[bytes]:
        """Give up what has been held too long for nothing. Returns what to let go."""
        unwanted: list[bytes] = []
        for key, since in self._held.items():
            if now - since <= self._hold_s:
                break
            unwanted.append(key)
        for key in unwanted:
            del self._held[key], self._chunks[key]
        return unwanted

    def clear(self) -> list[bytes]:
        """Forget everything, answers to come included. Returns what to let go."""
        unwanted = list(self._held)
        self._chunks.clear()
        self._asked_by.clear()
        self._wanted.clear()
        self._held.clear()
        return unwanted

    def check_invariants(self) -> None:
        """Compare the indexes with the chunks; for tests.

        Raises:
            AssertionError: they differ.
        """
        held = {key for key, chunk in self._chunks.items() if chunk.phase is Phase.HELD}
        assert held == set(self._held)
        for key, chunk in self._chunks.items():
            assert chunk.requests or chunk.phase in (Phase.ASKED, Phase.LOADING), key
            assert all(key in self._asked_by[request] for request in chunk.requests), key

    def _is(self, key: bytes, phase: Phase) -> bool:
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.phase is phase
