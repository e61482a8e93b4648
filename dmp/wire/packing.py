"""Bounded reading and writing of the fields of data-plane messages.

Called by dmp/wire/messages.py. Every count and length is checked before memory is allocated;
malformed input raises RemoteProtocolError, never IndexError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tierkv.kvcore import limits
from tierkv.kvcore.block import Location
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, Incarnation, NodeId

_REF = struct.Struct("<QIQQQ")
MAX_NUMBER = 1e12
"""Upper bound (exclusive) of durations and byte counts."""

_ONE = {code: struct.Struct("<" + code) for code in "BHIQ"}


class Packer:
    """Appends fields to a head."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def pack(self, layout: str, *values: float) -> Packer:
        """Append numbers, little-endian."""
        self._parts.append(struct.pack("<" + layout, *values))
        return self

    def raw(self, data: bytes) -> Packer:
        """Append bytes of a length that both sides know."""
        self._parts.append(data)
        return self

    def text(self, text: str) -> Packer:
        """Append a short string."""
        data = text.encode()[: limits.MAX_STARTUP_BYTES]
        return self.pack("H", len(data)).raw(data)

    def ref(self, location: Location) -> Packer:
        """Append a slot reference; the node is the peer itself."""
        self._parts.append(
            _REF.pack(
                location.incarnation,
                location.segment,
                location.slot,
                location.generation,
                location.length,
            )
        )
        return self

    def maybe_ref(self, location: Location | None) -> Packer:
        """Append a slot reference, or a mark for None."""
        if location is None:
            return self.raw(b"\0")
        return self.raw(b"\1").ref(location)

    def refs(self, locations: Sequence[Location]) -> Packer:
        """Append a counted list of references."""
        self.pack("I", len(locations))
        for location in locations:
            self.ref(location)
        return self

    def bytes(self) -> bytes:
        """Return the head."""
        return b"".join(self._parts)


class Unpacker:
    """Takes fields off a head, in order."""

    def __init__(self, head: bytes | bytearray | memoryview, node: str = "") -> None:
        self._view = memoryview(head)
        self._at = 0
        self._node = NodeId(node)

    def raw(self, size: int) -> bytes:
        """Take bytes of a known length."""
        end = self._at + size
        if end > len(self._view):
            raise RemoteProtocolError("a data-plane message ends too early")
        data = bytes(self._view[self._at : end])
        self._at = end
        return data

    def integer(self, code: str) -> int:
        """Take one integer of a struct code."""
        layout = _ONE[code]
        try:
            (value,) = layout.unpack_from(self._view, self._at)
        except struct.error as error:
            raise RemoteProtocolError("a data-plane message ends too early") from error
        self._at += layout.size
        return int(value)

    def number(self) -> float:
        """Take one finite, non-negative float."""
        (value,) = struct.unpack("<d", self.raw(8))
        if not 0.0 <= value < MAX_NUMBER:
            raise RemoteProtocolError(f"a duration or count of {value} makes no sense")
        return float(value)

    def integers(self, code: str, count: int) -> tuple[int, ...]:
        """Take ``count`` integers."""
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.raw(struct.calcsize(layout)))

    def text(self) -> str:
        """Take a short string."""
        return self.string(self.integer("H"))

    def string(self, size: int) -> str:
        """Take a string of a known length."""
        if not size:
            return ""
        try:
            return self.raw(size).decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("a string is not UTF-8") from error

    def key(self) -> BlockKey:
        """Take a block key."""
        return BlockKey(self.raw(BLOCK_KEY_BYTES))

    def count(self) -> int:
        """Take the length of a list."""
        count = self.integer("I")
        if count > limits.MAX_FRAME_ITEMS:
            raise RemoteProtocolError(f"{count} items in a frame, {limits.MAX_FRAME_ITEMS} allowed")
        return count

    def ref(self) -> Location:
        """Take a slot reference."""
        incarnation, segment, slot, generation, length = _REF.unpack(self.raw(_REF.size))
        return Location(self._node, Incarnation(incarnation), segment, slot, generation, length)

    def maybe_ref(self) -> Location | None:
        """Take a slot reference, or None."""
        return self.ref() if self.raw(1) != b"\0" else None

    def refs(self) -> list[Location]:
        """Take a counted list of references."""
        return [self.ref() for _ in range(self.count())]

    def end(self) -> None:
        """Check that no bytes are left."""
        if self._at != len(self._view):
            raise RemoteProtocolError(f"{len(self._view) - self._at} stray bytes after a message")
