"""Leases on blocks: what a locate promised, and how nodes are asked to keep it.

The meta server gives a lease with a locate (metaserver/directory/leases.py) and sends HoldOrders to
the nodes that hold the blocks; they keep those from eviction until the order's time is over or
taken back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from tierkv.kvcore.ids import BlockKey

LeaseId = NewType("LeaseId", int)
"""Names a lease of one meta server; 0 is none. Unknown and expired ones are the same."""

NO_LEASE = LeaseId(0)


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """What a node is asked to do about its blocks.

    Attributes:
        lease: on whose behalf; a later order for the same lease replaces its deadline.
        keys: blocks to keep, heads before tails; empty with ``ttl_s`` 0 lets go of all of the
            lease, empty with a positive ``ttl_s`` prolongs what it holds.
        ttl_s: seconds from receipt until the hold ends by itself.
    """

    lease: LeaseId
    keys: tuple[BlockKey, ...]
    ttl_s: float
