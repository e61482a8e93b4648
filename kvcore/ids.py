"""Names for the identifiers that cross room borders.

Every room uses these NewTypes, so that a block key can't be passed where a node id is meant. At run
time ids are plain str, int and bytes without behaviour.
"""

from __future__ import annotations

import secrets
from typing import Final, NewType

NodeId = NewType("NodeId", str)
"""A node's name, unique in the cluster and stable over restarts."""

HostId = NewType("HostId", str)
"""A machine's name; nodes with equal HostId can map each other's segments (tier L2)."""

ZoneId = NewType("ZoneId", str)
"""Name of a part of the cluster, for example an availability zone; empty: the cluster has none.
Bytes between zones cost more than bytes within one."""
NO_ZONE: Final = ZoneId("")

Incarnation = NewType("Incarnation", int)
"""Start number of a node; messages with an older number are refused."""

RequestId = NewType("RequestId", str)
"""Id of one generation request; appears in every log line about the request."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes that name a block and its whole prefix through the chain (kvcore/block_key.py)."""

NamespaceKey = NewType("NamespaceKey", bytes)
"""32 bytes keying the block hash; equal only for equal tenant, model revision and layout."""

SALT_MARK: Final = ":salt-"
"""In the tenant of a block whose request had a salt, between the tenant's own name and a digest."""

BLOCK_KEY_BYTES: Final = 16
NAMESPACE_KEY_BYTES: Final = 32


def new_request_id(prefix: str = "req") -> RequestId:
    """Return a fresh random request id, for example ``req-1f0c...`` (unique, not guessable)."""
    return RequestId(f"{prefix}-{secrets.token_hex(16)}")
