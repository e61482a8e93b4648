"""Opens the best path to a DMP node: the only place that carries out a transfer plan.

Called by the composition root for every DMP node in the meta server's list, and by
dmp/client/node_link.py for every address of a Pool. A fallback is reported once in the log, and in
``PoolNode.path``.

``plan_transfer`` is a pure function of both sides' abilities: the paths, best first, with reasons.
Shared memory beats RDMA, and RDMA beats TCP. TCP always remains as the last resort, because bytes
must travel even when the preferred path does not work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from tierkv.dmp.pool_node import PathInfo, PoolNode
from tierkv.dmp.segment.segment import map_segment
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.control import NodeControl
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.dmp.transport.verbs.device import discover
from tierkv.dmp.transport.verbs.node import open_verbs_node
from tierkv.dmp.zone_traffic import ZoneTraffic
from tierkv.kvcore.errors import ConfigError, TransportError
from tierkv.kvcore.ids import NO_ZONE, HostId, Incarnation, ZoneId
from tierkv.kvcore.node import NodeInfo
from tierkv.kvwire.credentials import ClusterToken, TlsFiles


class Transport(StrEnum):
    """The user's preferred transport (``pool.transport``)."""

    AUTO = "auto"
    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


UNKNOWN_INCARNATION: Final = Incarnation(0)


@dataclass(frozen=True, slots=True)
class Ends:
    """Abilities of the two sides.

    Attributes:
        here: the caller's host; empty if only mapping the segment can tell whether both hosts are
            equal.
        there: the node's host.
        segment_path: the node's memory file; empty if the node shares no file.
        no_rdma: why this machine can't do RDMA; empty if RDMA works.
        incarnation: the node's start number, stored in the segment too; 0 if unknown.
        zone: the node's zone; empty if unknown.
    """

    here: HostId
    there: HostId
    segment_path: str
    no_rdma: str
    incarnation: Incarnation = UNKNOWN_INCARNATION
    zone: ZoneId = NO_ZONE


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Paths to try, and paths that are impossible.

    Attributes:
        steps: paths in the order to try them; the last path is TCP.
        ruled_out: paths that can't work, each with its reason.
    """

    steps: tuple[PathInfo, ...]
    ruled_out: tuple[PathInfo, ...]


def plan_transfer(wish: Transport, ends: Ends) -> TransferPlan:
    """Order the paths to a node.

    Args:
        wish: ``auto`` takes the best path; ``tcp`` takes only TCP; ``shm`` and ``rdma`` take the
            named path, or TCP where the named path does not work.
        ends: abilities of the two sides.
    """
    if wish is Transport.TCP:
        return TransferPlan((PathInfo("tcp", "pool.transport is tcp"),), ())
    steps: list[PathInfo] = []
    ruled_out: list[PathInfo] = []
    if wish in (Transport.AUTO, Transport.SHM):
        why_not = _why_no_shm(ends)
        chosen = ruled_out if why_not else steps
        chosen.append(PathInfo("shm", why_not or "same host"))
    if wish in (Transport.AUTO, Transport.RDMA):
        chosen = ruled_out if ends.no_rdma else steps
        chosen.append(PathInfo("rdma", ends.no_rdma or "RDMA on both sides"))
    steps.append(PathInfo("tcp", "always there"))
    return TransferPlan(tuple(steps), tuple(ruled_out))


def settle(step: PathInfo, *not_taken: Sequence[PathInfo]) -> PathInfo:
    """Return the path in use with a readable reason: for TCP, the faults of the better paths."""
    reasons = [f"{path.reason}" for group in not_taken for path in group]
    if step.transport != "tcp" or not reasons:
        return step
    return PathInfo("tcp", "; ".join(reasons))


def _why_no_shm(ends: Ends) -> str:
    if ends.here and ends.here != ends.there:
        return f"another host ({ends.there})"
    if not ends.segment_path:
        return "the node shares no segment file"
    return ""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PathOptions:
    """The user's settings for paths.

    Attributes:
        transport: preferred transport; see dmp/transport/select.py.
        rdma_devices: this machine's devices to use; empty means all.
        tls: certificate files for the TCP side; None means plain TCP.
        traffic: this process's zone, and its bytes to and from others; None without zones.
    """

    transport: Transport = Transport.AUTO
    rdma_devices: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    traffic: ZoneTraffic | None = None


def connect_pool_node(
    info: NodeInfo,
    *,
    host: HostId,
    token: ClusterToken | None = None,
    options: PathOptions | None = None,
) -> PoolNode:
    """Return a PoolNode for a DMP node, over the best path available.

    TCP and shared memory do not connect yet; the first call connects, and so does every later call
    that finds no connection. RDMA asks the node for its RDMA ports, which may take
    ``connect_timeout_s``.

    Args:
        info: the DMP node's registration.
        host: host of the caller.
        token: cluster token, if the cluster has one.
        options: the user's settings; the default is the best path.

    Raises:
        TransportError: the node has no data address.
    """
    if not info.data_address:
        raise TransportError(f"DMP node {info.node_id} has no data address")
    options = options or PathOptions()
    peer = Peer(info.node_id, info.data_address, token or "", tls=options.tls)
    no_rdma = why_no_rdma(options.rdma_devices)
    ends = Ends(host, info.host, info.segment_path, no_rdma, zone=info.zone)
    return open_path(peer, ends, options)


def why_no_rdma(devices: tuple[str, ...] = ()) -> str:
    """Return why this machine can't use RDMA; empty if RDMA works."""
    return discover(devices).reason.removeprefix("no RDMA: ")


