"""Keeps an engine connected to the pool: at start, after every loss, as nodes join and leave.

Runs one thread, started by integrations/pool_door.py. The thread never raises: a problem becomes a
complaint, and the thread tries again. The ``Pool`` object stays the same until the door is closed,
and callers' pins and open puts stay valid while nodes join and leave.

Calls to the pool wait in a bounded ``WorkQueue``. Each call has a future, which always ends with a
value. A failed or impossible call ends with the call's default, and a waiting engine never receives
an exception. The threads are daemons and never keep an engine's process alive.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from tierkv.dmp.client.node_link import NodeLink
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.ring import Ring, reach_nodes
from tierkv.dmp.client.values import PoolStats, to_transport
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.select import PathOptions
from tierkv.dmp.zone_traffic import ZoneTraffic
from tierkv.integrations.engine_report import Complaints
from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import AuthenticationError, ConfigError, TierKVError
from tierkv.kvcore.ids import NodeId, ZoneId
from tierkv.kvwire.credentials import client_context

T = TypeVar("T")


@dataclass(slots=True)
class Call(Generic[T]):
    """One call to the pool.

    Attributes:
        work: the function to run in a thread.
        default: the answer if the call can't be made or fails.
        name: kind of call, for counting.
        answer: ends with the result of ``work``, or with the default.
    """

    work: Callable[[], T]
    default: T
    name: str
    answer: Future[T] = field(default_factory=Future)

    def refuse(self) -> None:
        """End the call with its default."""
        self._end(self.default)

    def run(self) -> Exception | None:
        """Run the call, unless it was cancelled; return the exception if it failed."""
        if not self.answer.set_running_or_notify_cancel():
            return None
        try:
            value, failure = self.work(), None
        except Exception as error:  # noqa: BLE001 - an engine never sees an error of its cache
            value, failure = self.default, error
        self._end(value)
        return failure

    def _end(self, value: T) -> None:
        # The owner cancelled the call in the meantime and expects no result.
        with contextlib.suppress(InvalidStateError):
            self.answer.set_result(value)


class WorkQueue:
    """Queued calls and the threads that make them; thread-safe.

    Attributes:
        _urgent: queued calls that a step of the engine waits for; taken first.
        _calls: the other queued calls, oldest first.
        _running: number of running calls.
    """

    def __init__(
        self, threads: int, *, limit: int, on_failure: Callable[[str, Exception], None]
    ) -> None:
        self._limit = limit
        self._on_failure = on_failure
        self._urgent: deque[Call[Any]] = deque()
        self._calls: deque[Call[Any]] = deque()
        self._running = 0
        self._closed = False
        lock = threading.Lock()
        self._change = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._work, name=f"tierkv-pool-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, call: Call[Any], *, urgent: bool = False) -> bool:
        """Queue a call. Return False, without any effect, if the queue is full or closed."""
        with self._change:
            if self._closed or len(self._urgent) + len(self._calls) >= self._limit:
                return False
            (self._urgent if urgent else self._calls).append(call)
            self._change.notify()
        return True

    def drop(self) -> None:
        """End all queued calls with their defaults."""
        with self._change:
            dropped = [*self._urgent, *self._calls]
            self._urgent.clear()
            self._calls.clear()
        for call in dropped:
            call.refuse()

    def close(self, *, timeout_s: float) -> bool:
        """Refuse new calls, end queued ones, wait for running ones; False if the wait timed out."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self.drop()
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, timeout_s)

    def _work(self) -> None:
        while (call := self._take()) is not None:
            failure = call.run()
            if failure is not None:
                self._on_failure(call.name, failure)
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _take(self) -> Call[Any] | None:
        with self._change:
            self._change.wait_for(lambda: self._urgent or self._calls or self._closed)
            if self._closed:
                return None
            self._running += 1
            return (self._urgent or self._calls).popleft()


FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0
LOOK_INTERVAL_S: Final = 1.0
"""Time between checks of joined and left nodes, refused puts and failures."""

QUIET_LOOKS: Final = 10
"""Looks without a refused put after which the complaint ``pool_full`` is settled."""

_CONNECT_TIMEOUT_S: Final = 1.0

Addresses = Callable[[], Sequence[str]]
"""Returns the addresses of the pool's nodes; empty while the addresses are unknown."""


