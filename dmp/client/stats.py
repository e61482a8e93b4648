"""What a Pool tells about itself and its nodes; values only.

Made by ``Pool.stats``; read by people, tests and the ``tierkv pool`` command.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.dmp.pool_node import PathInfo, PoolNodeStats
from tierkv.kvcore.ids import NodeId


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One node as a Pool sees it.

    Attributes:
        address: as given to ``Pool.connect``.
        node_id: its name; empty until it answered once.
        up: whether it answers.
        path: how bytes travel, and why; or why there is no path.
        errors: failed calls by code, each of them a miss or a refused put.
        stats: the node's own counters; None while it is down.
    """

    address: str
    node_id: NodeId
    up: bool
    path: PathInfo
    errors: tuple[tuple[str, int], ...]
    stats: PoolNodeStats | None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters of one Pool since it connected.

    Attributes:
        hits: values, or parts of values, that were read.
        misses: those that were not there or could not be read.
        stored: values that are in the pool after a put.
        refused: values no node took.
        pinned: keys pinned now.
        pins_lost: pinned keys that are gone (their node was lost or started again).
        open_puts: puts that are opened and neither sealed nor given up.
        misfits: ranges that ``get_ranges_into`` found, but not of the size that was asked for:
            who wrote and who reads are not set up alike.
        members: the nodes.
    """

    hits: int
    misses: int
    stored: int
    refused: int
    pinned: int
    pins_lost: int
    members: tuple[PoolMember, ...]
    open_puts: int = 0
    misfits: int = 0


@dataclass(slots=True)
class PoolCounters:
    """The counters while they count; guarded by the pool's lock."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    misfits: int = 0
