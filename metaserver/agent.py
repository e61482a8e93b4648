"""A node's side of the meta server: registration, heartbeats, block events, hold orders.

Every DMP and compute process runs one NodeAgent; the composition root wires it. A node works with
or without a directory, so the agent handles every DirectoryUnavailableError: it logs the change and
retries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Final

from tierkv.kvcore.block_event import EventBatch, HoldOrder
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError, StaleEpochError
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.reporter import MetaReporter

_log = logging.getLogger(__name__)
_FIRST_RETRY_S: Final = 0.05
_LAST_RETRY_S: Final = 2.0


class NodeAgent:
    """Keeps one node registered with the meta server. Start, flush and stop in the same event loop.

    Attributes:
        registered: set while the meta server knows this incarnation, as far as the agent can tell.
        _unknown: set when a reply denied the registration; the heartbeat loop registers again.
        _work: set, from any thread, when the reporter has something to send.
        _progress: notified after each acknowledged batch.
    """

    def __init__(
        self,
        meta: MetaClient,
        info: NodeInfo,
        reporter: MetaReporter,
        report_source: Callable[[], NodeReport],
        *,
        clock: Clock | None = None,
        batch_delay_s: float = 0.02,
        on_hold: Callable[[HoldOrder], None] | None = None,
    ) -> None:
        """Make an agent; ``start`` begins.

        Args:
            meta: client of the meta server; not closed by the agent.
            info: the node's registration.
            reporter: the node's outbox, made with the same node id and incarnation.
            report_source: called in the event loop for each heartbeat; must be quick.
            clock: for ``contact_age_s``.
            batch_delay_s: how long events are gathered before a batch is sent.
            on_hold: called in the event loop for each hold order, including repeated orders; must
                be quick. None: the node follows no hold orders.
        """
        self._meta = meta
        self._info = info
        self._reporter = reporter
        self._report_source = report_source
        self._clock = clock or SystemClock()
        self._batch_delay_s = batch_delay_s
        self._on_hold = on_hold
        self.registered = asyncio.Event()
        self.pool_version = 0
        self.namespaces_version = 0
        self._unknown = asyncio.Event()
        self._work = asyncio.Event()
        self._progress = asyncio.Condition()
        self._flushing = 0
        self._contact_at: float | None = None
        self._reachable = True
        self._refusal = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def contact_age_s(self) -> float | None:
        """Seconds since the last answer of the meta server; None before the first answer."""
        return None if self._contact_at is None else self._clock.now() - self._contact_at

    async def start(self) -> None:
        """Begin in the background; returns at once, even if the meta server is away."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # The loop may be closing while a worker thread still reports; the wake-up is then
            # dropped.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._work.set)

        self._reporter.set_wake(wake)
        loops = [self._stay_registered, self._send_events]
        if self._on_hold is not None:
            loops.append(self._follow_holds)
        self._tasks = [asyncio.create_task(self._forever(run)) for run in loops]

    async def flush(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all events reported so far are in the directory.

        Raises:
            DirectoryUnavailableError: the events were not taken within ``timeout_s``.
        """
        ticket = self._reporter.ticket()
        self._flushing += 1
        self._work.set()
        try:
            async with asyncio.timeout(timeout_s), self._progress:
                await self._progress.wait_for(lambda: self._reporter.is_delivered(ticket))
        except TimeoutError:
            raise DirectoryUnavailableError(
                f"block events of {self._info.node_id} were not taken within {timeout_s} s"
            ) from None
        finally:
            self._flushing -= 1

    async def stop(self) -> None:
        """Stop reporting and leave the cluster, if the meta server can be reached."""
        self._reporter.set_wake(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.registered.is_set():
            self.registered.clear()
            with suppress(DirectoryUnavailableError):
                await self._meta.deregister(self._info.node_id, self._info.incarnation)

    async def _forever(self, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await run()
            except Exception:  # noqa: BLE001 - outermost loop: a node outlives a bug in its agent
                _log.exception("the agent of node %s failed; it goes on", self._info.node_id)
                await asyncio.sleep(_LAST_RETRY_S)

    async def _stay_registered(self) -> None:
        interval_s = await self._register()
        while not self._unknown.is_set():
            await self._heartbeat()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._unknown.wait()

    async def _register(self) -> float:
        """Register, however long it takes; returns the heartbeat interval."""
        for retry_s in _backoff():
            self._unknown.clear()
            try:
                registration = await self._meta.register(self._info)
            except DirectoryUnavailableError as error:
                self._note_failure(error)
                await asyncio.sleep(retry_s)
                continue
            except StaleEpochError as error:
                self._note_refusal(error)
                await asyncio.sleep(retry_s)
                continue
            self._note_contact()
            self._refusal = ""
            if registration.send_inventory:
                self._reporter.request_inventory()
            self.registered.set()
            return registration.heartbeat_interval_s
        raise AssertionError("the backoff never ends")

    async def _heartbeat(self) -> None:
        info = self._info
        try:
            reply = await self._meta.heartbeat(
                info.node_id, info.incarnation, self._report_source()
            )
        except DirectoryUnavailableError as error:
            self._note_failure(error)
            return
        self._note_contact()
        self.pool_version = reply.pool_version
        self.namespaces_version = reply.namespaces_version
        if not reply.known:
            self._lose_registration()
        elif reply.send_inventory:
            self._reporter.request_inventory()

    async def _send_events(self) -> None:
        await self.registered.wait()
        self._work.clear()
        batch = await self._next_batch()
        if batch is not None:
            await self._send(batch)
            return
        await self._work.wait()
        if not self._flushing:
            await asyncio.sleep(self._batch_delay_s)

    async def _follow_holds(self) -> None:
        """Pass on orders; a lost stream is reopened, with a back-off while it yields no orders."""
        for retry_s in _backoff():
            await self.registered.wait()
            if await self._hear_orders():
                return
            await asyncio.sleep(retry_s)

    async def _hear_orders(self) -> bool:
        """Read one stream of orders to its end; return True if any order came."""
        assert self._on_hold is not None
        heard = False
        stream = self._meta.holds(self._info.node_id, self._info.incarnation)
        async with aclosing(stream) as orders:
            with suppress(DirectoryUnavailableError):
                async for order in orders:
                    heard = True
                    self._on_hold(order)
        return heard

    async def _next_batch(self) -> EventBatch | None:
        if self._reporter.inventory_due:
            # A snapshot of a full node takes a while and must not block the loop.
            return await asyncio.to_thread(self._reporter.next_batch)
        return self._reporter.next_batch()

    async def _send(self, batch: EventBatch) -> None:
        """Send one batch until it is answered."""
        for retry_s in _backoff():
            try:
                reply = await self._meta.report_events(batch)
            except DirectoryUnavailableError as error:
                self._note_failure(error)
                await asyncio.sleep(retry_s)
                continue
            break
        self._note_contact()
        self._reporter.acknowledge(batch, reply)
        if not reply.accepted:
            self._lose_registration()
        async with self._progress:
            self._progress.notify_all()

    def _lose_registration(self) -> None:
        self.registered.clear()
        self._unknown.set()

    def _note_contact(self) -> None:
        self._contact_at = self._clock.now()
        if not self._reachable:
            self._reachable = True
            _log.info("node %s reaches the meta server again", self._info.node_id)

    def _note_refusal(self, error: StaleEpochError) -> None:
        """Log, once per rival, that another process has this node's name."""
        if self._refusal != error.message:
            self._refusal = error.message
            _log.error("%s; this one is left out and keeps asking. %s", error.message, error.hint)

    def _note_failure(self, error: DirectoryUnavailableError) -> None:
        """Log the first failure in a row; the node goes on without a directory."""
        if self._reachable:
            self._reachable = False
            _log.warning(
                "node %s has no directory, it goes on and keeps trying: %s",
                self._info.node_id,
                error.message,
            )


def _backoff() -> Iterator[float]:
    delay_s = _FIRST_RETRY_S
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, _LAST_RETRY_S)