def open_path(peer: Peer, ends: Ends, options: PathOptions) -> NodeControl:
    """Try the paths of the plan in order; TCP is last and always opens."""
    if options.traffic is not None:
        peer = replace(peer, other_zone=options.traffic.other(ends.zone))
    plan = plan_transfer(options.transport, ends)
    failed: list[PathInfo] = []
    for step in plan.steps:
        reason = settle(step, plan.ruled_out, failed).reason
        opened = _OPENERS[step.transport](peer, ends, options, reason)
        if not isinstance(opened, str):
            _tell(opened, peer, failed)
            return opened
        failed.append(PathInfo(step.transport, opened.removeprefix("no RDMA: ")))
    raise AssertionError("a plan ends in TCP")


def _open_shm(peer: Peer, ends: Ends, options: PathOptions, reason: str) -> NodeControl | str:
    path = Path(ends.segment_path)
    try:
        if not ends.here and not _is_segment_of(path, ends.incarnation):
            return f"another host ({ends.there})"  # The same path, but another node's file.
        return ShmPoolNode(replace(peer, other_zone=None), path, host=ends.there)
    except ConfigError as error:
        return error.message


def _is_segment_of(path: Path, incarnation: Incarnation) -> bool:
    segment = map_segment(path)
    found = segment.incarnation
    segment.close()
    return found == incarnation


def _open_rdma(peer: Peer, ends: Ends, options: PathOptions, reason: str) -> NodeControl | str:
    return open_verbs_node(peer, host=ends.there, devices=options.rdma_devices)


def _open_tcp(peer: Peer, ends: Ends, options: PathOptions, reason: str) -> NodeControl | str:
    return TcpPoolNode(peer, host=ends.there, reason=reason)


_OPENERS: dict[str, Callable[[Peer, Ends, PathOptions, str], NodeControl | str]] = {
    "shm": _open_shm,
    "rdma": _open_rdma,
    "tcp": _open_tcp,
}


def _tell(node: PoolNode, peer: Peer, failed: list[PathInfo]) -> None:
    """Log the path once, as a warning after an unexpected failure of a better path."""
    path = node.path
    told = log.warning if failed else log.info
    told("dmp %s at %s: %s (%s)", peer.node_id, peer.address, path.transport, path.reason)
