"""Which paths may lead to a DMP node, best first, and why: a pure function of what both sides have.

Shared memory beats RDMA beats TCP; TCP always stays as the last resort, because bytes must travel
even when a wish can't be granted. dmp/transport/select.py carries the plan out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tierkv.dmp.pool_node import PathInfo
from tierkv.kvcore.ids import HostId, Incarnation


class Transport(StrEnum):
    """How a user wants bytes to travel (``pool.transport``)."""

    AUTO = "auto"
    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


UNKNOWN_INCARNATION: Final = Incarnation(0)


@dataclass(frozen=True, slots=True)
class Ends:
    """What the two sides have.

    Attributes:
        here: the caller's host; empty if only mapping the segment can tell whether it is the same.
        there: the node's host.
        segment_path: the node's memory file; empty when it shares none.
        no_rdma: why this machine can't do RDMA; empty if it can.
        incarnation: the node's start number, which its segment carries too; 0 if not known.
    """

    here: HostId
    there: HostId
    segment_path: str
    no_rdma: str
    incarnation: Incarnation = UNKNOWN_INCARNATION


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What to try, and what is out of the question.

    Attributes:
        steps: paths in the order to try them; the last one is TCP.
        ruled_out: paths that can't work, each with its reason.
    """

    steps: tuple[PathInfo, ...]
    ruled_out: tuple[PathInfo, ...]


def plan_transfer(wish: Transport, ends: Ends) -> TransferPlan:
    """Order the paths to a node.

    Args:
        wish: ``auto`` takes the best there is; ``tcp`` nothing else; ``shm`` and ``rdma`` that
            one, and TCP where it does not work.
        ends: what the two sides have.
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
    """Return the path in use with a reason for people: for TCP, what was wrong with the others."""
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
