"""A compute node lists the pool nodes after a change only, and again until all are connected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fix_scheduler import make_info
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import TransportError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.metaserver.client import DirectoryNode
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.parts import parts
from tierkv.parts.parts import PoolWatcher


class CountedMeta(LocalMeta):
    """Counts the lists that it gives."""

    lists = 0

    async def list_nodes(self) -> tuple[DirectoryNode, ...]:
        self.lists += 1
        return await super().list_nodes()


class Node:
    """Remembers how many pool nodes it was given."""

    pool: Sequence[PoolNode] = ()

    def set_pool_nodes(self, nodes: Sequence[PoolNode]) -> None:
        self.pool = nodes


class Connection:
    """A connection that only closes."""

    def close(self) -> None:
        """Do nothing."""


def pool(name: str) -> NodeInfo:
    return make_info(name, role=NodeRole.DMP, host=HostId("h"), models=())


async def test_the_list_is_asked_for_after_a_change_only(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = {NodeId("b")}

    def connect(info: NodeInfo, **_: object) -> Connection:
        if info.node_id in unreachable:
            raise TransportError("no answer")
        return Connection()

    monkeypatch.setattr(parts, "connect_pool_node", connect)
    meta, node, version = CountedMeta(MetaConfig(), clock=ManualClock()), Node(), [0]
    watcher = PoolWatcher(node, meta, host=HostId("h"), token=None, version=lambda: version[0])
    await meta.register(pool("a"))
    await watcher._look()
    await watcher._look()
    assert (meta.lists, len(node.pool)) == (2, 1), "an unknown version spares no list"
    version[0] = meta.state._membership.pool_version
    for _ in range(3):
        await watcher._look()
    assert meta.lists == 3

    await meta.register(pool("b"))
    version[0] = meta.state._membership.pool_version
    for _ in range(2):
        await watcher._look()
    assert (meta.lists, len(node.pool)) == (5, 1), "b is tried again and again"
    unreachable.clear()
    for _ in range(3):
        await watcher._look()
    assert (meta.lists, len(node.pool)) == (6, 2)
    await watcher.stop()
