"""The pool as a tier of chunks, without vLLM's types: what integrations/vllm/tier.py does.

Called in the scheduler's thread, which never waits here but in ``drain`` and ``close``. Whatever
goes wrong ends as a chunk that is not there or a job that failed.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_bytes
from typing import Final

from tierkv.dmp.client.pool import Pool
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.vllm.tier_holds import Holds
from tierkv.integrations.vllm.tier_lookups import LookupBook
from tierkv.integrations.vllm.tier_names import ChunkNames
from tierkv.integrations.vllm.tier_owed import OwedChunks
from tierkv.integrations.vllm.tier_seed import Seed, agree_on_seed
from tierkv.integrations.vllm.tier_transfers import Done, Transfers
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import NamespaceKey

PATIENCE_S: Final = 0.5
"""How long a request waits to learn what the pool has; then it is computed."""

HOLD_S: Final = 30.0
"""How long a chunk is held for a request that does not get so far as to load it."""

LOAD_WAIT_S: Final = 1.0
"""How long a load may wait for a thread; then it fails."""

EXTENT_BYTES: Final = 32 << 20
"""What a pool node divides its memory into, unless it is told otherwise; no value is larger."""

SEED_INTERVAL_S: Final = 3600.0
"""How often the seed of hashes is compared with that of others."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """vLLM's chunks in CPU memory.

    Attributes:
        memory: all of them, one after the other, writable.
        size_bytes: of one.
        tokens: whose KV one has; of several cache groups, its share.
    """

    memory: memoryview
    size_bytes: int
    tokens: float

    @property
    def count(self) -> int:
        """How many there are."""
        return self.memory.nbytes // self.size_bytes


class TierCore:
    """Lookups, jobs and reservations of one engine; for one thread.

    Attributes:
        door: the way to the pool; its counters say what happened.
    """

    def __init__(
        self,
        door: PoolDoor,
        chunks: Chunks,
        *,
        seed: Callable[[], Seed | None],
        forget_on_reset: bool,
        clock: Clock,
    ) -> None:
        """Make a tier.

        Args:
            door: the way to the pool.
            chunks: where chunks come from and go to.
            seed: answers from what the engine's hashes begin; None while it does not know.
            forget_on_reset: whether ``drain`` makes everything stored before unfindable.
            clock: for waits.
        """
        self.door = door
        self._chunks = chunks
        self._seed = seed
        self._forget_on_reset = forget_on_reset
        self._clock = clock
        self._book = LookupBook(patience_s=PATIENCE_S, hold_s=HOLD_S)
        self._holds = Holds(door)
        self._transfers = Transfers(door, chunks.memory, chunks.size_bytes, clock)
        self._owed = OwedChunks()
        self._refused: deque[Done] = deque()
        self._held_for: dict[int, tuple[ChunkNames, list[bytes]]] = {}
        self._epoch = b""
        self._names: ChunkNames | None = None
        self._named_by: tuple[NamespaceKey, bytes] | None = None
        self._seed_at = float("-inf")
        self._step_names: ChunkNames | None = None  # What lookups of one step need not ask again.

    @property
    def held(self) -> int:
        """Chunks that the pool holds for requests that have not begun to load them."""
        return self._book.held

    @property
    def wants_all(self) -> bool:
        """Whether new requests should offer chunks that vLLM has already, too."""
        return self._owed.due(self._clock.now()) and self.door.up

    def look(self, key: bytes, request: str) -> bool | None:
        """Say whether the pool has a chunk, and holds it; None: not known yet."""
        if self._holds.has_answers:
            self._take_answers()
        if self._step_names is None:
            self._step_names = self._current_names()
        if self._step_names is None:
            return False
        return self._book.look(key, request, self._clock.now())

    def store(
        self,
        job_id: int,
        keys: Sequence[bytes],
        chunk_ids: Sequence[int],
        parents: Mapping[bytes, bytes],
    ) -> None:
        """Begin to copy chunks into the pool, if there is a chance that it takes them.

        Args:
            job_id: vLLM's number.
            keys: the chunks.
            chunk_ids: where each is in memory.
            parents: the chunk before each, where that is known.
        """
        names = self._current_names()
        # Chunks that wait to be stored can't be replaced, so they take room from loads.
        if names is None or 2 * self._transfers.waiting_chunks > self._chunks.count:
            self.door.count("tier_stores_skipped", len(keys))
            self._owed.add(keys, self._clock.now())
            self._refuse(job_id, keys, is_load=False)
        else:
            self._transfers.store(job_id, keys, chunk_ids, names, parents)

    def load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int]) -> None:
        """Begin to copy chunks out of the pool."""
        names = self._current_names()
        held = self._book.begin_load(keys)
        if names is None:
            self._book.end_load(held, set())
            self._refuse(job_id, keys, is_load=True)
        else:
            self._held_for[job_id] = (names, held)
            self._transfers.load(job_id, keys, chunk_ids, names)

    def take_finished(self) -> list[Done]:
        """Return the jobs that ended since the last call."""
        finished = [*self._refused, *self._transfers.take_finished()]
        self._refused.clear()
        for done in finished:
            if done.is_load:
                self._end_load(done)
            else:
                self._end_store(done)
        return finished

    def end_request(self, request: str) -> None:
        """Let go of what is held for a request that asks no more."""
        self._let_go(self._book.forget(request))

    def end_step(self) -> None:
        """Ask the pool what the step wanted to know, and let go of what nobody waits for."""
        now = self._clock.now()
        self._step_names = None
        self._take_answers()
        self._let_go(self._book.expire(now))
        late = self._transfers.give_up(now - LOAD_WAIT_S)
        if late:
            self.door.complain(
                "load_late",
                f"{late} chunks waited {LOAD_WAIT_S:g} s to be loaded and are computed instead",
                hint="more threads, or a faster path to the pool",
            )
        names = self._current_names()
        wanted = self._book.take_wanted()
        if names is None:
            self._book.answer(dict.fromkeys(wanted, False), now)
        elif wanted:
            self._holds.ask(names, wanted)
        if names is not None:
            self._check_seed(now)
        self._holds.flush()

    def touch(self, keys: Collection[bytes]) -> None:
        """Tell the pool now and then of chunks that vLLM uses from its own memory."""
        names = self._current_names()
        if names is not None:
            self._holds.touch(names, keys, self._clock.now())

    def drain(self) -> None:
        """Wait until no thread touches vLLM's memory.

        vLLM asks for it when it resets its caches: weights may have changed, or the user wants all
        that was cached forgotten. So from then on chunks have names of this process alone.
        """
        self._transfers.drain()
        if self._forget_on_reset:
            self._let_go(self._book.clear())
            self._owed.clear()
            self._epoch, self._names, self._step_names = token_bytes(16), None, None
            self.door.complain(
                "cache_reset",
                "vLLM's caches were reset: what was stored before is not found any more, and "
                "nothing is shared with other engines until this one is started again",
                hint='if weights never change while it runs, "reset": "keep"',
            )
        self._holds.flush()

    def close(self) -> None:
        """Let go of everything; what is in the pool stays."""
        self._transfers.drain()
        self._let_go(self._book.clear())
        self._holds.flush()
        self.door.close()
        gc.collect()  # What is left of reads is in cycles; vLLM can't unmap what is still sliced.
        self._chunks.memory.release()

    def check_invariants(self) -> None:
        """Check the book; for tests."""
        self._book.check_invariants()

    # Inside

    def _current_names(self) -> ChunkNames | None:
        """Return how chunks are named; None while the pool is away."""
        if not self.door.up:
            return None
        base, seed = self.door.base_key, self._seed()
        if base is None or seed is None:
            return None
        if self._names is None or self._named_by != (base, seed.value):
            if self._names is not None:
                self._let_go(self._book.clear())  # Under the old names.
            self._names = ChunkNames(base, seed=seed.value, epoch=self._epoch)
            self._named_by = (base, seed.value)
            self._seed_at = float("-inf")
        return self._names

    def _check_seed(self, now: float) -> None:
        """Look every hour whether engines' hashes mean the same."""
        base, seed = self.door.base_key, self._seed()
        if now < self._seed_at or self._epoch or base is None or seed is None:
            return
        self._seed_at = now + SEED_INTERVAL_S
        if seed.is_random:
            self.door.complain(
                "hash_seed",
                "vLLM's hashes have a random seed: a restart finds nothing of what is stored now, "
                "and engines share nothing",
                hint="start vLLM with PYTHONHASHSEED=0, or --prefix-caching-hash-algo sha256",
            )
            return

        def check(pool: Pool) -> None:
            if not agree_on_seed(pool, base, seed.value, wall_s=self._clock.wall()):
                self.door.complain(
                    "hash_seed",
                    "the pool has chunks of this model that were named by another algorithm or "
                    "seed of vLLM's hashes: they are not found",
                    hint="the same --prefix-caching-hash-algo and PYTHONHASHSEED everywhere",
                )

        self.door.submit(check, None, name="tier_seed")

    def _take_answers(self) -> None:
        for answer in self._holds.take_answers():
            if answer.names is self._names:
                unwanted = self._book.answer(answer.there, self._clock.now())
            else:
                unwanted = [key for key, there in answer.there.items() if there]
            self._holds.let_go(answer.names, unwanted)
            self._count("query_tokens", len(answer.there))

    def _let_go(self, keys: list[bytes]) -> None:
        if self._names is not None:
            self._holds.let_go(self._names, keys)

    def _refuse(self, job_id: int, keys: Sequence[bytes], *, is_load: bool) -> None:
        self._refused.append(Done(job_id, is_load, tuple(keys), frozenset(), 0.0, 0, started=False))

    def _end_load(self, done: Done) -> None:
        names, held = self._held_for.pop(done.job_id, (None, []))
        if names is not None:
            self._book.end_load(held, done.done)
            self._holds.let_go(names, held)
        self._count("hit_tokens", len(done.done))
        self.door.count("read_bytes", done.moved_bytes)
        if done.started and not done.whole:
            self.door.complain(
                "load_failed",
                f"{len(done.keys) - len(done.done)} of {len(done.keys)} chunks could not be read: "
                "gone meanwhile, or damaged; they are computed",
            )

    def _end_store(self, done: Done) -> None:
        self._book.stored(done.done)
        self._owed.paid(done.done)
        missing = [key for key in done.keys if key not in done.done]
        if missing:
            self._owed.add(missing, self._clock.now())
        if missing and self._chunks.size_bytes >= EXTENT_BYTES:
            self.door.complain(
                "chunk_too_large",
                f"no pool node took a chunk of {self._chunks.size_bytes} bytes: by default the "
                f"largest is just below {EXTENT_BYTES}",
                hint="a smaller block_size (or blocks_per_chunk) in kv_connector_extra_config",
            )
        self._count("stored_tokens", done.moved_bytes // self._chunks.size_bytes)
        self.door.count("write_bytes", done.moved_bytes)

    def _count(self, name: str, chunks: int) -> None:
        if chunks:
            self.door.count(name, round(chunks * self._chunks.tokens))
