"""Agents against a real meta server: late starts, restarts, lost nodes, health, bad settings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockRemoved, BlockStored
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeLoad, NodeReport, NodeRole
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.metaserver.reporter import BATCH_EVENTS, MetaReporter
from tierkv.metaserver.rpc.grpc_client import GrpcMeta
from tierkv.metaserver.rpc.server import MetaServer

pytestmark = pytest.mark.integration

DMP = NodeInfo(NodeId("dmp-0"), Incarnation(7), NodeRole.DMP, HostId("host-a"))
FAST = MetaConfig(
    address="127.0.0.1:0",
    heartbeat_interval_s=0.05,
    suspect_after_s=10.0,
    dead_after_s=20.0,
)


class Node:
    """A DMP node's directory side: what it holds, its outbox and its agent."""

    def __init__(self, meta: MetaClient, info: NodeInfo = DMP) -> None:
        self.info = info
        self.held: dict[BlockKey, BlockStored] = {}
        self.reporter = MetaReporter(
            info.node_id, info.incarnation, lambda: list(self.held.values())
        )
        report = NodeReport(load=NodeLoad(kv_usage=0.25))
        self.agent = NodeAgent(meta, info, self.reporter, lambda: report, batch_delay_s=0.001)

    def store(self, *numbers: int) -> None:
        events = []
        for number in numbers:
            location = Location(self.info.node_id, self.info.incarnation, 0, number, 1, 64)
            event = BlockStored(BlockSpec(chain(number + 1)[-1], ROOT_PARENT, 4), Tier.L2, location)
            self.held[event.key] = event
            events.append(event)
        self.reporter.report(events)

    def remove(self, number: int) -> None:
        key = chain(number + 1)[-1]
        del self.held[key]
        self.reporter.report([BlockRemoved(key, Tier.L2)])


def chain(length: int) -> list[BlockKey]:
    return [BlockKey((n + 1).to_bytes(16, "big")) for n in range(length)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.01)


async def prefix(meta: MetaClient, length: int = 8) -> int:
    try:
        return (await meta.locate(chain(length))).prefix_blocks
    except DirectoryUnavailableError:
        return -1


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    await node.agent.start()
    try:
        yield node
    finally:
        await node.agent.stop()


@asynccontextmanager
async def serving(config: MetaConfig = FAST) -> AsyncIterator[MetaServer]:
    server = MetaServer(config)
    await server.start()
    try:
        yield server
    finally:
        if server.local is not None:
            server.local.state.directory.check_invariants()
        await server.stop(grace_s=0)


@asynccontextmanager
async def connected(address: str, token: str | None = None) -> AsyncIterator[MetaClient]:
    client = GrpcMeta(address, token=token, timeout_s=5.0)
    try:
        yield client
    finally:
        await client.close()


async def test_what_a_node_reports_is_located_after_flush() -> None:
    async with serving() as server, connected(server.address) as meta, running(Node(meta)) as node:
        node.store(0, 1, 2)
        await node.agent.flush(timeout_s=30)
        assert await prefix(meta) == 3
        node.remove(1)
        await node.agent.flush(timeout_s=30)
        assert await prefix(meta) == 1
        assert node.agent.registered.is_set()
        assert node.agent.contact_age_s is not None

        async def load_is_known() -> bool:
            return [n.report.load.kv_usage for n in await meta.list_nodes()] == [0.25]

        await until(load_is_known)


async def test_the_same_works_inside_one_process() -> None:
    meta = LocalMeta(FAST)
    async with running(Node(meta)) as node:
        thread = threading.Thread(target=node.store, args=(0, 1))
        thread.start()
        thread.join()
        await node.agent.flush(timeout_s=30)
        assert await prefix(meta) == 2
    assert await meta.list_nodes() == ()
    await meta.close()


async def test_an_inventory_of_many_parts_arrives_whole() -> None:
    count = 2 * BATCH_EVENTS + 5
    meta = LocalMeta(FAST)
    node = Node(meta)
    node.store(*range(count))
    async with running(node):
        await node.agent.flush(timeout_s=30)
        whole = chain(count + 1)
        parts = [whole[start : start + BATCH_EVENTS] for start in range(0, count, BATCH_EVENTS)]
        found = [(await meta.locate(part)).prefix_blocks for part in parts]
        assert sum(found) == count == (await meta.list_blocks(0)).total
        meta.state.directory.check_invariants()
    await meta.close()


