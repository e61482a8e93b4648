"""Paths to a DMP node, best first, with reasons: a pure function of both sides' abilities.

Shared memory beats RDMA, and RDMA beats TCP. TCP always remains as the last resort, because bytes
must travel even when the preferred path does not work. dmp/transport/select.py carries the plan
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tierkv.dmp.pool_node import PathInfo
from tierkv.kvcore.ids import NO_ZONE, HostId, Incarnation, ZoneId


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
