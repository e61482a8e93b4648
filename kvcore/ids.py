"""Names for the identifiers that cross room borders.

Every room uses the NewTypes, and mypy refuses a block key in place of a node id. At run time ids
are plain str, int and bytes without behaviour.
"""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b
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
"""16 bytes that name a block and its whole prefix through the chain (kvcore/block.py)."""

NamespaceKey = NewType("NamespaceKey", bytes)
"""32 bytes keying the block hash; equal only for equal tenant, model revision and layout."""

SALT_MARK: Final = ":salt-"
"""In the tenant of a block whose request had a salt, between the tenant's own name and a digest."""

_VERSIONED: Final = re.compile(r"(.*):v([0-9a-f]{8})", re.DOTALL)

BLOCK_KEY_BYTES: Final = 16
NAMESPACE_KEY_BYTES: Final = 32


def scope_of_version(scope: str, version: str) -> str:
    """Return the owner of blocks of a namespace's version; ``scope`` without a version."""
    return f"{scope}:v{version_mark(version)}" if version else scope


def version_mark(version: str) -> str:
    """Return the mark of a version in the tenant of a block; empty: no version."""
    return blake2b(version.encode(), digest_size=4).hexdigest() if version else ""


def mark_of(scope: str) -> str:
    """Return the mark of the version in the tenant of a block; empty: has none."""
    found = _VERSIONED.fullmatch(scope)
    return found[2] if found else ""


def tenant_of(scope: str) -> str:
    """Return the tenant's own name in the tenant of a block: without version and salt."""
    found = _VERSIONED.fullmatch(scope) if ":v" in scope else None
    return (found[1] if found else scope).partition(SALT_MARK)[0]


def new_request_id(prefix: str = "req") -> RequestId:
    """Return a fresh random request id, for example ``req-1f0c...`` (unique, not guessable)."""
    return RequestId(f"{prefix}-{secrets.token_hex(16)}")
