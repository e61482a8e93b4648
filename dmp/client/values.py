"""Arguments and counters of a Pool: checks of the input, and statistics.

Called by dmp/client/pool.py; people, tests and ``tierkv pool`` read the counters. Arguments beyond
a bound of kvcore/limits.py are refused, with the name of the bound, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from tierkv.dmp.pool_node import PathInfo, PoolNodeStats
from tierkv.dmp.transport.select import Transport
from tierkv.kvcore import limits
from tierkv.kvcore.block import (
    NO_OUTLOOK,
    NO_OWNER,
    ROOT_PARENT,
    BlockSpec,
    Expectation,
    Outlook,
    Owner,
    RangeShape,
)
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NodeId


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One node as a Pool sees it.

    Attributes:
        address: as given to ``Pool.connect``.
        node_id: name of the node; empty until the first answer.
        up: whether the node answers.
        path: how bytes travel, and why; or why no path exists.
        errors: failed calls by code; each failure is a miss or a refused put.
        stats: the node's own counters; None while the node is down.
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
        misses: values that did not exist or could not be read.
        stored: values in the pool after a put.
        refused: values that no node accepted.
        pinned: keys pinned now.
        pins_lost: pinned keys that are gone (their node was lost or restarted).
        open_puts: open puts, neither sealed nor aborted.
        misfits: ranges that ``get_ranges_into`` found with another size than requested: writer and
            reader have different settings.
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
    """The running counters; guarded by the pool's lock."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    misfits: int = 0


Key = str | bytes
"""A name of any length, or exactly 16 bytes of an existing block key."""

Value = bytes | bytearray | memoryview
"""Any C-contiguous buffer; numpy arrays and CPU tensors through ``memoryview(array)``."""


@dataclass(frozen=True, slots=True)
class PutNotes:
    """A writer's facts about a value that is a block of KV; fields as in BlockSpec."""

    parent: BlockKey = ROOT_PARENT
    tokens: int = 0
    owner: Owner = NO_OWNER
    outlook: Outlook = NO_OUTLOOK


BY_HAND: Final = PutNotes(outlook=Outlook(Expectation.ROWS, expected_in_s=0.0))
"""Notes of a value that is stored explicitly: its use is expected soon, unlike the use of a block
that is a by-product of a request."""


def to_block_key(key: Key) -> BlockKey:
    """Return 16 bytes unchanged and hash any other key (blake2b-128).

    Raises:
        ValueError: the key is empty, or 16 zero bytes, which name no block.
    """
    raw = key.encode() if isinstance(key, str) else bytes(key)
    if not raw or raw == ROOT_PARENT:
        raise ValueError("a key must not be empty or all zeros")
    if len(raw) == BLOCK_KEY_BYTES and not isinstance(key, str):
        return BlockKey(raw)
    return BlockKey(blake2b(raw, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-pool").digest())


def to_bytes_view(value: Value) -> memoryview:
    """Return a flat view of a buffer.

    Raises:
        ValueError: the buffer is not contiguous.
    """
    view = memoryview(value)
    if not view.c_contiguous:
        raise ValueError("a value must be a C-contiguous buffer")
    return view.cast("B") if view.nbytes else memoryview(b"")


def to_put(
    key: BlockKey, size_bytes: int, range_bytes: int | None, notes: PutNotes = BY_HAND
) -> BlockSpec:
    """Cut a value into ranges that are checked and read alone.

    Args:
        key: key of the value.
        size_bytes: size of the value.
        range_bytes: bytes of one range; None makes the whole value one range.
        notes: facts about the value.

    Raises:
        ValueError: the value is too large or no whole number of ranges, or has too many ranges.
    """
    if not 1 <= size_bytes <= limits.MAX_SLOT_BYTES:
        raise ValueError(
            f"a value of {size_bytes} bytes; limits.MAX_SLOT_BYTES allows 1 to "
            f"{limits.MAX_SLOT_BYTES}"
        )
    size = size_bytes if range_bytes is None else range_bytes
    if size < 1 or size_bytes % size:
        raise ValueError(f"{size_bytes} bytes are no whole number of ranges of {size} bytes")
    count = size_bytes // size
    if count > limits.MAX_LAYERS:
        raise ValueError(f"{count} ranges; limits.MAX_LAYERS allows {limits.MAX_LAYERS}")
    ranges = RangeShape(size, count)
    return BlockSpec(key, notes.parent, notes.tokens, ranges, notes.owner, notes.outlook)


def note_each(notes: Sequence[PutNotes] | None, count: int) -> Sequence[PutNotes]:
    """Return notes for each value.

    Raises:
        ValueError: the number of notes differs from the number of values.
    """
    if notes is None:
        return [BY_HAND] * count
    if len(notes) != count:
        raise ValueError(f"{len(notes)} notes for {count} values")
    return notes


def covering(offset: int, length: int, *, range_bytes: int, size_bytes: int) -> range:
    """Return the ranges that contain bytes [offset, offset + length).

    Raises:
        ValueError: the span is empty or leaves the value.
    """
    if offset < 0 or length < 1 or offset + length > size_bytes:
        raise ValueError(f"[{offset}, {offset + length}) is outside a value of {size_bytes} bytes")
    return range(offset // range_bytes, (offset + length - 1) // range_bytes + 1)


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Split and check a list of ``host:port``.

    Raises:
        ConfigError: the list is empty, or an address is malformed.
    """
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    found = [address.strip() for address in given if address.strip()]
    if not found:
        raise ConfigError(
            "no pool address given", hint="Write host:port, as `tierkv serve dmp` prints it."
        )
    for address in found:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"{address!r} is no pool address", hint="Write host:port.")
    return list(dict.fromkeys(found))


def to_transport(name: str) -> Transport:
    """Return the transport with a name.

    Raises:
        ConfigError: unknown name.
    """
    try:
        return Transport(name)
    except ValueError:
        known = ", ".join(Transport)
        raise ConfigError(f"unknown transport {name!r}; choose one of {known}") from None


def to_writable_view(buffer: bytearray | memoryview) -> memoryview:
    """Return a flat view of a buffer to fill.

    Raises:
        ValueError: the buffer is read-only or not contiguous.
    """
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("the buffer must be writable and C-contiguous")
    return view.cast("B")
