"""What a block is: one value from the writer to the slot, the disk, the directory and back.

A writer makes a BlockSpec; slots, disk records, events and listings embed the same object and add
what they know: a location, a sequence number, ages. The key alone names the block. All other fields
describe the block: two specs of one key may differ in owner or outlook.

A Location is a reference to a copy, never an address: the owner checks the location against its
slot table, and a stale generation or incarnation means "miss".

Keys are a keyed hash chained from block to block. The front makes them to locate the KV of a
prompt, and compute nodes to publish KV. Equal inputs give equal keys on every machine and in every
run; ``hash()`` is never used.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from enum import IntEnum, StrEnum
from functools import lru_cache
from hashlib import blake2b
from operator import add
from typing import Final

from tierkv.kvcore.ids import (
    BLOCK_KEY_BYTES,
    NAMESPACE_KEY_BYTES,
    BlockKey,
    HostId,
    Incarnation,
    NamespaceKey,
    NodeId,
)


class Tier(StrEnum):
    """The memory hierarchy, nearest first."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L4 = "L4"


@dataclass(frozen=True, slots=True)
class Location:
    """A slot of a DMP node at a given generation.

    Attributes:
        node: the DMP node that owns the bytes.
        incarnation: start number of the node when the reference was made.
        segment: index of the segment in that node.
        slot: index of the slot in that segment.
        generation: number of reuses of the slot.
        length: payload bytes.
    """

    node: NodeId
    incarnation: Incarnation
    segment: int
    slot: int
    generation: int
    length: int


@dataclass(frozen=True, slots=True)
class Replica:
    """A copy of a block, as known to the directory.

    Attributes:
        key: the block.
        node: the holder.
        host: the holder's machine; a reader on the same host sees L2, others L3.
        tier: L1 for a compute node's pages, L2 for DMP memory, L4 for DMP disk.
        location: the slot; None for L1, whose pages never leave their process.
    """

    key: BlockKey
    node: NodeId
    host: HostId
    tier: Tier
    location: Location | None = None


def tier_seen_from(replica: Replica, host: HostId) -> Tier:
    """Return the tier a reader on ``host`` sees: pooled DRAM is L2 at home and L3 elsewhere."""
    if replica.tier is Tier.L2 and replica.host != host:
        return Tier.L3
    return replica.tier


class Expectation(IntEnum):
    """What is known about the next use of a block, from least to most worth keeping."""

    NONE = 0
    """No use is expected: a final answer, or blocks that only one call of a statement needed."""

    UNKNOWN = 1
    TURN = 2
    """Another turn of the session is expected."""

    ROWS = 3
    """Pending calls of a running statement will read the block."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose block it is, for accounts and views; the key decides who can read it.

    Attributes:
        model: model name.
        tenant: account of the bytes.
        session: conversation that stored the block; empty when unknown.
    """

    model: str = ""
    tenant: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class RangeShape:
    """How a payload is cut into ranges that are moved and checked alone.

    Attributes:
        size_bytes: bytes of one range (one layer); all ranges are equally long.
        count: number of ranges.
    """

    size_bytes: int
    count: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of all ranges."""
        return self.size_bytes * self.count


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a writer knows about a block's future; eviction decides by it.

    Attributes:
        expectation: of the next use.
        expected_in_s: seconds until the next use; None when not known.
        depth: blocks before this one in its prompt.
        tail: the last block of its prompt.
    """

    expectation: Expectation = Expectation.UNKNOWN
    expected_in_s: float | None = None
    depth: int = 0
    tail: bool = False


shared_owner: Final = lru_cache(maxsize=4_096)(Owner)
"""Returns the same Owner for the same names. Readers of messages and files use it, because each
slot and each record of a disk keeps its owner, and most have the same few."""

shared_ranges: Final = lru_cache(maxsize=1_024)(RangeShape)
"""Returns the same RangeShape for the same numbers, for the same reason."""

NO_OWNER: Final = Owner()
NO_OUTLOOK: Final = Outlook()
"""Of a block from disk or from before a restart: neither keeps a block's future."""

NO_RANGES: Final = RangeShape(0, 0)
"""Of a block in L1 and of the directory's blocks, which are known by key only."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block of KV, wherever it lies.

    Attributes:
        key: names the block; equal keys have equal bytes.
        parent: the block before it, ``ROOT_PARENT`` for the first; a parent outlives its children
            under eviction.
        tokens: tokens in the block.
        ranges: how the payload is cut.
        owner: whose block it is.
        outlook: what is known about its next use.
    """

    key: BlockKey
    parent: BlockKey
    tokens: int
    ranges: RangeShape = NO_RANGES
    owner: Owner = NO_OWNER
    outlook: Outlook = NO_OUTLOOK

    def at_rest(self) -> BlockSpec:
        """Return what a disk keeps of a block: neither its session nor its outlook."""
        if not self.owner.session and self.outlook == NO_OUTLOOK:
            return self
        owner = shared_owner(self.owner.model, self.owner.tenant)
        return replace(self, owner=owner, outlook=NO_OUTLOOK)


