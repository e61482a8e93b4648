"""The answer cache of one front: memory first, then a store, and one turn per call.

dbfront/generation/generation.py asks here before a model. A failing store costs time only: models
answer the calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.answer_cache.answer_key import AnswerKey, PromptMark, may_keep
from tierkv.dbfront.answer_cache.kept_answer import (
    AnswerStore,
    KeptAnswer,
    RecentAnswers,
    StoreLostError,
)
from tierkv.dbfront.contracts import TextAnswer
from tierkv.kvcore.clock import Clock

_log = logging.getLogger("tierkv.answers")

MEMORY_BYTES: Final = 64 << 20
"""Memory of the answers of one front process."""

_FLUSH_S: Final = 1.0
_MOST_UNWRITTEN: Final = 2_000
"""Answers that are written at once, before the time is up."""
_MOST_PENDING: Final = 5 * _MOST_UNWRITTEN
"""Answers that wait for a store that does not work."""
_MOST_FORGOTTEN: Final = 1_000
"""Forgotten prompts that answers on their way are compared with; beyond, none of these is kept."""
_FIND_S: Final = 2.0
"""Time limit for finding answers in the store."""
_LOST_S: Final = 5.0
"""Time for which a store that failed is left alone."""
_USED_AGAIN_S: Final = 3_600.0
"""An answer is marked as used in the store at most once in this time."""


@dataclass(slots=True)
class AnswerCounts:
    """Counters since the process started.

    Attributes:
        hits: calls answered with a kept answer.
        shared: calls answered with the answer to an equal call in progress.
        misses: calls answered by a model.
        kept: answers that were kept.
        saved_prompt_tokens: prompt tokens of calls without a model.
        saved_completion_tokens: completion tokens of calls without a model.
        errors: failures of the store.
    """

    hits: int = 0
    shared: int = 0
    misses: int = 0
    kept: int = 0
    saved_prompt_tokens: int = 0
    saved_completion_tokens: int = 0
    errors: int = 0


@dataclass(slots=True)
class AnswerTurn:
    """One call's turn at the cache.

    Attributes:
        found: the answer; None: a model must be asked.
        given: the model's answer, set by whoever asked.
    """

    found: KeptAnswer | None = None
    given: TextAnswer | None = None


class AnswerCache:
    """Keeps answers and finds them again.

    Attributes:
        counts: counters.
        recent: the answers in memory.
        tell_fronts: has the other front processes forget, too; soon after it returns.
        store: where answers outlive the process; None: memory only.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        keep_s: float,
        store: AnswerStore | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Create an empty cache.

        Args:
            clock: for the age of answers.
            keep_s: age above which an answer is not used.
            store: a store; the cache closes it.
            memory_bytes: memory for the recent answers.
        """
        self.counts = AnswerCounts()
        self.recent = RecentAnswers(memory_bytes)
        self.store = store
        self.tell_fronts: Callable[[Sequence[PromptMark]], Awaitable[None]] | None = None
        self._clock = clock
        self._keep_s = keep_s
        self._asked: dict[bytes, asyncio.Future[KeptAnswer | None]] = {}
        self._wanted: deque[tuple[bytes, asyncio.Future[KeptAnswer | None]]] = deque()
        self._finding: asyncio.Task[None] | None = None
        self._unwritten: dict[bytes, KeptAnswer] = {}
        self._used: dict[bytes, float] = {}
        self._used_before: dict[bytes, float] = {}
        self._writer: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._full = asyncio.Event()
        self._lost_until_s = 0.0
        self._forgotten: dict[PromptMark, float] = {}
        self._all_forgotten_s = float("-inf")

    async def start(self) -> None:
        """Start writing to the store."""
        if self.store is not None:
            self._writer = asyncio.create_task(self._write(), name="answers")

    async def stop(self) -> None:
        """Write pending answers and close the store."""
        for task in (self._writer, self._finding):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self.store is not None:
            await self.flush()
            await asyncio.to_thread(self.store.close)

    @asynccontextmanager
    async def turn(self, key: AnswerKey, *, leads: bool) -> AsyncIterator[AnswerTurn]:
        """Find the answer to a call, or let the caller ask a model and take the answer.

        Equal calls wait for the answer of the first call. If the first call ends without an
        answer, each call asks a model.

        Args:
            key: key of the call's answer.
            leads: whether others may wait for this caller, which then must not wait for a client.

        Yields:
            turn: with the answer found; otherwise the caller sets ``given`` before it leaves.
        """
        began_s = self._clock.now()
        turn = AnswerTurn(await self._found(key))
        if turn.found is not None:
            self.counts.hits += 1
        elif (asked := self._asked.get(key.digest)) is not None:
            turn.found = await asyncio.shield(asked)
            if turn.found is not None:
                self.counts.shared += 1
        if turn.found is not None:
            self.counts.saved_prompt_tokens += turn.found.prompt_tokens
            self.counts.saved_completion_tokens += turn.found.completion_tokens
            yield turn
            return
        self.counts.misses += 1
        promise: asyncio.Future[KeptAnswer | None] | None = None
        if leads and key.digest not in self._asked:
            promise = self._asked[key.digest] = asyncio.get_running_loop().create_future()
        try:
            yield turn
        finally:
            kept = None
            if turn.given is not None and may_keep(turn.given):
                kept = KeptAnswer.of(turn.given, self._clock.wall(), key.marks())
                if not self._forgot_since(kept, began_s):
                    self._keep(key, kept)
            if promise is not None:
                del self._asked[key.digest]
                promise.set_result(kept)

    async def forget_everywhere(self, marks: Sequence[PromptMark]) -> set[bytes]:
        """Have all front processes forget; return the keys of the answers deleted here.

        Raises:
            StoreLostError: the store does not work, and may have such answers.
            DirectoryUnavailableError: other processes were not told.
        """
        gone = await self.forget(marks)
        if self.tell_fronts is not None:
            await self.tell_fronts(marks)
        return gone

    async def forget(self, marks: Sequence[PromptMark]) -> set[bytes]:
        """Delete all answers to prompts with any of some marks; return their keys.

        An answer on the way from a model or from the store is not kept.

        Raises:
            StoreLostError: the store does not work, and may have such answers.
        """
        if len(self._forgotten) > _MOST_FORGOTTEN:
            self._forgotten.clear()
            self._all_forgotten_s = self._clock.now()
        now_s = self._clock.now()
        self._forgotten |= dict.fromkeys(marks, now_s)
        async with self._writing:  # What is being written is in the store then.
            gone = self.recent.forget(marks)
            for key in [k for k, a in self._unwritten.items() if _is_of(a, marks)]:
                del self._unwritten[key]
                gone.add(key)
            if self.store is not None:
                gone |= await asyncio.to_thread(self.store.forget, marks)
        return gone

    def _forgot_since(self, answer: KeptAnswer, began_s: float) -> bool:
        """Return True if an answer's prompt was forgotten while the answer was on its way."""
        if began_s <= self._all_forgotten_s:
            return True
        return any(
            began_s <= at_s and mark.is_in(answer.marks) for mark, at_s in self._forgotten.items()
        )

    async def flush(self) -> None:
        """Write pending answers; while the store does not work, the latest ones stay pending."""
        async with self._writing:
            if self.store is None or self._is_lost or not (self._unwritten or self._used):
                return
            answers, self._unwritten = self._unwritten, {}
            used, self._used = self._used, {}
            try:
                await asyncio.to_thread(self.store.keep, answers, used, self._clock.wall())
            except StoreLostError as error:
                self._lose(error)
                self._unwritten = answers | self._unwritten

    # -- finding

    async def _found(self, key: AnswerKey) -> KeptAnswer | None:
        now_s = self._clock.wall()
        oldest_s = now_s - min(self._keep_s, key.most_age_s or self._keep_s)
        found = self.recent.find(key.digest, oldest_s)
        if found is None and key.lasts and self.store is not None and not self._is_lost:
            began_s = self._clock.now()
            found = await self._stored(key.digest)
            if found is not None and self._forgot_since(found, began_s):
                found = None
            newer = self.recent.find(key.digest, oldest_s)  # It may have come in the meantime.
            if newer is not None:
                return newer
            if found is not None:
                self.recent.put(key.digest, found)
                if found.made_s < oldest_s:
                    return None
        if found is not None and key.lasts and self.store is not None:
            self._mark_used(key.digest, now_s)
        return found

    def _mark_used(self, digest: bytes, now_s: float) -> None:
        if now_s - self._used_before.get(digest, 0.0) < _USED_AGAIN_S:
            return
        if len(self._used_before) >= 2 * max(_MOST_UNWRITTEN, len(self.recent)):
            self._used_before.clear()
        self._used_before[digest] = self._used[digest] = now_s

    async def _stored(self, digest: bytes) -> KeptAnswer | None:
        """Find an answer in the store; simultaneous calls share one query."""
        found: asyncio.Future[KeptAnswer | None] = asyncio.get_running_loop().create_future()
        self._wanted.append((digest, found))
        if self._finding is None:
            self._finding = asyncio.create_task(self._find())
        return await found

    async def _find(self) -> None:
        assert self.store is not None
        wanted: list[tuple[bytes, asyncio.Future[KeptAnswer | None]]] = []
        try:
            while self._wanted:
                wanted, self._wanted = list(self._wanted), deque()
                answers: dict[bytes, KeptAnswer] = {}
                if not self._is_lost:
                    try:
                        async with asyncio.timeout(_FIND_S):
                            keys = {digest for digest, _ in wanted}
                            answers = await asyncio.to_thread(self.store.find, keys)
                    except (StoreLostError, TimeoutError) as error:
                        self._lose(error)
                for digest, found in wanted:
                    if not found.done():  # Cancelled with its call.
                        found.set_result(answers.get(digest))
        finally:
            self._finding = None
            for _, found in (*wanted, *self._wanted):
                if not found.done():
                    found.set_result(None)
            self._wanted.clear()

    # -- keeping

    def _keep(self, key: AnswerKey, answer: KeptAnswer) -> None:
        self.counts.kept += 1
        self.recent.put(key.digest, answer)
        if key.lasts and self.store is not None:
            self._unwritten[key.digest] = answer
            if len(self._unwritten) > _MOST_PENDING:
                del self._unwritten[next(iter(self._unwritten))]
            self._used_before[key.digest] = answer.made_s
            if len(self._unwritten) >= _MOST_UNWRITTEN:
                self._full.set()

    async def _write(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._full.wait()
            self._full.clear()
            try:
                await self.flush()
            except Exception:  # noqa: BLE001 - the writer must outlive any bug in a write
                _log.exception("answers could not be written")

    @property
    def _is_lost(self) -> bool:
        return self._clock.now() < self._lost_until_s

    def _lose(self, error: Exception) -> None:
        self.counts.errors += 1
        self._lost_until_s = self._clock.now() + _LOST_S
        _log.warning("the answer cache works without its store for %g s: %s", _LOST_S, error)


def _is_of(answer: KeptAnswer, marks: Sequence[PromptMark]) -> bool:
    return any(mark.is_in(answer.marks) for mark in marks)
