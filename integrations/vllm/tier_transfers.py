"""Copies between vLLM's chunks in CPU memory and the pool, by the door's threads.

Called by integrations/vllm/tier.py in the scheduler's thread, which never waits here but in
``drain``. A job is cut in parts: so several threads work on a large one, and a load waits for few
bytes of a store. A part that a thread has begun is never reported before that thread has let go of
the memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from tierkv.dmp.client.arguments import BY_HAND, PutNotes
from tierkv.dmp.client.pool import Pool
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.vllm.tier_names import ChunkNames
from tierkv.kvcore.clock import Clock

PART_BYTES: Final = 16 << 20
"""Bytes of one part, at least a chunk: about ten milliseconds over TCP."""

STORE_PARTS: Final = 2
"""Parts of stores that the door has at once; a load waits behind no more than these."""


class _State(Enum):
    WAITING = auto()
    RUNNING = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True)
class Done:
    """A job that is over.

    Attributes:
        job_id: vLLM's number of it.
        is_load: from the pool; else into it.
        keys: its chunks.
        done: those that were copied, or were there already; the others may hold garbage.
        took_s: from its submission.
        moved_bytes: of the chunks that were copied.
        started: whether a thread had begun with any of it.
    """

    job_id: int
    is_load: bool
    keys: tuple[bytes, ...]
    done: frozenset[bytes]
    took_s: float
    moved_bytes: int
    started: bool

    @property
    def whole(self) -> bool:
        """Whether all of it was copied."""
        return self.done.issuperset(self.keys)


@dataclass(slots=True)
class _Job:
    job_id: int
    is_load: bool
    keys: tuple[bytes, ...]
    names: ChunkNames
    submitted_s: float
    left: int = 0
    done: set[bytes] = field(default_factory=set)
    moved: int = 0
    started: bool = False


@dataclass(slots=True)
class _Part:
    job: _Job
    keys: Sequence[bytes]
    chunk_ids: Sequence[int]
    state: _State = _State.WAITING
    parents: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Copied:
    """Chunks of a part that are where they should be, and how many of them were moved."""

    keys: Sequence[bytes] = ()
    moved: int = 0


class Transfers:
    """The jobs under way; thread-safe.

    Args:
        door: the way to the pool.
        memory: all chunks one after the other, writable.
        chunk_bytes: size of each.
        clock: for what jobs take.
    """

    def __init__(self, door: PoolDoor, memory: memoryview, chunk_bytes: int, clock: Clock) -> None:
        self._door = door
        self._memory = memory
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[_Part] = deque()  # Stores the door does not have yet.
        self._loads: deque[_Part] = deque()  # In the order of their submission; for ``give_up``.
        self._waiting_chunks = 0
        self._stores = 0  # Parts of stores that the door has.
        self._pumping = False
        self._jobs = 0
        self._finished: deque[Done] = deque()
        self._registered = False

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._jobs > 0

    @property
    def waiting_chunks(self) -> int:
        """Chunks whose store has not begun."""
        return self._waiting_chunks

    def store(
        self,
        job_id: int,
        keys: Sequence[bytes],
        chunk_ids: Sequence[int],
        names: ChunkNames,
        parents: Mapping[bytes, bytes],
    ) -> None:
        """Copy chunks into the pool; those that are there already stay as they are."""
        parts = self._begin(job_id, keys, chunk_ids, names, is_load=False)
        for part in parts:
            part.parents = parents
        with self._changed:
            self._waiting += parts
            self._waiting_chunks += len(keys)
        self._pump()

    def load(
        self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int], names: ChunkNames
    ) -> None:
        """Copy chunks out of the pool."""
        parts = self._begin(job_id, keys, chunk_ids, names, is_load=True)
        with self._changed:
            self._loads += parts
        for part in parts:
            self._submit(part, self._read)

    def take_finished(self) -> list[Done]:
        """Return the jobs that ended since the last call."""
        with self._changed:
            done = list(self._finished)
            self._finished.clear()
        return done

    def give_up(self, submitted_before_s: float) -> int:
        """Fail the parts of old loads that no thread has begun; return how many chunks that are."""
        late: list[_Part] = []
        with self._changed:
            while self._loads and self._loads[0].job.submitted_s < submitted_before_s:
                late.append(self._loads.popleft())
        return sum(len(part.keys) for part in late if self._cancel(part))

    def drain(self) -> None:
        """Fail what has not begun and wait until no thread touches the memory."""
        with self._changed:
            parts = [*self._waiting, *self._loads]
            self._waiting.clear()
            self._waiting_chunks = 0
            self._loads.clear()
        for part in parts:
            self._cancel(part)
        with self._changed:
            # What the door holds of stores is neither waiting nor cancelled: its threads end it.
            self._changed.wait_for(lambda: self._jobs == 0)

    # Inside

    def _begin(
        self,
        job_id: int,
        keys: Sequence[bytes],
        chunk_ids: Sequence[int],
        names: ChunkNames,
        *,
        is_load: bool,
    ) -> list[_Part]:
        job = _Job(job_id, is_load, tuple(keys), names, self._clock.now())
        step = max(1, PART_BYTES // self._chunk_bytes)
        parts = [
            _Part(job, job.keys[i : i + step], chunk_ids[i : i + step])
            for i in range(0, len(job.keys), step)
        ]
        job.left = len(parts)
        with self._changed:
            self._jobs += 1
        if not parts:
            self._report(job)
        return parts

    def _pump(self) -> None:
        """Give the door the next parts of stores; one thread at a time does it.

        A door that is down ends a part within ``submit``: a loop, not a call from there, goes on.
        """
        with self._changed:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._changed:
                if not self._waiting or self._stores >= STORE_PARTS:
                    self._pumping = False
                    return
                part = self._waiting.popleft()
                self._waiting_chunks -= len(part.keys)
                self._stores += 1
            self._submit(part, self._write)

    def _submit(self, part: _Part, copy: Callable[[Pool, _Part], _Copied]) -> None:
        def work(pool: Pool) -> None:
            with self._changed:
                if part.state is not _State.WAITING:
                    return
                part.state = _State.RUNNING
                part.job.started = True
            copied = _Copied()
            try:
                self._register(pool)
                copied = copy(pool, part)
            finally:
                self._end(part, copied)

        def over(_: Future[None]) -> None:
            self._cancel(part)  # Does nothing where a thread has begun.
            if not part.job.is_load:
                with self._changed:
                    self._stores -= 1
                self._pump()

        name = "load" if part.job.is_load else "store"
        future = self._door.submit(work, None, name=f"tier_{name}", urgent=part.job.is_load)
        future.add_done_callback(over)

    def _register(self, pool: Pool) -> None:
        if not self._registered:
            self._registered = True
            pool.register(self._memory)

    def _read(self, pool: Pool, part: _Part) -> _Copied:
        names = part.job.names
        # A chunk is one range; a value that is not exactly as long is not read.
        filled = pool.get_ranges_into(
            [
                (names.name(key), 0, view)
                for key, view in zip(part.keys, self._views(part), strict=True)
            ]
        )
        read = [key for key, ok in zip(part.keys, filled, strict=True) if ok]
        return _Copied(read, len(read))

    def _write(self, pool: Pool, part: _Part) -> _Copied:
        names = [part.job.names.name(key) for key in part.keys]
        there = pool.exists_many(names)
        missing = [
            (name, view)
            for name, view, known in zip(names, self._views(part), there, strict=True)
            if not known
        ]
        notes = [
            _notes(part, key) for key, known in zip(part.keys, there, strict=True) if not known
        ]
        stored = iter(pool.put_many(missing, notes=notes) if missing else [])
        kept = [known or next(stored) for known in there]
        copied = [key for key, ok in zip(part.keys, kept, strict=True) if ok]
        return _Copied(copied, len(copied) - sum(there))

    def _views(self, part: _Part) -> Iterator[memoryview]:
        for chunk in part.chunk_ids:
            start = int(chunk) * self._chunk_bytes
            yield self._memory[start : start + self._chunk_bytes]

    def _cancel(self, part: _Part) -> bool:
        """End a part that no thread has begun; False if one has, or it is over."""
        with self._changed:
            if part.state is not _State.WAITING:
                return False
            self._finish(part, _Copied())
        return True

    def _end(self, part: _Part, copied: _Copied) -> None:
        with self._changed:
            self._finish(part, copied)

    def _finish(self, part: _Part, copied: _Copied) -> None:
        part.state = _State.OVER
        job = part.job
        job.done.update(copied.keys)
        job.moved += copied.moved * self._chunk_bytes
        job.left -= 1
        if not job.left:
            self._report(job)

    def _report(self, job: _Job) -> None:
        took = self._clock.now() - job.submitted_s
        done = Done(
            job.job_id, job.is_load, job.keys, frozenset(job.done), took, job.moved, job.started
        )
        with self._changed:
            self._finished.append(done)
            self._jobs -= 1
            self._changed.notify_all()


def _notes(part: _Part, key: bytes) -> PutNotes:
    """Say that a chunk is wanted, and which one it continues."""
    parent = part.parents.get(key)
    return BY_HAND if parent is None else replace(BY_HAND, parent=part.job.names.name(parent))
