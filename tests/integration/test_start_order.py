"""Roles that are started side by side wait for the directory, and a front for compute nodes."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.rpc.server import MetaServer
from tierkv.processes.start_order import await_cluster
from tierkv.settings import ClusterSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


def settings(address: str, *, nodes: int = 0, wait_s: float = 60.0) -> ClusterSettings:
    return ClusterSettings(meta_address=address, start_wait_s=wait_s, start_nodes=nodes)


def info(role: NodeRole, number: int) -> NodeInfo:
    return NodeInfo(NodeId(f"{role}-{number}"), Incarnation(1), role, HostId("h"))


async def test_a_front_waits_for_all_its_compute_nodes() -> None:
    server = MetaServer(MetaConfig(address="127.0.0.1:0"))
    address = await server.start()
    assert server.local is not None
    try:
        await await_cluster(settings(address, nodes=2), "dmp", asyncio.Event())
        waiting = asyncio.create_task(
            await_cluster(settings(address, nodes=2), "front", asyncio.Event())
        )
        await server.local.register(info(NodeRole.DMP, 0))
        await server.local.register(info(NodeRole.PREFILL, 0))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        await server.local.register(info(NodeRole.DECODE, 0))
        await waiting
    finally:
        await server.stop()


async def test_a_role_waits_for_the_directory_to_listen() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        waiting = asyncio.create_task(await_cluster(settings(address), "dmp", asyncio.Event()))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        holder.listen()
        await waiting


@pytest.mark.parametrize("role", ["dmp", "front"])
async def test_a_wait_ends_with_its_time_or_when_the_role_is_told_to_stop(role: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{holder.getsockname()[1]}"
        await await_cluster(settings(nowhere, nodes=1, wait_s=0.05), role, asyncio.Event())
        await await_cluster(settings(nowhere, nodes=1, wait_s=0.0), role, asyncio.Event())
        stop = asyncio.Event()
        waiting = asyncio.create_task(await_cluster(settings(nowhere, nodes=1), role, stop))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        stop.set()
        await waiting