class PoolKeeper:
    """Keeps a Pool open.

    Attributes:
        pool: the pool; None until a node has answered for the first time.
        stats: statistics of the pool at the last look.
        wake: set when addresses may have changed; the keeper then looks at once.
    """

    def __init__(
        self,
        settings: PoolAccess,
        addresses: Addresses,
        complaints: Complaints,
        *,
        on_look: Callable[[Pool], None],
    ) -> None:
        """Create a keeper; ``start`` begins.

        Args:
            settings: access to the nodes.
            addresses: returns the nodes' addresses; called at every look.
            complaints: receives problems.
            on_look: called in the keeper's thread after every look at an open pool.
        """
        self.pool: Pool | None = None
        self.stats: PoolStats | None = None
        self._settings = settings
        self._addresses = addresses
        self._complaints = complaints
        self._on_look = on_look
        self._ring: Ring | None = None
        self._quiet_looks = 0
        self.traffic = ZoneTraffic(
            ZoneId(settings.zone), clock=SystemClock(), bytes_per_s=settings.cross_zone_rate
        )
        transport = to_transport(settings.transport)
        self._options = PathOptions(transport, (), settings.tls, self.traffic)
        self.wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tierkv-keeper", daemon=True)

    @property
    def up(self) -> bool:
        """True if a node of the pool answered the last call."""
        ring = self._ring
        return ring is not None and any(link.up for link in ring.links)

    @property
    def why_down(self) -> str:
        """The reason why no node answers."""
        ring = self._ring
        if ring is None:
            return "no pool node has answered yet"
        lost = [(link.peer.address, link.reason) for link in ring.links if not link.up]
        return "; ".join(why if at in why else f"{at}: {why}" for at, why in lost)

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    def close(self, *, timeout_s: float) -> None:
        """End and close the pool; wait up to ``timeout_s`` for a running look."""
        self._closing = True
        self.wake.set()
        self._thread.join(timeout_s)
        if self.pool is not None and not self._thread.is_alive():
            self.pool.close()

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closing:
            try:
                wait_s = self._step(retry_s)
            except Exception as error:  # noqa: BLE001 - outermost loop: it outlives its own bugs
                self._complaints.complain("keeper_failed", f"{type(error).__name__}: {error}")
                wait_s = LAST_RETRY_S
            retry_s = min(2 * retry_s, LAST_RETRY_S)
            self.wake.wait(wait_s)
            self.wake.clear()

    def _step(self, retry_s: float) -> float:
        """Connect or look; return the time in seconds until the next step."""
        if self.pool is None:
            self._connect()
        if self.pool is None:
            return retry_s
        self._look(self.pool)
        return LOOK_INTERVAL_S

    def _connect(self) -> None:
        addresses = self._addresses()
        if not addresses:
            return
        try:
            if self._options.tls is not None:
                client_context(self._options.tls)
            peers = [self._peer(address) for address in addresses]
            ring = reach_nodes(peers, self._options, host=self._settings.host_id)
        except AuthenticationError as error:
            self._complaints.hold("wrong_token", error.message, hint="Set token or token_file.")
        except ConfigError as error:
            self._complaints.hold("bad_setting", error.message, hint=error.hint)
        except TierKVError as error:
            self._complaints.hold("pool_down", error.message, hint=error.hint)
        else:
            self._ring, self.pool = ring, Pool(ring, SystemClock())
            for code in ("wrong_token", "bad_setting", "pool_down"):
                self._complaints.settle(code)

    def _peer(self, address: str) -> Peer:
        return Peer(
            NodeId(""),
            address,
            self._settings.cluster_token,
            _CONNECT_TIMEOUT_S,
            self._settings.timeout_ms / 1_000,
            tls=self._options.tls,
        )

    def _look(self, pool: Pool) -> None:
        self._follow()
        before, self.stats = self.stats, pool.stats()
        self._judge(before, self.stats)
        self._on_look(pool)

    def _follow(self) -> None:
        """Add links to new nodes and close links to nodes that left."""
        addresses = list(dict.fromkeys(self._addresses()))
        ring = self._ring
        if ring is None or not addresses:  # Addresses are unknown: keep the current links.
            return
        known = {link.peer.address: link for link in ring.links}
        if addresses == list(known):
            return
        ring.links = [
            known.get(address) or NodeLink(self._peer(address), self._options)
            for address in addresses
        ]
        for address, link in known.items():
            if address not in addresses:
                link.close()

    def _judge(self, before: PoolStats | None, now: PoolStats) -> None:
        """Complain of failures that the pool absorbed since the last look."""
        if self.up:
            self._complaints.settle("pool_down")
        else:
            self._complaints.hold(
                "pool_down",
                f"no pool node answers: {self.why_down}",
                hint="The engine computes everything until one does.",
            )
        refused = now.refused - (before.refused if before else 0)
        if refused > 0 and self.up:
            self._complaints.complain(
                "pool_full",
                f"the pool refused {refused} of the last values: it is full of blocks that can't "
                "be evicted, or ranks these values below the stored ones",
                hint="Give its nodes more memory (dmp.capacity) or a disk (dmp.disk_path).",
            )
        self._quiet_looks = 0 if refused else self._quiet_looks + 1
        if self._quiet_looks >= QUIET_LOOKS:
            self._complaints.settle("pool_full")
        for code, count in _new_errors(before, now).items():
            self._complaints.complain(code, f"{count} calls to pool nodes ended as misses: {code}")


def _new_errors(before: PoolStats | None, now: PoolStats) -> dict[str, int]:
    """Return the new failures by code, without ``transport_error``: ``pool_down`` covers it."""
    then = _errors(before) if before is not None else {}
    new = {code: count - then.get(code, 0) for code, count in _errors(now).items()}
    return {code: n for code, n in new.items() if n > 0 and code != "transport_error"}


def _errors(stats: PoolStats) -> dict[str, int]:
    found: dict[str, int] = {}
    for member in stats.members:
        for code, count in member.errors:
            found[code] = found.get(code, 0) + count
    return found
