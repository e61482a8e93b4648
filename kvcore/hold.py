"""Leases on blocks, and the orders that make nodes keep leased blocks.

The meta server gives a lease with a locate (metaserver/directory/leases.py) and sends HoldOrders to
the nodes that hold the blocks. A node protects these blocks from eviction until the order expires
or is withdrawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from tierkv.kvcore.ids import BlockKey

LeaseId = NewType("LeaseId", int)
"""Id of a lease of one meta server; 0 means no lease. Unknown and expired ids are treated alike."""

NO_LEASE = LeaseId(0)


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """Tells a node which blocks to protect from eviction, and for how long.

    Attributes:
        lease: the lease; a later order for the same lease replaces its deadline.
        keys: blocks to keep, heads before tails. Without keys the order concerns all blocks of the
            lease: ``ttl_s`` 0 releases them, a positive ``ttl_s`` prolongs their hold.
        ttl_s: seconds from receipt until the hold expires.
    """

    lease: LeaseId
    keys: tuple[BlockKey, ...]
    ttl_s: float
