"""A directory on several meta servers, as one MetaClient.

Made by ``connect_meta`` when ``cluster.meta_address`` names several servers. Every node registers
with all servers and reports each block to its two owners (metaserver/block_owners.py). Servers know
nothing of each other and replicate nothing: what a server lost, nodes tell it again. A locate asks
the owners at once and joins the answers. A server that does not answer within its learned time-out
costs this time once: its blocks are asked of their second owners, until a look in the background
finds the server again.

A block whose owners are both lost is unknown, which ends a chain's prefix; only a call that no
server answers is DirectoryUnavailableError.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial, reduce
from operator import methodcaller, xor
from typing import Any, Final, TypeVar

from tierkv.kvcore.block_event import NO_LEASE, EventBatch, HoldOrder, LeaseId
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError, LocalProtocolError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvwire.credentials import ClusterToken, TlsFiles
from tierkv.metaserver.block_owners import (
    BlockOwners,
    PartAnswer,
    asked_of,
    joined,
    joined_counts,
    joined_listing,
    joined_nodes,
    joined_versions,
)
from tierkv.metaserver.client import (
    MAX_LISTED_REPLICAS,
    BlockListing,
    ClusterRecord,
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
from tierkv.metaserver.rpc.grpc_client import GrpcMeta
from tierkv.metaserver.server_group import ServerGroup, meta_addresses, within

_T = TypeVar("_T")
_REOPEN_S: Final = 0.5
"""Pause before a lost stream of hold orders is opened again."""

_READ_S: Final = 0.5
"""How long a server may take to answer a small question."""

_HEARTBEAT_WAIT_S: Final = 0.3
"""How long a heartbeat waits for further servers once one has answered."""

ServerLease = tuple[int, LeaseId]
"""Number of a server, and its own id of a lease."""

_SPARE_S: Final = 60.0
"""How long an expired lease stays known; the servers judge expiry by their own clocks."""

Node = tuple[NodeId, Incarnation]
_Beat = tuple[int, HeartbeatReply] | None
"""Number of a server and its reply; None without an answer."""


class JoinedLeases:
    """Ids of this client for the leases of servers; not thread-safe."""

    def __init__(self) -> None:
        self._parts: OrderedDict[LeaseId, tuple[float, tuple[ServerLease, ...]]] = OrderedDict()
        self._last = 0

    def add(self, parts: Sequence[ServerLease], until: float, now: float) -> LeaseId:
        """Return an id for leases until a time; NO_LEASE when there are none."""
        while self._parts and next(iter(self._parts.values()))[0] + _SPARE_S < now:
            self._parts.popitem(last=False)
        if not parts:
            return NO_LEASE
        self._last += 1
        lease = LeaseId(self._last)
        self._parts[lease] = (until, tuple(parts))
        return lease

    def parts(self, lease: LeaseId) -> tuple[ServerLease, ...]:
        """Return the leases behind an id; none for an unknown id."""
        return self._parts.get(lease, (0.0, ()))[1]

    def extend(self, lease: LeaseId, until: float) -> None:
        """Set a new time."""
        if (known := self._parts.get(lease)) is not None:
            self._parts[lease] = (until, known[1])
            self._parts.move_to_end(lease)

    def end(self, lease: LeaseId) -> tuple[ServerLease, ...]:
        """Forget an id and return the leases behind it."""
        return self._parts.pop(lease, (0.0, ()))[1]


class SeveralMeta:
    """Several meta servers; implements MetaClient. Belongs to one event loop, like its clients.

    Attributes:
        _group: the servers.
        _infos: nodes that registered through this client.
        _slow: a server's heartbeat that is still under way.
    """

    def __init__(
        self,
        servers: Sequence[MetaClient],
        addresses: Sequence[str],
        *,
        clock: Clock | None = None,
    ) -> None:
        """Make a client; it closes ``servers``, whose ``addresses`` must be equal on all nodes."""
        self._group = ServerGroup(servers, addresses)
        self._clock = clock or SystemClock()
        self._owners = BlockOwners(addresses)
        self._leases = JoinedLeases()
        self._infos: dict[Node, NodeInfo] = {}
        self._slow: dict[int, asyncio.Task[_Beat]] = {}

    # Nodes

    async def register(self, info: NodeInfo) -> Registration:
        self._group.refuse_if_closed()
        node = (info.node_id, info.incarnation)
        replies = await self._group.ask_all(
            lambda server: server.register(info), self._group.numbers
        )
        self._infos = {n: i for n, i in self._infos.items() if n[0] != info.node_id}
        self._infos[node] = info
        return Registration(
            max(reply.heartbeat_interval_s for reply in replies.values()),
            any(reply.send_inventory for reply in replies.values()),
        )

    async def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport
    ) -> HeartbeatReply:
        self._group.refuse_if_closed()
        tasks = {
            number: asyncio.create_task(self._beat(number, node_id, incarnation, report))
            for number in self._group.numbers
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
            raise self._group.unavailable("a heartbeat")
        strangers = [number for number, reply in replies.items() if not reply.known]
        wanted = any(reply.send_inventory for reply in replies.values())
        info = self._infos.get((node_id, incarnation))
        if len(strangers) == len(replies) or info is None:
            return HeartbeatReply(len(strangers) < len(replies), wanted)
        version = joined_versions({number: reply.pool_version for number, reply in replies.items()})
        # Different as long as one server knows a change before the others.
        namespaces = reduce(xor, {reply.namespaces_version for reply in replies.values()})
        for number in strangers:  # They started again, or could not be reached when others could.
            with suppress(DirectoryUnavailableError):
                wanted |= (await self._group.servers[number].register(info)).send_inventory
        return HeartbeatReply(True, wanted, version, namespaces)

    def _beaten(self, number: int, _: asyncio.Task[_Beat]) -> None:
        self._slow.pop(number, None)

    async def _beat(
        self, number: int, node_id: NodeId, incarnation: Incarnation, report: NodeReport
    ) -> _Beat:
        """Tell one server; None without an answer."""
        health = self._group.health[number]
        try:
            reply = await self._group.servers[number].heartbeat(node_id, incarnation, report)
        except DirectoryUnavailableError as error:
            self._group.lose(number, error)
            return None
        owed, health.owes_inventory = health.owes_inventory, False
        return number, replace(reply, send_inventory=reply.send_inventory or owed)

    async def deregister(self, node_id: NodeId, incarnation: Incarnation) -> None:
        self._group.refuse_if_closed()
        self._infos.pop((node_id, incarnation), None)
        await self._group.ask_all(
            lambda server: server.deregister(node_id, incarnation), self._group.numbers
        )

    async def report_events(self, batch: EventBatch) -> ReportReply:
        self._group.refuse_if_closed()
        table = self._owners.of([event.key for event in batch.events]).tolist()
        shares: list[list[Any]] = [[] for _ in self._group.servers]
        for event, owners in zip(batch.events, table, strict=True):
            for number in owners:
                shares[number].append(event)
        replies = await self._group.ask_all(
            lambda server: server.report_events(
                replace(batch, events=tuple(shares[self._group.servers.index(server)]))
            )
        )
        for number in self._group.numbers:
            if number not in replies or not replies[number].accepted:
                self._group.health[number].owes_inventory = True
        return ReportReply(
            any(reply.accepted for reply in replies.values()),
            any(reply.send_inventory for reply in replies.values()),
        )

    async def holds(
        self, node_id: NodeId, incarnation: Incarnation
    ) -> AsyncGenerator[HoldOrder, None]:
        self._group.refuse_if_closed()
        orders: asyncio.Queue[HoldOrder | None] = asyncio.Queue()
        alive = len(self._group.servers)
        lost: DirectoryUnavailableError | None = None

        async def follow(server: MetaClient) -> None:
            nonlocal alive, lost
            while True:
                try:
                    async with aclosing(server.holds(node_id, incarnation)) as stream:
                        async for order in stream:
                            await orders.put(order)
                    lost = None
                except DirectoryUnavailableError as error:
                    lost = error
                alive -= 1
                if not alive:
                    await orders.put(None)
                await asyncio.sleep(_REOPEN_S)
                alive += 1

        tasks = [asyncio.create_task(follow(server)) for server in self._group.servers]
        try:
            while (order := await orders.get()) is not None:
                yield order
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if lost is not None:
            raise lost

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
        self._group.refuse_if_closed()
        keys = [key for chain in chains for key in chain]
        owner = [number for number, chain in enumerate(chains) for _ in chain]
        at = [position for chain in chains for position in range(len(chain))]
        parts: list[list[PartAnswer]] = [[] for _ in chains]
        leases: list[list[ServerLease]] = [[] for _ in chains]
        table = self._owners.of(keys)
        open_rows = list(range(len(keys)))
        heard = not keys
        for _ in range(self._owners.each):
            usable = [health.usable for health in self._group.health]
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
                for which, (chosen, reply) in found.items():
                    parts[which].append(PartAnswer([at[row] for row in chosen], reply))
                    if reply.lease:
                        leases[which].append((number, reply.lease))
            if not open_rows:
                break
        if not heard:
            raise self._group.unavailable("a locate")
        for row in sorted(open_rows):  # Nobody knows these: each ends its chain.
            parts[owner[row]].append(PartAnswer((at[row],), LocateReply()))
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
    ) -> dict[int, tuple[list[int], LocateReply]] | None:
        """Ask a server about its rows; return rows and reply by chain, None without an answer."""
        health = self._group.health[number]
        chains: dict[int, list[int]] = {}
        for row in rows:
            chains.setdefault(owner[row], []).append(row)
        started = self._clock.now()
        try:
            wanted = [[keys[row] for row in chain] for chain in chains.values()]
            question = ask(self._group.servers[number], wanted)
            replies = await within(question, health.timeout_s)
        except (DirectoryUnavailableError, TimeoutError) as error:
            self._group.lose(number, error)
            return None
        health.answered(self._clock.now() - started)
        found = zip(chains.values(), replies, strict=True)
        return dict(zip(chains, found, strict=True))

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool:
        self._group.refuse_if_closed()
        self._leases.extend(lease, self._clock.now() + ttl_s)
        return await self._each_lease(
            self._leases.parts(lease), lambda server, part: server.extend_lease(part, ttl_s=ttl_s)
        )

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        self._group.refuse_if_closed()
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
        replies = await self._group.ask_all(
            lambda server: call(server, known[self._group.servers.index(server)]),
            known,
            within_s=_READ_S,
        )
        return any(replies.values())

    # Namespaces and views

    async def resolve_namespace(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes, model: str = ""
    ) -> NamespaceGrant:
        return await self._group.ask_any(
            lambda server: server.resolve_namespace(
                tenant,
                model_revision=model_revision,
                layout_fingerprint=layout_fingerprint,
                model=model,
            ),
            within_s=_READ_S,
        )

    async def list_namespaces(self) -> tuple[Namespace, ...]:
        return await self._group.ask_any(lambda server: server.list_namespaces(), within_s=_READ_S)

    async def put_namespace(self, namespace: Namespace) -> Namespace:
        return await self._group.ask_any(lambda server: server.put_namespace(namespace))

    async def drop_namespace(self, name: str) -> bool:
        return await self._group.ask_any(lambda server: server.drop_namespace(name))

    async def list_records(self, kind: str) -> tuple[ClusterRecord, ...]:
        return await self._group.ask_any(lambda each: each.list_records(kind), within_s=_READ_S)

    async def put_record(self, record: ClusterRecord) -> bool:
        return await self._group.ask_any(lambda server: server.put_record(record))

    async def list_nodes(self) -> tuple[DirectoryNode, ...]:
        self._group.refuse_if_closed()
        listings = await self._group.ask_all(lambda server: server.list_nodes(), within_s=_READ_S)
        return joined_nodes(listings.values())

    async def list_blocks(self, limit: int) -> BlockListing:
        self._group.refuse_if_closed()
        listings = (await self._group.ask_all(lambda server: server.list_blocks(limit))).values()
        return joined_listing(tuple(listings), limit, copies_told=self._copies_told(len(listings)))

    async def blocks_after(self, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockKey]:
        self._group.refuse_if_closed()
        found: dict[BlockKey, BlockKey] = {}
        above = tuple(keys)
        while above:  # A server knows a part of the blocks only, so it may not see a whole chain.
            ask = methodcaller("blocks_after", above)
            parts = (await self._group.ask_all(ask)).values()
            new = {k: p for part in parts for k, p in part.items() if k not in found}
            found |= new
            above = tuple(new)
        return found

    async def directory_counts(self) -> tuple[tuple[str, int], ...]:
        self._group.refuse_if_closed()
        counts = (await self._group.ask_all(lambda server: server.directory_counts())).values()
        return joined_counts(tuple(counts), copies_told=self._copies_told(len(counts)))

    def _copies_told(self, answered: int) -> float:
        """Return how many of the servers that answered know a block, on average."""
        return max(1.0, self._owners.each * answered / len(self._group.servers))

    async def close(self) -> None:
        for task in self._slow.values():
            task.cancel()
        await asyncio.gather(*self._slow.values(), return_exceptions=True)
        await self._group.close()


def connect_meta(
    text: str,
    *,
    token: ClusterToken | None = None,
    tls: TlsFiles | None = None,
    home: str = "",
) -> MetaClient:
    """Return a client of the server, or of all servers, that an address names; does not connect.

    Args:
        text: value of ``cluster.meta_address``.
        token: the cluster token.
        tls: certificate files; None means without TLS.
        home: home of a node that will register.

    Raises:
        ConfigError: as ``meta_addresses``.
    """
    addresses = meta_addresses(text)
    clients = [GrpcMeta(address, token=token, tls=tls, home=home) for address in addresses]
    return clients[0] if len(clients) == 1 else SeveralMeta(clients, addresses)


async def _drop(server: MetaClient, lease: LeaseId) -> bool:
    return await server.end_lease(lease, used=False)
