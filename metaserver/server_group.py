"""The meta servers of a cluster as one client sees them: who is in use, and asking some or all.

Called by metaserver/several_meta.py. An answer that is overdue costs a caller the time-out
learned from earlier answers. Then the server is out of use until a look in the background succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError
from tierkv.metaserver.client import MetaClient

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_PAUSE_S: Final = 0.01
_MOST_PAUSES: Final = 3
"""A time-out that fires later than this was late because of this process, so the wait begins again,
at most so often."""

FIRST_TIMEOUT_S: Final = 0.2
"""Time-out until enough answers were seen."""

LEAST_TIMEOUT_S: Final = 0.1
MOST_TIMEOUT_S: Final = 0.2
"""Two owners in a row fit into the patience of those who ask (``locate_timeout_s``: 0.5 s)."""

_WEIGHT: Final = 0.1
_DEVIATIONS: Final = 6.0
_ENOUGH: Final = 10
_FIRST_LOOK_S: Final = 0.1
_LAST_LOOK_S: Final = 1.0


class ServerHealth:
    """One server as one client sees it.

    Attributes:
        usable: answered last, or was never asked.
        owes_inventory: missed events of the nodes that report through this client.
        look_s: pause before the next look at a server out of use.
    """

    def __init__(self) -> None:
        self.usable = True
        self.owes_inventory = False
        self.look_s = _FIRST_LOOK_S
        self._answers = 0
        self._mean_s = 0.0
        self._deviation_s = 0.0

    @property
    def timeout_s(self) -> float:
        """Return after how long a further answer counts as overdue."""
        if self._answers < _ENOUGH:
            return FIRST_TIMEOUT_S
        late_s = self._mean_s + _DEVIATIONS * self._deviation_s
        return min(max(late_s, LEAST_TIMEOUT_S), MOST_TIMEOUT_S)

    def answered(self, seconds: float) -> None:
        """Learn from an answer."""
        weight = max(_WEIGHT, 1 / (self._answers + 1))
        self._answers += 1
        self._deviation_s += weight * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += weight * (seconds - self._mean_s)

    def lost(self) -> None:
        """Take the server out of use."""
        self.usable = False

    def looked(self, *, well: bool) -> None:
        """Note a look at a server out of use."""
        self.usable = well
        self.look_s = _FIRST_LOOK_S if well else min(2 * self.look_s, _LAST_LOOK_S)


class ServerGroup:
    """The servers by number. Belongs to one event loop.

    Attributes:
        servers: their clients.
        health: of each server.
        _looks: looks at servers out of use.
    """

    def __init__(self, servers: Sequence[MetaClient], addresses: Sequence[str]) -> None:
        self.servers = tuple(servers)
        self.health = tuple(ServerHealth() for _ in servers)
        self._addresses = tuple(addresses)
        self._looks: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    async def close(self) -> None:
        """Stop looking and close all clients."""
        self._closed = True
        for task in self._looks.values():
            task.cancel()
        await asyncio.gather(*self._looks.values(), return_exceptions=True)
        for server in self.servers:
            await server.close()

    async def ask_all(
        self,
        call: Callable[[MetaClient], Awaitable[_T]],
        numbers: Iterable[int] | None = None,
        *,
        within_s: float | None = None,
    ) -> dict[int, _T]:
        """Ask servers at once; return all answers, at least one.

        Args:
            call: asks one server.
            numbers: the servers to ask; None: those in use, or all if none is.
            within_s: a server that takes longer is out of use; None: as its client says.

        Raises:
            DirectoryUnavailableError: no server answered.
            TierKVError: an answer that is an error of the caller.
        """
        asked = list(self._in_use() if numbers is None else numbers)

        async def bounded(number: int) -> _T:
            async with asyncio.timeout(within_s):
                return await call(self.servers[number])

        replies = await asyncio.gather(*map(bounded, asked), return_exceptions=True)
        found: dict[int, _T] = {}
        for number, reply in zip(asked, replies, strict=True):
            if isinstance(reply, DirectoryUnavailableError | TimeoutError):
                self.lose(number, reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                found[number] = reply
        if not found:
            raise self.unavailable("a call")
        return found

    async def ask_any(
        self, call: Callable[[MetaClient], Awaitable[_T]], *, within_s: float | None = None
    ) -> _T:
        """Ask server after server, servers in use first, until an answer comes."""
        self.refuse_if_closed()
        for number in sorted(self.numbers, key=lambda n: not self.health[n].usable):
            try:
                async with asyncio.timeout(within_s):
                    return await call(self.servers[number])
            except (DirectoryUnavailableError, TimeoutError) as error:
                self.lose(number, error)
        raise self.unavailable("a call")

    @property
    def numbers(self) -> range:
        return range(len(self.servers))

    def _in_use(self) -> Sequence[int]:
        return [n for n in self.numbers if self.health[n].usable] or self.numbers

    def lose(self, number: int, error: Exception) -> None:
        """Take a server out of use and look at it in the background until it answers."""
        health = self.health[number]
        if health.usable and not self._closed:
            why = str(error) or "it did not answer in time"
            _log.warning("the meta server at %s is out of use: %s", self._addresses[number], why)
            health.lost()
            self._looks[number] = asyncio.create_task(self._look(number))

    async def _look(self, number: int) -> None:
        health = self.health[number]
        while not health.usable:
            await asyncio.sleep(health.look_s)
            well = False
            with suppress(DirectoryUnavailableError):
                await self.servers[number].locate((), max_replicas=0)
                well = True
            health.looked(well=well)
        _log.info("the meta server at %s answers again", self._addresses[number])

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise DirectoryUnavailableError("the client of the meta servers is closed")

    def unavailable(self, what: str) -> DirectoryUnavailableError:
        return DirectoryUnavailableError(
            f"no meta server answered {what}: {', '.join(self._addresses)}"
        )


async def within(question: Awaitable[_T], timeout_s: float) -> _T:
    """Await an answer; a pause of this process does not count as the server's time.

    Raises:
        TimeoutError: the answer took longer.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(question)
    try:
        for _ in range(_MOST_PAUSES):
            due = loop.time() + timeout_s
            done, _waiting = await asyncio.wait({task}, timeout=timeout_s)
            if done:
                return task.result()
            if loop.time() < due + _PAUSE_S:
                break
        raise TimeoutError
    finally:
        task.cancel()


def meta_addresses(text: str) -> tuple[str, ...]:
    """Read ``host:port``, or several of them separated by commas.

    Raises:
        ConfigError: no address, an address without a port, one given twice, or too many.
    """
    found = tuple(each.strip() for each in text.split(",") if each.strip())
    for address in found:
        if not address.rpartition(":")[2].isdecimal():
            raise ConfigError(
                f"cluster.meta_address: {address!r} is not host:port",
                hint="Give one address, or several separated by commas: a:7400,b:7400,c:7400.",
            )
    if not found or len(set(found)) < len(found) or len(found) > limits.MAX_META_SERVERS:
        raise ConfigError(
            f"cluster.meta_address = {text!r} does not name 1 to {limits.MAX_META_SERVERS} "
            "different servers",
            hint="Give each meta server's address once, and the same list on all machines.",
        )
    return found
