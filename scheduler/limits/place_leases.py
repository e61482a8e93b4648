"""Calls in flight of several fronts, counted in Valkey or Redis, and calls without a turn yet.

A limited subject has a sorted set of leases, each with the time of its end by the server's clock. A
front renews the leases of its calls, so the places of a front that was killed come back after
``LEASE_S``. A server that lost its memory learns of calls in flight with the next renewal. The gate
(scheduler/limits/gate.py) uses the leases through the meter; a gate alone counts by itself.

A statement under a smooth limit may take hours: ``tierkv.my_limits`` shows how many of the
statement's calls wait, and when the next call goes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tierkv.kvcore.call_limits import Subject
from tierkv.scheduler.shared_state.contract import SharedStateLostError
from tierkv.scheduler.shared_state.valkey import SERVER_NOW, ServerScripts

_log = logging.getLogger(__name__)
LEASE_S: Final = 15.0
"""A place of a killed front comes back after this time."""
_RENEW_S: Final = 5.0
_PREFIX: Final = "{tierkv:limits}:places:"

_TAKE: Final = (
    SERVER_NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.6f', now))
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], string.format('%.6f', now + ARGV[3]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[3] * 1000))
return 1
"""
)
"""Arguments: the lease, the places, and how long the lease holds in seconds."""
_RENEW: Final = (
    SERVER_NOW
    + """
for i, key in ipairs(KEYS) do
  redis.call('ZADD', key, string.format('%.6f', now + ARGV[1]), ARGV[i + 1])
  redis.call('PEXPIRE', key, math.ceil(ARGV[1] * 1000))
end
"""
)
_COUNT: Final = (
    SERVER_NOW
    + """
local found = {}
for i, key in ipairs(KEYS) do
  found[i] = redis.call('ZCOUNT', key, string.format('(%.6f', now), '+inf')
end
return found
"""
)
_RETURN: Final = "for i, key in ipairs(KEYS) do redis.call('ZREM', key, ARGV[i]) end"


@dataclass(slots=True)
class PlacesHere:
    """Calls of one subject in this process.

    Attributes:
        taken: the number in flight.
        first: held by the call that asks for a place among all fronts' calls.
        waiting: calls without a place.
    """

    taken: int = 0
    first: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def fill(self, most: int) -> bool:
        """Give free places to waiting calls, all with ``most`` 0; return whether calls are left."""
        while self.waiting and (not most or self.taken < most):
            place = self.waiting.popleft()
            if not place.done():
                self.taken += 1
                place.set_result(None)
        return bool(self.taken or self.waiting)


@dataclass(slots=True)
class RunningCalls:
    """Running calls that hold completion tokens of one bucket.

    Attributes:
        calls: how many.
        ended: set when the next of the calls ends.
    """

    calls: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class CallsWaiting(NamedTuple):
    """Calls of one subject that wait in this process.

    Attributes:
        calls: number of calls without a turn, for a limit of the subject or of the call's others.
        next_s: seconds until the next call goes; None if no call waits, or a running call decides.
    """

    calls: int = 0
    next_s: float | None = None


NONE_WAIT: Final = CallsWaiting()


class CallTurns:
    """Turns of waiting calls, by the subjects of their limits."""

    def __init__(self) -> None:
        self._locks: dict[tuple[Subject, ...], asyncio.Lock] = {}
        self._waiting: Counter[Subject] = Counter()
        self._next_at: dict[Subject, float] = {}

    @contextmanager
    def counted(self, subjects: tuple[Subject, ...]) -> Iterator[None]:
        """Count a call as waiting."""
        self._waiting.update(subjects)
        try:
            yield
        finally:
            self._waiting.subtract(subjects)
            for subject in subjects:
                if not self._waiting[subject]:
                    del self._waiting[subject]

    @asynccontextmanager
    async def turn(self, subjects: tuple[Subject, ...]) -> AsyncIterator[None]:
        """Let waiting calls take one after the other.

        Otherwise a statement's last call would seem to wait for all calls at once.
        """
        lock = self._locks.setdefault(subjects, asyncio.Lock())
        async with lock:
            yield
        if not lock.locked() and self._locks.get(subjects) is lock:
            del self._locks[subjects]

    async def pause(self, subjects: tuple[Subject, ...], wait_s: float) -> None:
        """Wait before a call goes."""
        now_s = asyncio.get_running_loop().time()
        self._next_at |= dict.fromkeys(subjects, now_s + wait_s)
        try:
            await asyncio.sleep(wait_s)
        finally:
            for subject in subjects:
                self._next_at.pop(subject, None)

    def waiting(self, subject: Subject) -> CallsWaiting:
        """Return what waits for the limits of a subject."""
        at = self._next_at.get(subject)
        left_s = None if at is None else max(0.0, at - asyncio.get_running_loop().time())
        return CallsWaiting(self._waiting[subject], left_s)


