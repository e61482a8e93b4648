"""Opens the best path to a DMP node: the one place that carries out a transfer plan.

Called by the composition root for every DMP node the meta server lists, and by dmp/pool.py for
every address it was given. What falls back says so once in the log, and in ``PoolNode.path``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dmp.pool_node import PathInfo, PoolNode
from dmp.segment import map_segment
from dmp.transfer_plan import Ends, TransferPlan, Transport, plan_transfer, settle
from dmp.transport.connection import Peer
from dmp.transport.rdma_here import why_no_rdma
from dmp.transport.shm import ShmPoolNode
from dmp.transport.tcp import TcpPoolNode
from kvcore.errors import ConfigError, TransportError
from kvcore.ids import HostId, Incarnation
from kvcore.node import NodeInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """An open path.

    Attributes:
        node: moves bytes; closing it closes both.
        control: asks questions over TCP; the same object where bytes go over TCP too.
    """

    node: PoolNode
    control: TcpPoolNode


def connect_pool_node(
    info: NodeInfo,
    *,
    host: HostId,
    token: str | None = None,
    transport: Transport = Transport.AUTO,
) -> PoolNode:
    """Return a PoolNode for a DMP node, over the best path there is.

    TCP and shared memory don't connect yet; their first call does, and every later one that finds
    no connection. RDMA asks the node whether it has a door, which may take ``connect_timeout_s``.

    Args:
        info: the DMP node's registration.
        host: where the caller runs.
        token: cluster token, if the cluster has one.
        transport: what the user wants.

    Raises:
        TransportError: the node has no data address.
    """
    if not info.data_address:
        raise TransportError(f"DMP node {info.node_id} has no data address")
    peer = Peer(info.node_id, info.data_address, token or "")
    ends = Ends(host, info.host, info.segment_path, why_no_rdma())
    return open_link(peer, ends, transport).node


def open_link(peer: Peer, ends: Ends, transport: Transport = Transport.AUTO) -> Link:
    """Try the paths of the plan in order; TCP is the last and always opens."""
    plan = plan_transfer(transport, ends)
    failed: list[PathInfo] = []
    for step in plan.steps:
        link = _open(step, peer, ends, failed, plan)
        if link is not None:
            _tell(link.node, peer, failed)
            return link
    raise AssertionError("a plan ends in TCP")


def _open(
    step: PathInfo, peer: Peer, ends: Ends, failed: list[PathInfo], plan: TransferPlan
) -> Link | None:
    reason = settle(step, plan.ruled_out, failed).reason
    control = TcpPoolNode(peer, host=ends.there, reason=reason)
    if step.transport == "tcp":
        return Link(control, control)
    opened = _OPENERS[step.transport](control, ends)
    if isinstance(opened, str):
        control.close()
        failed.append(PathInfo(step.transport, opened))
        return None
    return Link(opened, control)


def _open_shm(control: TcpPoolNode, ends: Ends) -> PoolNode | str:
    path = Path(ends.segment_path)
    try:
        if not ends.here and not _is_segment_of(path, ends.incarnation):
            return f"another host ({ends.there})"  # A file of that name, but not the node's.
        return ShmPoolNode(control, path)
    except ConfigError as error:
        return error.message


def _is_segment_of(path: Path, incarnation: Incarnation) -> bool:
    segment = map_segment(path)
    found = segment.incarnation
    segment.close()
    return found == incarnation


def _open_rdma(control: TcpPoolNode, ends: Ends) -> PoolNode | str:
    return "this build has no RDMA"


_OPENERS: dict[str, Callable[[TcpPoolNode, Ends], PoolNode | str]] = {
    "shm": _open_shm,
    "rdma": _open_rdma,
}


def _tell(node: PoolNode, peer: Peer, failed: list[PathInfo]) -> None:
    path = node.path
    told = log.warning if failed else log.info
    told("dmp %s at %s: %s (%s)", peer.node_id, peer.address, path.transport, path.reason)
