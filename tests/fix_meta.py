"""The directory in tests: the meta server's own core in this process, on a path that can fail.

``BreakableMeta`` decides everything as production does: membership, blocks, leases, holds and
namespaces. A test can only make it unreachable, hold up its answers, and read the questions. Its
clock stands still, so nodes and leases live until a test advances the clock.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tests.fix_scheduler import LAYOUT, make_info
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Owner, Tier, block_keys
from tierkv.kvcore.block_event import BlockStored, EventBatch, HoldOrder
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.kvcore.request import GenerateRequest
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.directory.leases import LeaseCounts
from tierkv.metaserver.local import LocalMeta

Asked = ParamSpec("Asked")
NOBODY = Owner()
Answer = TypeVar("Answer")


def _over_the_path(
    method: Callable[Asked, Awaitable[Answer]],
) -> Callable[Asked, Awaitable[Answer]]:
    @wraps(method)
    async def ask(*args: Asked.args, **how: Asked.kwargs) -> Answer:
        meta: Any = args[0]
        meta.asked[method.__name__].append(args[1:])
        await meta.pass_through()
        return await method(*args, **how)

    return ask


class BreakableMeta(LocalMeta):
    """A meta server that can be unreachable.

    Attributes:
        clock: time of the directory.
        down: the server can't be reached.
        gate: answers wait for it; set by default.
        asked: positional arguments of the questions so far, by method.
    """

    def __init__(
        self, config: MetaConfig | None = None, *, clock: ManualClock | None = None
    ) -> None:
        self.clock = clock or ManualClock()
        super().__init__(config, clock=self.clock)
        self.down = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)

    register = _over_the_path(LocalMeta.register)
    heartbeat = _over_the_path(LocalMeta.heartbeat)
    deregister = _over_the_path(LocalMeta.deregister)
    report_events = _over_the_path(LocalMeta.report_events)
    locate = _over_the_path(LocalMeta.locate)
    locate_many = _over_the_path(LocalMeta.locate_many)
    extend_lease = _over_the_path(LocalMeta.extend_lease)
    end_lease = _over_the_path(LocalMeta.end_lease)
    resolve_namespace = _over_the_path(LocalMeta.resolve_namespace)
    list_nodes = _over_the_path(LocalMeta.list_nodes)
    list_blocks = _over_the_path(LocalMeta.list_blocks)
    directory_counts = _over_the_path(LocalMeta.directory_counts)
    list_namespaces = _over_the_path(LocalMeta.list_namespaces)
    put_namespace = _over_the_path(LocalMeta.put_namespace)

    async def holds(
        self, node_id: NodeId, incarnation: Incarnation
    ) -> AsyncGenerator[HoldOrder, None]:
        self.asked["holds"].append((node_id, incarnation))
        await self.pass_through()
        async with aclosing(super().holds(node_id, incarnation)) as orders:
            async for order in orders:
                yield order

    async def pass_through(self) -> None:
        """Wait for the gate; fail while the server can't be reached."""
        await self.gate.wait()
        if self.down:
            raise DirectoryUnavailableError("the directory can't be reached")

    @property
    def chains(self) -> list[Sequence[BlockKey]]:
        """The chains that were located, in order."""
        return [chain for (chains,) in self.asked["locate_many"] for chain in chains]

    @property
    def leases_live(self) -> int:
        """Number of leases that were neither ended nor expired."""
        return len(self.state.leases)

    @property
    def leases(self) -> LeaseCounts:
        """What became of leases so far."""
        return self.state.leases.counts


async def join(meta: MetaClient, info: NodeInfo, report: NodeReport | None = None) -> None:
    """Register a node, as it may do again, and send a heartbeat."""
    await meta.register(info)
    await meta.heartbeat(info.node_id, info.incarnation, report or NodeReport())


async def leave(meta: MetaClient) -> None:
    """Deregister all nodes."""
    for node in await meta.list_nodes():
        await meta.deregister(node.info.node_id, node.info.incarnation)


def chain_of(request: GenerateRequest) -> list[BlockKey]:
    """Return the keys of a request's full blocks."""
    return block_keys(request.namespace_key, request.token_ids, block_tokens=LAYOUT.block_tokens)


def make_pool_node(host: str = "h9") -> NodeInfo:
    """Make a pool node; no compute node of these tests runs on the usual host."""
    return make_info(f"pool-{host}", role=NodeRole.DMP, host=HostId(host), models=())


async def store_chain(
    meta: BreakableMeta,
    node: NodeInfo,
    chain: Sequence[BlockKey],
    tiers: Sequence[Tier | None],
    *,
    owner: Owner = NOBODY,
) -> None:
    """Report that a node stored blocks of a chain; register the node if it is new.

    Args:
        meta: the directory that is told.
        node: a compute node for L1, a pool node for the other tiers.
        chain: keys from the first block on.
        tiers: where the node has each block; None for a block that the node lacks.
        owner: the blocks' owner.
    """
    if node.node_id not in {known.info.node_id for known in await meta.list_nodes()}:
        await join(meta, node)
    blocks = zip(chain, (ROOT_PARENT, *chain), tiers, strict=False)
    events = tuple(
        BlockStored(
            BlockSpec(key, parent, LAYOUT.block_tokens, owner=owner),
            tier,
            _slot(node, tier, number),
        )
        for number, (key, parent, tier) in enumerate(blocks)
        if tier is not None
    )
    of_node = [b for (b,) in meta.asked["report_events"] if b.node_id == node.node_id]
    seq = 1 + sum(batch.incarnation == node.incarnation for batch in of_node)
    batch = EventBatch(node.node_id, node.incarnation, seq, events, inventory=seq == 1)
    reply = await meta.report_events(batch)
    assert reply.accepted and not reply.send_inventory


def _slot(node: NodeInfo, tier: Tier, number: int) -> Location | None:
    if tier is not Tier.L2:
        return None
    return Location(node.node_id, node.incarnation, 0, number, 1, LAYOUT.payload_bytes)
