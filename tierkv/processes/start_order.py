"""Waiting between the roles of a cluster that start in parallel.

Called by tierkv/commands/serve.py. Imports take most of a start and come before the wait. Roles
need no order, because each role runs without the others. But a node that starts before the
directory logs a missing directory, and a front that starts before the compute nodes can't answer
yet. ``tierkv up`` sets the waiting time, for the first start only.
"""

from __future__ import annotations

import asyncio
import importlib
from contextlib import suppress
from typing import Final

from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.server_group import meta_addresses
from tierkv.metaserver.several_meta import connect_meta
from tierkv.parts.access import cluster_access
from tierkv.processes.own_process import collecting_nothing
from tierkv.settings import ClusterSettings, Settings

LOOK_EVERY_S: Final = 0.02
_PARTS: Final = {
    "meta": ("tierkv.metaserver.rpc.server",),
    "dmp": (),
    "front": (
        "tierkv.parts.front_part",
        "tierkv.parts.record_follower",
        "tierkv.dbfront.http.server",
    ),
}
_COMPUTE: Final = ("tierkv.parts.compute_part",)
_ENGINE: Final = ("tierkv.parts.engine_part",)


def import_role(settings: Settings, role: str) -> None:
    """Import the modules of a role, before waiting for other roles."""
    compute = _ENGINE if settings.engine.kind else _COMPUTE
    names = _PARTS.get(role, compute)
    if role == "front" and not settings.front.postgres:
        names += ("tierkv.dbfront.pgwire.server",)
    with collecting_nothing():
        for name in names:
            importlib.import_module(name)


async def await_cluster(cluster: ClusterSettings, role: str, stop: asyncio.Event) -> None:
    """Wait until the directory answers and, for a front, knows ``start_nodes`` compute nodes.

    Returns after ``start_wait_s`` at the latest, and when ``stop`` is set.
    """
    if role == "meta" or not cluster.meta_address:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(cluster.start_wait_s):
            if role == "front" and cluster.start_nodes:
                await _await_nodes(cluster, stop)
            else:
                await _await_port(cluster.meta_address, stop)


async def _await_port(address: str, stop: asyncio.Event) -> None:
    """Wait until one of the meta servers accepts connections."""
    while not stop.is_set():
        for one in meta_addresses(address):
            host, _, port = one.rpartition(":")
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                return
        await _pause(stop)


async def _await_nodes(cluster: ClusterSettings, stop: asyncio.Event) -> None:
    await _await_port(cluster.meta_address, stop)  # A refused gRPC channel would back off.
    access = cluster_access(cluster)
    meta = connect_meta(cluster.meta_address, token=access.token, tls=access.tls)
    try:
        while not stop.is_set() and await _count(meta) < cluster.start_nodes:
            await _pause(stop)
    finally:
        await meta.close()


async def _pause(stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_EVERY_S):
            await stop.wait()


async def _count(meta: MetaClient) -> int:
    """Return the number of live nodes that compute."""
    with suppress(DirectoryUnavailableError):
        nodes = await meta.list_nodes()
        roles = [node.info.role for node in nodes if node.state == "alive"]
        return sum(role.prefills or role.decodes for role in roles)
    return 0
