"""Which transport reaches a DMP node from here: the one place that chooses.

Called by compute nodes for every DMP node the meta server lists.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dmp.pool_node import PoolNode
from dmp.transport.connection import Peer
from dmp.transport.shm import ShmPoolNode
from dmp.transport.tcp import TcpPoolNode
from kvcore.errors import ConfigError, TransportError
from kvcore.ids import HostId
from kvcore.node import NodeInfo

log = logging.getLogger(__name__)


def connect_pool_node(info: NodeInfo, *, host: HostId, token: str | None = None) -> PoolNode:
    """Return a PoolNode for a DMP node: shared memory on the same host, else TCP.

    Does not connect yet; the first call does, and every later one that finds no connection.

    Args:
        info: the DMP node's registration.
        host: where the caller runs.
        token: cluster token, if the cluster has one.

    Raises:
        TransportError: the node has no data address.
    """
    if not info.data_address:
        raise TransportError(f"DMP node {info.node_id} has no data address")
    tcp = TcpPoolNode(Peer(info.node_id, info.data_address, token or ""), host=info.host)
    if info.host != host:
        log.info("dmp %s: tcp to %s (host %s)", info.node_id, info.data_address, info.host)
        return tcp
    try:
        shm = ShmPoolNode(tcp, Path(info.segment_path))
    except ConfigError as error:
        log.warning("dmp %s: tcp, although on this host: %s", info.node_id, error)
        return tcp
    log.info("dmp %s: shm through %s (same host)", info.node_id, info.segment_path)
    return shm
