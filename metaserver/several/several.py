"""A directory on several meta servers, as one MetaClient.

Made by ``connect_meta`` (metaserver/connect.py) when ``cluster.meta_address`` names several
servers. Every node registers with all servers and reports each block to its two owners
(metaserver/several/owners.py). Servers know nothing of each other and replicate nothing: what a
server lost, nodes tell it again. A locate asks the owners at once and joins the answers. A server
that does not answer within its learned time-out costs this time once: its blocks are asked of their
second owners, until a look in the background finds the server again.

A block whose owners are both lost is unknown, which ends a chain's prefix; only a call that no
server answers is DirectoryUnavailableError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from tierkv.kvcore.block_event import EventBatch, HoldOrder, LeaseId
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError, LocalProtocolError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.metaserver.client import (
    MAX_LISTED_REPLICAS,
    BlockListing,
    DirectoryNode,
    HeartbeatReply,
    LocateReply,
    MetaClient,
    Namespace,
    NamespaceGrant,
    Registration,
    ReportReply,
)
from tierkv.metaserver.directory.locate_reply import chain_of, checked_question
from tierkv.metaserver.several.leases import JoinedLeases, ServerLease
from tierkv.metaserver.several.owners import Owners, Part, asked_of, joined
from tierkv.metaserver.several.server_health import ServerHealth
from tierkv.metaserver.several.views import joined_counts, joined_listing, joined_nodes

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_REOPEN_S: Final = 0.5
"""Pause before a lost stream of hold orders is opened again."""

_READ_S: Final = 0.5
"""How long a server may take to answer a small question."""

_HEARTBEAT_WAIT_S: Final = 0.3
"""How long a heartbeat waits for further servers once one has answered."""

Node = tuple[NodeId, Incarnation]
_Beat = tuple[int, HeartbeatReply] | None
"""Number of a server and its reply; None without an answer."""


class SeveralMeta:
    """Several meta servers; implements MetaClient. Belongs to one event loop, like its clients.

    Attributes:
        _health: of each server.
        _infos: nodes that registered through this client.
        _slow: a server's heartbeat that is still under way.
        _looks: looks at servers out of use.
    """

    def __init__(
        self,
        servers: Sequence[MetaClient],
        addresses: Sequence[str],
        *,
        clock: Clock | None = None,
    ) -> None:
        """Make a client; it closes ``servers``, whose ``addresses`` must be equal on all nodes."""
        self._servers = tuple(servers)
        self._addresses = tuple(addresses)
        self._clock = clock or SystemClock()
        self._owners = Owners(addresses)
        self._health = tuple(ServerHealth() for _ in servers)
        self._leases = JoinedLeases()
        self._infos: dict[Node, NodeInfo] = {}
        self._slow: dict[int, asyncio.Task[_Beat]] = {}
        self._looks: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    # Nodes

    async def register(self, info: NodeInfo) -> Registration:
        self._refuse_if_closed()
        node = (info.node_id, info.incarnation)
        replies = await self._all(lambda server: server.register(info), self._numbers)
        self._infos = {n: i for n, i in self._infos.items() if n[0] != info.node_id}
        self._infos[node] = info
        return Registration(
            max(reply.heartbeat_interval_s for reply in replies.values()),
            any(reply.send_inventory for reply in replies.values()),
        )

    async def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport
    ) -> HeartbeatReply:
        self._refuse_if_closed()
        tasks = {
            number: asyncio.create_task(self._beat(number, node_id, incarnation, report))
            for number in self._numbers
            if number not in self._slow
        }
        self._slow |= tasks
        for number, task in tasks.items():
            task.add_done_callback(partial(self._beaten, number))
        waiting = set(self._slow.values())
        done: set[asyncio.Task[_Beat]] = set()
        while waiting and not any(task.result() for task in done):
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= ended
        if waiting:
            ended, _ = await asyncio.wait(waiting, timeout=_HEARTBEAT_WAIT_S)
            done |= ended
        replies = {reply[0]: reply[1] for task in done if (reply := task.result()) is not None}
        if not replies:
            raise self._unavailable("a heartbeat")
        strangers = [number for number, reply in replies.items() if not reply.known]
        wanted = any(reply.send_inventory for reply in replies.values())
        info = self._infos.get((node_id, incarnation))
        if len(strangers) == len(replies) or info is None:
            return HeartbeatReply(len(strangers) < len(replies), wanted)
        for number in strangers:  # They started again, or could not be reached when others could.
            with suppress(DirectoryUnavailableError):
                wanted |= (await self._servers[number].register(info)).send_inventory
        return HeartbeatReply(True, wanted)

    def _beaten(self, number: int, _: asyncio.Task[_Beat]) -> None:
        self._slow.pop(number, None)

    async def _beat(
        self, number: int, node_id: NodeId, incarnation: Incarnation, report: NodeReport
    ) -> _Beat:
        """Tell one server; None without an answer."""
        health = self._health[number]
        try:
            reply = await self._servers[number].heartbeat(node_id, incarnation, report)
        except DirectoryUnavailableError as error:
            self._lose(number, error)
            return None
        owed, health.owes_inventory = health.owes_inventory, False
        return number, replace(reply, send_inventory=reply.send_inventory or owed)

    async def deregister(self, node_id: NodeId, incarnation: Incarnation) -> None:
        self._refuse_if_closed()
        self._infos.pop((node_id, incarnation), None)
        await self._all(lambda server: server.deregister(node_id, incarnation), self._numbers)

    async def report_events(self, batch: EventBatch) -> ReportReply:
        self._refuse_if_closed()
        table = self._owners.of([event.key for event in batch.events]).tolist()
        shares: list[list[Any]] = [[] for _ in self._servers]
        for event, owners in zip(batch.events, table, strict=True):
            for number in owners:
                shares[number].append(event)
        replies = await self._all(
            lambda server: server.report_events(
                replace(batch, events=tuple(shares[self._servers.index(server)]))
            )
        )
        for number in self._numbers:
            if number not in replies or not replies[number].accepted:
                self._health[number].owes_inventory = True
        return ReportReply(
            any(reply.accepted for reply in replies.values()),
            any(reply.send_inventory for reply in replies.values()),
        )

    async def holds(
        self, node_id: NodeId, incarnation: Incarnation
    ) -> AsyncGenerator[HoldOrder, None]:
        self._refuse_if_closed()
        orders: asyncio.Queue[HoldOrder | None] = asyncio.Queue()
        alive = len(self._servers)
        lost: list[DirectoryUnavailableError] = []

        async def follow(server: MetaClient) -> None:
            nonlocal alive
            while True:
                try:
                    async with aclosing(server.holds(node_id, incarnation)) as stream:
                        async for order in stream:
                            await orders.put(order)
                except DirectoryUnavailableError as error:
                    lost.append(error)
                alive -= 1
                if not alive:
                    await orders.put(None)
                await asyncio.sleep(_REOPEN_S)
                alive += 1

        tasks = [asyncio.create_task(follow(server)) for server in self._servers]
        try:
            while (order := await orders.get()) is not None:
                yield order
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if lost:
            raise lost[-1]

    # Chains

    async def locate(
        self,
        keys: Sequence[BlockKey],
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        reserve_s: float = 0.0,
    ) -> LocateReply:
        if max_replicas < 0:
            raise LocalProtocolError(f"max_replicas can't be negative, got {max_replicas}")
        chain_of(keys)  # Raises what the contract says of a chain that is too long.

        async def ask(server: MetaClient, chains: list[list[BlockKey]]) -> list[LocateReply]:
            (chain,) = chains
            return [
                await server.locate(
                    chain, reader=reader, max_replicas=max_replicas, reserve_s=reserve_s
                )
            ]

        (reply,) = await self._locate([keys], ask, reserve_s)
        return reply

    async def locate_many(
        self, chains: Sequence[Sequence[BlockKey]], *, reserve_s: float = 0.0
    ) -> list[LocateReply]:
        checked_question(map(chain_of, chains))

        async def ask(server: MetaClient, chains: list[list[BlockKey]]) -> list[LocateReply]:
            return await server.locate_many(chains, reserve_s=reserve_s)

        return await self._locate(chains, ask, reserve_s)

    async def _locate(
        self,
        chains: Sequence[Sequence[BlockKey]],
        ask: Callable[[MetaClient, list[list[BlockKey]]], Awaitable[list[LocateReply]]],
        reserve_s: float,
    ) -> list[LocateReply]:
        """Ask the owners of all chains' blocks, and the second owners of those that are silent."""
        self._refuse_if_closed()
        keys = [key for chain in chains for key in chain]
        owner = [number for number, chain in enumerate(chains) for _ in chain]
        at = [position for chain in chains for position in range(len(chain))]
        parts: list[list[Part]] = [[] for _ in chains]
        leases: list[list[ServerLease]] = [[] for _ in chains]
        table = self._owners.of(keys)
        open_rows = list(range(len(keys)))
        heard = not keys
        for _ in range(self._owners.each):
            usable = [health.usable for health in self._health]
            shares = asked_of(table[open_rows], usable)
            asked = {number: [open_rows[row] for row in rows] for number, rows in shares.items()}
            answers = await asyncio.gather(
                *(self._share(number, rows, keys, owner, ask) for number, rows in asked.items())
            )
            open_rows = []
            for (number, rows), found in zip(asked.items(), answers, strict=True):
                if found is None:
                    open_rows += rows
                    continue
                heard = True
                for which, reply in found.items():
                    positions = [at[row] for row in rows if owner[row] == which]
                    parts[which].append(Part(positions, reply))
                    if reply.lease:
                        leases[which].append((number, reply.lease))
            if not open_rows:
                break
        if not heard:
            raise self._unavailable("a locate")
        for row in sorted(open_rows):  # Nobody knows these: each ends its chain.
            parts[owner[row]].append(Part((at[row],), LocateReply()))
        replies = [joined(some, len(chain)) for chain, some in zip(chains, parts, strict=True)]
        now = self._clock.now()
        for number, (reply, given) in enumerate(zip(replies, leases, strict=True)):
            if reply.prefix_blocks or reply.coverage:
                lease = self._leases.add(given, now + reserve_s, now)
                replies[number] = replace(reply, lease=lease)
            elif given:  # Blocks behind the first that is missing are of no use.
                await self._each_lease(
                    given, lambda server, part: server.end_lease(part, used=False)
                )
        return replies

    async def _share(
        self,
        number: int,
        rows: list[int],
        keys: list[BlockKey],
        owner: list[int],
        ask: Callable[[MetaClient, list[list[BlockKey]]], Awaitable[list[LocateReply]]],
    ) -> dict[int, LocateReply] | None:
        """Ask one server about its rows; return replies by chain, None without an answer."""
        health = self._health[number]
        chains: dict[int, list[BlockKey]] = {}
        for row in rows:
            chains.setdefault(owner[row], []).append(keys[row])
        started = self._clock.now()
        try:
            async with asyncio.timeout(health.timeout_s):
                replies = await ask(self._servers[number], list(chains.values()))
        except (DirectoryUnavailableError, TimeoutError) as error:
            self._lose(number, error)
            return None
        health.answered(self._clock.now() - started)
        return dict(zip(chains, replies, strict=True))

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool:
        self._refuse_if_closed()
        self._leases.extend(lease, self._clock.now() + ttl_s)
        return await self._each_lease(
            self._leases.parts(lease), lambda server, part: server.extend_lease(part, ttl_s=ttl_s)
        )

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        self._refuse_if_closed()
        return await self._each_lease(
            self._leases.end(lease), lambda server, part: server.end_lease(part, used=used)
        )

    async def _each_lease(
        self,
        parts: Sequence[ServerLease],
        call: Callable[[MetaClient, LeaseId], Awaitable[bool]],
    ) -> bool:
        """Return whether any server still knew its lease."""
        if not parts:
            return False
        known = dict(parts)
        replies = await self._all(
            lambda server: call(server, known[self._servers.index(server)]),
            known,
            within_s=_READ_S,
        )
        return any(replies.values())

    # Namespaces and views

    async def resolve_namespace(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes
    ) -> NamespaceGrant:
        return await self._any(
            lambda server: server.resolve_namespace(
                tenant, model_revision=model_revision, layout_fingerprint=layout_fingerprint
            ),
            within_s=_READ_S,
        )

    async def list_namespaces(self) -> tuple[Namespace, ...]:
        return await self._any(lambda server: server.list_namespaces(), within_s=_READ_S)

    async def put_namespace(self, namespace: Namespace) -> Namespace:
        return await self._any(lambda server: server.put_namespace(namespace))

    async def list_nodes(self) -> tuple[DirectoryNode, ...]:
        self._refuse_if_closed()
        listings = await self._all(lambda server: server.list_nodes(), within_s=_READ_S)
        return joined_nodes(listings.values())

    async def list_blocks(self, limit: int) -> BlockListing:
        self._refuse_if_closed()
        listings = (await self._all(lambda server: server.list_blocks(limit))).values()
        return joined_listing(tuple(listings), limit, copies_told=self._copies_told(len(listings)))

    async def directory_counts(self) -> tuple[tuple[str, int], ...]:
        self._refuse_if_closed()
        counts = (await self._all(lambda server: server.directory_counts())).values()
        return joined_counts(tuple(counts), copies_told=self._copies_told(len(counts)))

    def _copies_told(self, answered: int) -> float:
        """Return how many of the servers that answered know a block, on average."""
        return max(1.0, self._owners.each * answered / len(self._servers))

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._looks.values(), *self._slow.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.close()

    # Servers

    async def _all(
        self,
        call: Callable[[MetaClient], Awaitable[_T]],
        numbers: Iterable[int] | None = None,
        *,
        within_s: float | None = None,
    ) -> dict[int, _T]:
        """Ask servers at once; return the answers of those that answered, at least one.

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
                return await call(self._servers[number])

        replies = await asyncio.gather(*map(bounded, asked), return_exceptions=True)
        found: dict[int, _T] = {}
        for number, reply in zip(asked, replies, strict=True):
            if isinstance(reply, DirectoryUnavailableError | TimeoutError):
                self._lose(number, reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                found[number] = reply
        if not found:
            raise self._unavailable("a call")
        return found

    async def _any(
        self, call: Callable[[MetaClient], Awaitable[_T]], *, within_s: float | None = None
    ) -> _T:
        """Ask one server after another, those in use first, until one answers."""
        self._refuse_if_closed()
        for number in sorted(self._numbers, key=lambda n: not self._health[n].usable):
            try:
                async with asyncio.timeout(within_s):
                    return await call(self._servers[number])
            except (DirectoryUnavailableError, TimeoutError) as error:
                self._lose(number, error)
        raise self._unavailable("a call")

    @property
    def _numbers(self) -> range:
        return range(len(self._servers))

    def _in_use(self) -> Sequence[int]:
        return [n for n in self._numbers if self._health[n].usable] or self._numbers

    def _lose(self, number: int, error: Exception) -> None:
        """Take a server out of use and look at it in the background until it answers."""
        health = self._health[number]
        if health.usable and not self._closed:
            _log.warning("the meta server at %s is out of use: %s", self._addresses[number], error)
            health.lost()
            self._looks[number] = asyncio.create_task(self._look(number))

    async def _look(self, number: int) -> None:
        health = self._health[number]
        while not health.usable:
            await asyncio.sleep(health.look_s)
            well = False
            with suppress(DirectoryUnavailableError):
                await self._servers[number].locate((), max_replicas=0)
                well = True
            health.looked(well=well)
        _log.info("the meta server at %s answers again", self._addresses[number])

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise DirectoryUnavailableError("the client of the meta servers is closed")

    def _unavailable(self, what: str) -> DirectoryUnavailableError:
        return DirectoryUnavailableError(
            f"no meta server answered {what}: {', '.join(self._addresses)}"
        )


async def _drop(server: MetaClient, lease: LeaseId) -> bool:
    return await server.end_lease(lease, used=False)
