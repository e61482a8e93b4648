"""A Pool for asyncio: the same methods as coroutines.

Transports block, so each call runs in a thread of a small pool. A cancelled call with memory of the
caller (put, get_into) ends only when no thread touches the memory any more, which takes at most the
pool's timeouts. Every other cancelled call ends at once, and its result is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Self, TypeVar

from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.values import Key, PoolStats, Value

T = TypeVar("T")
THREADS: Final = 8
"""Number of concurrent calls; further calls wait. Transfers release the interpreter lock."""


class AsyncPool:
    """A Pool behind a few threads; ``pool`` is the blocking Pool, which threads may use freely."""

    def __init__(self, pool: Pool, *, threads: int = THREADS) -> None:
        self.pool = pool
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pool")

    @classmethod
    async def connect(
        cls, addresses: str | Sequence[str], *, threads: int = THREADS, **options: Any
    ) -> Self:
        """Reach the nodes; ``options`` and errors are as for ``Pool.connect``."""
        pool = await asyncio.to_thread(partial(Pool.connect, addresses, **options))
        return cls(pool, threads=threads)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for running calls, then close the pool."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.pool.close()

    async def put(self, key: Key, value: Value, *, range_bytes: int | None = None) -> bool:
        """As ``Pool.put``; the value must not change until the call ends, cancelled or not."""
        return await self._lent(partial(self.pool.put, key, value, range_bytes=range_bytes))

    async def put_many(
        self,
        items: Mapping[Key, Value] | Iterable[tuple[Key, Value]],
        *,
        range_bytes: int | None = None,
    ) -> list[bool]:
        """As ``Pool.put_many``; the values must not change until the call ends."""
        return await self._lent(partial(self.pool.put_many, items, range_bytes=range_bytes))

    async def get(self, key: Key) -> bytes | None:
        """As ``Pool.get``."""
        return await self._own(partial(self.pool.get, key))

    async def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """As ``Pool.get_many``."""
        return await self._own(partial(self.pool.get_many, keys))

    async def get_into(self, key: Key, buffer: bytearray | memoryview) -> int | None:
        """As ``Pool.get_into``; no byte is written to the buffer after the call has ended."""
        return await self._lent(partial(self.pool.get_into, key, buffer))

    async def get_many_into(
        self, items: Sequence[tuple[Key, bytearray | memoryview]]
    ) -> list[int | None]:
        """As ``Pool.get_many_into``; no byte is written to a buffer after the call has ended."""
        return await self._lent(partial(self.pool.get_many_into, items))

    async def get_ranges(self, key: Key, indices: Sequence[int]) -> list[bytes] | None:
        """As ``Pool.get_ranges``."""
        return await self._own(partial(self.pool.get_ranges, key, indices))

    async def get_ranges_into(self, reads: Sequence[tuple[Key, int, memoryview]]) -> list[bool]:
        """As ``Pool.get_ranges_into``; no byte is written to a buffer after the call has ended."""
        return await self._lent(partial(self.pool.get_ranges_into, reads))

    async def get_span(self, key: Key, offset: int, length: int) -> bytes | None:
        """As ``Pool.get_span``."""
        return await self._own(partial(self.pool.get_span, key, offset, length))

    @contextlib.asynccontextmanager
    async def view(self, key: Key) -> AsyncIterator[memoryview]:
        """As ``Pool.view``."""
        lent = self.pool.view(key)
        leave = partial(lent.__exit__, None, None, None)
        view = await self._taken(lent.__enter__, leave)
        try:
            yield view
        finally:
            await self._lent(leave)

    async def exists(self, key: Key) -> bool:
        """As ``Pool.exists``."""
        return await self._own(partial(self.pool.exists, key))

    async def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """As ``Pool.exists_many``."""
        return await self._own(partial(self.pool.exists_many, keys))

    async def pin(self, key: Key) -> bool:
        """As ``Pool.pin``; a cancelled call leaves no pin."""
        return await self._taken(partial(self.pool.pin, key), partial(self.pool.unpin, key))

    async def unpin(self, key: Key) -> None:
        """As ``Pool.unpin``."""
        await self._lent(partial(self.pool.unpin, key))

    async def stats(self) -> PoolStats:
        """As ``Pool.stats``."""
        return await self._own(self.pool.stats)

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(call)
        except RuntimeError as error:
            raise ValueError("the pool is closed") from error

    async def _own(self, call: Callable[[], T]) -> T:
        """Run a call that touches no memory of the caller."""
        return await asyncio.wrap_future(self._submit(call))

    async def _lent(self, call: Callable[[], T]) -> T:
        """Run a call that touches memory of the caller; a cancelled call still runs to its end."""
        return await self._taken(call, lambda: None)

    async def _taken(self, take: Callable[[], T], undo: Callable[[], object]) -> T:
        """Run a call to its end; when cancelled, undo a successful call."""
        job = self._submit(take)
        try:
            return await asyncio.shield(asyncio.wrap_future(job))
        except asyncio.CancelledError:
            # A call that still waited for a thread never begins.
            if not job.cancel():
                await _ended(job, then=lambda: self._submit(undo))
            raise


async def _ended(job: Future[T], *, then: Callable[[], Future[object]] | None = None) -> None:
    """Wait for a call to end, however often the waiter is cancelled meanwhile.

    Args:
        job: the call.
        then: starts another call to wait for, unless the first call failed or had an empty result.
    """
    waiter = asyncio.wrap_future(job)
    while not waiter.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waiter])
    if not waiter.exception() and waiter.result() and then is not None:
        await _ended(then())