async def test_a_restarted_meta_server_is_right_again() -> None:
    async with serving() as first:
        address = first.address
        client, far = GrpcMeta(address), GrpcMeta(address)
        node = Node(client)
        other = Node(far, NodeInfo(NodeId("dmp-1"), Incarnation(1), NodeRole.DMP, HostId("host-b")))
        await node.agent.start()
        await other.agent.start()
        node.store(*range(4))
        other.store(4)
        await node.agent.flush(timeout_s=30)
        await other.agent.flush(timeout_s=30)
        assert await prefix(client) == 5
    assert await prefix(client) == -1
    node.store(5)
    node.remove(3)
    with pytest.raises(DirectoryUnavailableError, match="not taken within"):
        await node.agent.flush(timeout_s=0.2)
    again = MetaConfig(
        address=address, heartbeat_interval_s=0.05, suspect_after_s=10.0, dead_after_s=20.0
    )
    async with serving(again):

        async def all_is_known() -> bool:
            try:  # The stream of locates may be back before the connection of gRPC.
                nodes, blocks = await client.list_nodes(), await client.list_blocks(100)
            except DirectoryUnavailableError:
                return False
            return len(nodes) == 2 and blocks.total == 5 and await prefix(client) >= 0

        await until(all_is_known)
        assert await prefix(client) == 3
        node.store(3)
        await node.agent.flush(timeout_s=30)
        assert await prefix(client) == 6
        for one in (node, other):
            await one.agent.stop()
        assert await client.list_nodes() == ()
    await client.close()
    await far.close()


async def test_a_node_that_starts_first_is_known_once_the_meta_server_is_there() -> None:
    async with serving() as server:
        address = server.address
    async with connected(address) as meta, running(Node(meta)) as node:
        node.store(0, 1)
        assert not node.agent.registered.is_set()
        assert node.agent.contact_age_s is None
        async with serving(MetaConfig(address=address)):
            await node.agent.flush(timeout_s=30)
            assert await prefix(meta) == 2


async def test_a_node_declared_dead_comes_back_by_itself() -> None:
    meta = LocalMeta(FAST)
    async with running(Node(meta)) as node:
        node.store(0)
        await node.agent.flush(timeout_s=30)
        await meta.deregister(DMP.node_id, DMP.incarnation)
        assert await prefix(meta) == 0

        async def is_back() -> bool:
            return await prefix(meta) == 1

        await until(is_back)
    await meta.close()


async def test_a_restarted_node_replaces_its_earlier_life() -> None:
    async with serving() as server, connected(server.address) as meta:
        old = Node(meta)
        await old.agent.start()
        old.store(0, 1)
        await old.agent.flush(timeout_s=30)
        young = Node(meta, NodeInfo(DMP.node_id, Incarnation(8), NodeRole.DMP, DMP.host))
        async with running(young):
            young.store(0)
            await young.agent.flush(timeout_s=30)
            assert await prefix(meta) == 1

            async def the_old_one_noticed() -> bool:
                return not old.agent.registered.is_set()

            await until(the_old_one_noticed)
            await old.agent.stop()
            assert [n.info.incarnation for n in await meta.list_nodes()] == [8]
            assert await prefix(meta) == 1


async def test_a_wrong_token_means_no_directory_and_says_why() -> None:
    config = MetaConfig(address="127.0.0.1:0", token="right")
    async with serving(config) as server:
        for token in (None, "wrong"):
            async with connected(server.address, token) as meta:
                with pytest.raises(DirectoryUnavailableError, match="refused our cluster token"):
                    await meta.locate(chain(1))


async def test_health_is_served_without_a_token() -> None:
    async with (
        serving(MetaConfig(address="127.0.0.1:0", token="right")) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tierkv.v1.Meta"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_bad_configuration_leaves_nothing_behind(tmp_path: Path) -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match=r"in use \(meta\.address"):
            await MetaServer(MetaConfig(address=server.address)).start()
    with pytest.raises(ConfigError, match="no token is set"):
        await MetaServer(MetaConfig(address="0.0.0.0:0")).start()
    broken = MetaServer(MetaConfig(address="127.0.0.1:0", database=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"meta\.database"):
        await broken.start()
    await broken.stop()
    assert broken.address == ""


async def test_stopping_twice_is_fine_and_the_port_is_free_again() -> None:
    async with serving() as server:
        address = server.address
        await server.stop()
    async with serving(MetaConfig(address=address)) as second:
        assert second.address == address