@dataclass(frozen=True, slots=True)
class Erased:
    """Copies of blocks that were removed, with their bytes overwritten.

    Attributes:
        memory_blocks, memory_bytes: in the pool's memory.
        resting_blocks, resting_bytes: at rest, on disks and in archives.
        page_blocks, page_bytes: in pages of compute nodes (L1).
    """

    memory_blocks: int = 0
    memory_bytes: int = 0
    resting_blocks: int = 0
    resting_bytes: int = 0
    page_blocks: int = 0
    page_bytes: int = 0

    def __add__(self, other: Erased) -> Erased:
        return Erased(*map(add, astuple(self), astuple(other)))


ROOT_PARENT = BlockKey(bytes(BLOCK_KEY_BYTES))
"""Parent of a prompt's first block."""


def namespace_key(
    cluster_secret: bytes, *, tenant: str, model_revision: str, layout_fingerprint: bytes
) -> NamespaceKey:
    """Derive the 32-byte hash key that isolates one tenant, model revision and layout.

    Different tenants never share a block, because their blocks have different names.

    Args:
        cluster_secret: 16 to 64 bytes, the same on all meta servers of a cluster.
        tenant: isolation domain; a namespace declared shared passes its own name here.
        model_revision: digest of the weights and configuration.
        layout_fingerprint: ``BlockLayout.fingerprint()``.

    Raises:
        ValueError: the secret has an unusable length.
    """
    if not 16 <= len(cluster_secret) <= 64:
        raise ValueError("the cluster secret must have 16 to 64 bytes")
    mac = blake2b(key=cluster_secret, digest_size=NAMESPACE_KEY_BYTES, person=b"tierkv-ns-1")
    for part in (tenant.encode(), model_revision.encode(), layout_fingerprint):
        mac.update(len(part).to_bytes(4, "little"))
        mac.update(part)
    return NamespaceKey(mac.digest())


def next_block_key(key: NamespaceKey, parent: BlockKey, block_token_ids: Sequence[int]) -> BlockKey:
    """Return the key of one full block after ``parent`` (``ROOT_PARENT`` for the first block)."""
    payload = parent + _token_bytes(block_token_ids)
    return BlockKey(blake2b(payload, key=key, digest_size=BLOCK_KEY_BYTES).digest())


def block_keys(key: NamespaceKey, token_ids: Sequence[int], *, block_tokens: int) -> list[BlockKey]:
    """Name every full block of a token sequence; a trailing partial block has no name.

    Costs one hash per block; O(len(token_ids)).
    """
    raw = _token_bytes(token_ids)
    width = 4 * block_tokens
    keys: list[BlockKey] = []
    parent = ROOT_PARENT
    for start in range(0, len(raw) - width + 1, width):
        digest = blake2b(parent + raw[start : start + width], key=key, digest_size=BLOCK_KEY_BYTES)
        parent = BlockKey(digest.digest())
        keys.append(parent)
    return keys


class ChunkNamer:
    """Names the blocks of position-free chunks that were computed after one isolation prefix.

    The chunk key hashes the chunk's tokens and the isolation prefix, in a domain of its own. The
    text before the chunk in a prompt does not enter the hash. The key of block i is a hash of the
    chunk key and i. The prefix is hashed once for all chunks.
    """

    def __init__(self, key: NamespaceKey, isolation_prefix_ids: Sequence[int]) -> None:
        self._key = key
        self._mac = blake2b(key=key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-chunk")
        prefix = _token_bytes(isolation_prefix_ids)
        self._mac.update(len(prefix).to_bytes(8, "little"))
        self._mac.update(prefix)

    def block_keys(self, token_ids: Sequence[int], *, block_tokens: int) -> list[BlockKey]:
        """Name every block of a chunk; the last one may be partial. O(len(token_ids))."""
        mac = self._mac.copy()
        mac.update(_token_bytes(token_ids))
        chunk = mac.digest()
        keys: list[BlockKey] = []
        for index in range(-(-len(token_ids) // block_tokens)):
            block = blake2b(key=self._key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-chunkblk")
            block.update(chunk + index.to_bytes(4, "little"))
            keys.append(BlockKey(block.digest()))
        return keys


def tail_key(key: NamespaceKey, parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of a partial last block for a handoff, in a hash domain of its own."""
    mac = blake2b(key=key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-tail")
    mac.update(parent + _token_bytes(token_ids))
    return BlockKey(mac.digest())


def coarse_key(key: BlockKey) -> BlockKey:
    """Return the key of the coarser copy of a block that is stored at two levels (``adaptive``).

    The hash has a domain of its own. The result is as secret as ``key``.
    """
    mac = blake2b(key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-coarse")
    return BlockKey(mac.digest())


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian uint32."""
    numbers = array("I", token_ids)
    if numbers.itemsize != 4:  # pragma: no cover - no supported platform
        return b"".join(t.to_bytes(4, "little") for t in token_ids)
    if sys.byteorder == "big":  # pragma: no cover
        numbers.byteswap()
    return numbers.tobytes()
