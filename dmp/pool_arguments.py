"""What callers hand to a Pool, checked: addresses, keys of any kind, buffers and their ranges.

Pure. Called by dmp/pool.py; what a bound of kvcore/limits.py forbids is refused by that name before
it travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from dmp.pool_node import PutRequest
from dmp.transfer_plan import Transport
from kvcore import limits
from kvcore.block_key import ROOT_PARENT
from kvcore.errors import ConfigError
from kvcore.ids import BLOCK_KEY_BYTES, BlockKey
from policies.eviction import Expectation

Key = str | bytes
"""A name of any length, or exactly 16 bytes that are a block key already."""

Value = bytes | bytearray | memoryview
"""Any C-contiguous buffer; numpy arrays and CPU tensors through ``memoryview(array)``."""


def to_block_key(key: Key) -> BlockKey:
    """Return 16 bytes as they are and anything else hashed (blake2b-128).

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
        ValueError: it is empty, too large or not contiguous.
    """
    view = memoryview(value)
    if not view.c_contiguous:
        raise ValueError("a value must be a C-contiguous buffer")
    if not 1 <= view.nbytes <= limits.MAX_SLOT_BYTES:
        raise ValueError(
            f"a value of {view.nbytes} bytes; limits.MAX_SLOT_BYTES allows 1 to "
            f"{limits.MAX_SLOT_BYTES}"
        )
    return view.cast("B")


def to_put(key: BlockKey, value: memoryview, range_bytes: int | None) -> PutRequest:
    """Cut a value into ranges that are checked and read alone.

    Who stores a value by hand wants it: it is no block that happens to be there after a request.

    Args:
        key: its name.
        value: its bytes.
        range_bytes: bytes of one range; None makes the whole value one range.

    Raises:
        ValueError: the value is no whole number of ranges, or there are too many.
    """
    size = value.nbytes if range_bytes is None else range_bytes
    if size < 1 or value.nbytes % size:
        raise ValueError(f"{value.nbytes} bytes are no whole number of ranges of {size} bytes")
    count = value.nbytes // size
    if count > limits.MAX_LAYERS:
        raise ValueError(f"{count} ranges; limits.MAX_LAYERS allows {limits.MAX_LAYERS}")
    return PutRequest(
        key, ROOT_PARENT, size, count, tokens=0, expectation=Expectation.ROWS, expected_in_s=0.0
    )


def covering(offset: int, length: int, *, range_bytes: int, size_bytes: int) -> range:
    """Return the ranges that hold bytes [offset, offset + length).

    Raises:
        ValueError: the span is empty or leaves the value.
    """
    if offset < 0 or length < 1 or offset + length > size_bytes:
        raise ValueError(f"[{offset}, {offset + length}) is outside a value of {size_bytes} bytes")
    return range(offset // range_bytes, (offset + length - 1) // range_bytes + 1)


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Cut and check a list of ``host:port``.

    Raises:
        ConfigError: there is none, or one is malformed.
    """
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    found = [address.strip() for address in given if address.strip()]
    if not found:
        raise ConfigError("no pool address given", hint="host:port, as `tierkv serve dmp` prints")
    for address in found:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"{address!r} is no pool address", hint="write host:port")
    return list(dict.fromkeys(found))


def to_transport(name: str) -> Transport:
    """Return the transport of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Transport(name)
    except ValueError:
        known = ", ".join(Transport)
        raise ConfigError(f"unknown transport {name!r}; choose one of {known}") from None


def to_writable_view(buffer: bytearray | memoryview) -> memoryview:
    """Return a flat view to be filled.

    Raises:
        ValueError: the buffer is read-only or not contiguous.
    """
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("the buffer must be writable and C-contiguous")
    return view.cast("B")