class PlaceLeases:
    """The places of one front's calls. Used from one event loop.

    Attributes:
        held: the subject of each lease in use.
    """

    def __init__(
        self,
        server: ServerScripts,
        *,
        lease_s: float = LEASE_S,
        renew_s: float = _RENEW_S,
    ) -> None:
        """Count at a server.

        Args:
            server: not closed here.
            lease_s: how long a place stays taken without a renewal.
            renew_s: time between renewals.
        """
        self.held: dict[str, str] = {}
        self._server = server
        self._lease_s, self._renew_s = lease_s, renew_s
        self._returned: dict[str, str] = {}
        self._poke = asyncio.Event()
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None

    async def take(self, subject: str, most: int) -> str:
        """Take one of ``most`` places of a subject; return the lease, empty if all are taken.

        Raises:
            SharedStateLostError: the server does not answer; the place counts as not taken.
        """
        lease = secrets.token_hex(8)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="place-leases")
        await self._return_places()  # The place may be one that this front has just left.
        try:
            words = [lease, most, self._lease_s]
            taken = await self._run(_TAKE, [subject], words)
        except BaseException:
            self._give_back(lease, subject)  # The server may have heard of it.
            raise
        if not taken:
            return ""
        self.held[lease] = subject
        return lease

    def give_back(self, lease: str) -> None:
        """Free a place, soon."""
        subject = self.held.pop(lease, None)
        if subject is not None:
            self._give_back(lease, subject)

    async def taken(self, subjects: Sequence[str]) -> list[int]:
        """Return the places taken of each subject, over all fronts.

        Raises:
            SharedStateLostError: the server does not answer.
        """
        if not subjects:
            return []
        await self._return_places()
        return [int(n) for n in await self._run(_COUNT, subjects, [])]

    async def close(self) -> None:
        """Free all places."""
        if self._keeper is not None:
            self._closing = True  # The client may lose a cancel while a timeout of its own ends.
            self._poke.set()
            await self._keeper
            self._keeper = None
        self._returned |= self.held
        self.held.clear()
        with suppress(SharedStateLostError):
            await self._return_places()

    def _give_back(self, lease: str, subject: str) -> None:
        self._returned[lease] = subject
        self._poke.set()

    async def _keep(self) -> None:
        """Return places at once, and renew leases; a failure is tried again."""
        while not self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._renew_s):
                    await self._poke.wait()
            poked = self._poke.is_set()
            self._poke.clear()
            try:
                await self._return_places()
                if not poked:
                    await self._renew_all()
            except SharedStateLostError as error:
                _log.warning("calls in flight are not counted: %s", error)

    async def _return_places(self) -> None:
        returned = dict(self._returned)
        if returned:
            await self._run(_RETURN, list(returned.values()), list(returned))
            for lease in returned:
                self._returned.pop(lease, None)

    async def _renew_all(self) -> None:
        held = dict(self.held)
        if held:
            await self._run(_RENEW, list(held.values()), [self._lease_s, *held])
            # A call that ended meanwhile must not have its place renewed for good.
            self._returned |= {lease: held[lease] for lease in held.keys() - self.held.keys()}
            if self._returned:
                self._poke.set()

    async def _run(self, script: str, subjects: Sequence[str], words: Sequence[Any]) -> Any:
        return await self._server.run(script, [_PREFIX + each for each in subjects], words)
