"""Heads of the data-plane frames: one dataclass per message, ``pack`` and ``unpack``.

Called by dmp/server/client_connection.py and dmp/transport/control.py. Requests and replies are
plain values. This module checks the bounds of kvcore/limits.py, so dmp/node/node.py sees only sane
numbers. dmp/wire/range_codec.py packs the ranges of READ and WRITE.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

from tierkv.dmp.pool_node import PoolNodeStats
from tierkv.dmp.wire.packing import MAX_NUMBER, Packer, Unpacker
from tierkv.kvcore import limits
from tierkv.kvcore.block import (
    NO_OUTLOOK,
    BlockSpec,
    Erased,
    Expectation,
    Location,
    Outlook,
    Owner,
    Tier,
    shared_owner,
    shared_ranges,
)
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import NO_ZONE, BlockKey, HostId, Incarnation, NodeId, ZoneId
from tierkv.kvcore.node import TierStats

Head = bytes | bytearray | memoryview
_NAME = re.compile(limits.NAME_PATTERN)
_CLIENT_ID = re.compile(r"[0-9a-f]{0,64}")
_PUT: Final = struct.Struct("<16s16sQIIHHHIBBd")
"""Key, parent, range bytes, ranges, tokens, lengths of model, tenant and session, depth, tail,
expectation, seconds until the expected use (negative: unknown); the three names follow."""

_NOT_KNOWN: Final = -1.0
_EXPECTATIONS: Final = tuple(Expectation)
_STATS: Final = (
    *("memory.capacity_bytes", "memory.used_bytes", "memory.blocks_total", "memory.blocks_used"),
    *("slots_writing", "memory.evicted_blocks", "quarantined_slots", "memory.alloc_failures"),
    *("memory.read_bytes", "memory.write_bytes", "memory.demoted_blocks", "disk.promoted_blocks"),
    *("disk.capacity_bytes", "disk.used_bytes", "disk.blocks_used", "disk.alloc_failures"),
    *("refused_puts", "leased_blocks", "refused_leases"),
)
"""The numbers of a STATS reply, in their order on the wire."""

_numbers_of: Final = attrgetter(*_STATS)


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a client.

    Attributes:
        token: cluster token, or empty.
        client_id: random name of the client process; when the client's last connection closes, all
            reservations and holds of the client are freed. Empty: the node keeps no record of the
            client.
    """

    token: str
    client_id: str = ""

    def pack(self) -> bytes:
        return Packer().text(self.token).text(self.client_id).bytes()

    @classmethod
    def unpack(cls, head: Head) -> Hello:
        u = Unpacker(head)
        message = cls(token=u.text(), client_id=u.text())
        u.end()
        if not _CLIENT_ID.fullmatch(message.client_id):
            raise RemoteProtocolError("a client id is at most 64 hexadecimal digits")
        return message


@dataclass(frozen=True, slots=True)
class Welcome:
    """Reply to HELLO: the identity of the node."""

    node_id: NodeId
    host: HostId
    incarnation: Incarnation
    segment_path: str

    def pack(self) -> bytes:
        p = Packer().text(self.node_id).text(self.host).pack("Q", self.incarnation)
        return p.text(self.segment_path).bytes()

    @classmethod
    def unpack(cls, head: Head) -> Welcome:
        u = Unpacker(head)
        node_id, host = NodeId(u.text()), HostId(u.text())
        message = cls(node_id, host, Incarnation(u.integer("Q")), u.text())
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class About:
    """Reply to ABOUT, which has no head: more of the node's identity than WELCOME tells.

    Later releases may add fields at the end: a reader ignores what follows the fields it knows.

    Attributes:
        zone: the node's zone; empty if it has none.
    """

    zone: ZoneId = NO_ZONE

    def pack(self) -> bytes:
        return Packer().text(self.zone).bytes()

    @classmethod
    def unpack(cls, head: Head) -> About:
        return cls(ZoneId(Unpacker(head).text()))


@dataclass(frozen=True, slots=True)
class BlockLookup:
    """Request for the locations of blocks."""

    keys: Sequence[BlockKey]

    def pack(self) -> bytes:
        return Packer().pack("I", len(self.keys)).raw(b"".join(self.keys)).bytes()

    @classmethod
    def unpack(cls, head: Head) -> BlockLookup:
        u = Unpacker(head)
        message = cls([u.key() for _ in range(u.count())])
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class Reserve:
    """Request for slots for blocks."""

    deadline_s: float
    puts: Sequence[BlockSpec]

    def pack(self) -> bytes:
        p = Packer().pack("dI", self.deadline_s, len(self.puts))
        for put in self.puts:
            _pack_put(p, put)
        return p.bytes()

    @classmethod
    def unpack(cls, head: Head) -> Reserve:
        u = Unpacker(head)
        deadline_s = u.number()
        message = cls(deadline_s, [_unpack_put(u) for _ in range(u.count())])
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class RangeRef:
    """One range of one slot."""

    location: Location
    index: int


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges that look bad to a reader."""

    refs: Sequence[RangeRef]

    def pack(self) -> bytes:
        p = Packer().pack("I", len(self.refs))
        for ref in self.refs:
            p.ref(ref.location).pack("I", ref.index)
        return p.bytes()

    @classmethod
    def unpack(cls, head: Head, node: NodeId) -> Ranges:
        u = Unpacker(head, node)
        message = cls([RangeRef(u.ref(), u.integer("I")) for _ in range(u.count())])
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class Put:
    """Request to store blocks; all whole payloads follow in order, then all checksums.

    The checksums (one xxh3_64 per range) come last: a writer computes checksums while sending.
    """

    puts: Sequence[BlockSpec]

    def pack(self) -> bytes:
        p = Packer().pack("I", len(self.puts))
        for put in self.puts:
            _pack_put(p, put)
        return p.bytes()

    @classmethod
    def unpack(cls, head: Head) -> Put:
        u = Unpacker(head)
        puts: list[BlockSpec] = []
        for _ in range(u.count()):
            puts.append(_unpack_put(u, puts[-1] if puts else None))
        u.end()
        return cls(puts)

    @property
    def data_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum([put.ranges.payload_bytes for put in self.puts])

    @property
    def sums_bytes(self) -> int:
        """Bytes of the checksums after the payloads."""
        return 8 * sum([put.ranges.count for put in self.puts])


@dataclass(frozen=True, slots=True)
class Sealing:
    """A grant to seal, and the checksums of the written bytes."""

    location: Location
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """Request to make blocks readable."""

    items: Sequence[Sealing]

    def pack(self) -> bytes:
        p = Packer().pack("I", len(self.items))
        for item in self.items:
            count = len(item.checksums)
            p.ref(item.location).pack(f"I{count}Q", count, *item.checksums)
        return p.bytes()

    @classmethod
    def unpack(cls, head: Head, node: NodeId) -> Seal:
        u = Unpacker(head, node)
        items = []
        for _ in range(u.count()):
            location, count = u.ref(), u.integer("I")
            if count > limits.MAX_LAYERS:
                raise RemoteProtocolError(f"{count} ranges exceed {limits.MAX_LAYERS}")
            items.append(Sealing(location, u.integers("Q", count)))
        u.end()
        return cls(items)


@dataclass(frozen=True, slots=True)
class Refs:
    """Slots to abort, release, touch or (with a ttl) hold; ``number`` is the ttl or byte count."""

    locations: Sequence[Location]
    number: float = 0.0

    def pack(self) -> bytes:
        # A reader that looks at blocks in place counts a terabyte within a second.
        number = min(self.number, MAX_NUMBER - 1)
        return Packer().pack("d", number).refs(self.locations).bytes()

    @classmethod
    def unpack(cls, head: Head, node: NodeId) -> Refs:
        u = Unpacker(head, node)
        number = u.number()
        message = cls(u.refs(), number)
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class MaybeRefs:
    """One location or None per requested item."""

    locations: Sequence[Location | None]

    def pack(self) -> bytes:
        p = Packer().pack("I", len(self.locations))
        for location in self.locations:
            p.maybe_ref(location)
        return p.bytes()

    @classmethod
    def unpack(cls, head: Head, node: NodeId) -> MaybeRefs:
        u = Unpacker(head, node)
        message = cls([u.maybe_ref() for _ in range(u.count())])
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class Flags:
    """True or False per requested item."""

    values: Sequence[bool]

    def pack(self) -> bytes:
        return Packer().pack("I", len(self.values)).raw(bytes(self.values)).bytes()

    @classmethod
    def unpack(cls, head: Head) -> Flags:
        u = Unpacker(head)
        message = cls([bool(b) for b in u.raw(u.count())])
        u.end()
        return message


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An ERROR frame: the code of a kvcore error and its message."""

    code: str
    message: str

    def pack(self) -> bytes:
        return Packer().text(self.code).text(self.message).bytes()

    @classmethod
    def unpack(cls, head: Head) -> ErrorReply:
        u = Unpacker(head)
        message = cls(u.text(), u.text())
        u.end()
        return message


_ERASED: Final = ("memory_blocks", "memory_bytes", "resting_blocks", "resting_bytes")
_erased_of: Final = attrgetter(*_ERASED)


def pack_erased(erased: Erased) -> bytes:
    """Return the head of an ERASE reply."""
    return Packer().pack(f"{len(_ERASED)}Q", *_erased_of(erased)).bytes()


def unpack_erased(head: Head) -> Erased:
    """Read the head of an ERASE reply."""
    u = Unpacker(head)
    erased = Erased(*u.integers("Q", len(_ERASED)))
    u.end()
    return erased


def pack_stats(stats: PoolNodeStats) -> bytes:
    """Return the head of a STATS reply."""
    return Packer().pack(f"{len(_STATS)}Q", *_numbers_of(stats)).bytes()


def unpack_stats(head: Head) -> PoolNodeStats:
    """Read the head of a STATS reply."""
    u = Unpacker(head)
    fields: dict[str, dict[str, Any]] = {"memory": {}, "disk": {}, "": {}}
    for path, number in zip(_STATS, u.integers("Q", len(_STATS)), strict=True):
        tier, _, name = path.rpartition(".")
        fields[tier][name] = number
    u.end()
    memory, disk = TierStats(Tier.L2, **fields["memory"]), TierStats(Tier.L4, **fields["disk"])
    return PoolNodeStats(memory, disk, **fields[""])


def _pack_put(p: Packer, put: BlockSpec) -> None:
    ranges, owner, outlook = put.ranges, put.owner, put.outlook
    names = owner.model.encode(), owner.tenant.encode(), owner.session.encode()
    sizes = (ranges.size_bytes, ranges.count, put.tokens, *map(len, names))
    expected_in_s = _NOT_KNOWN if outlook.expected_in_s is None else outlook.expected_in_s
    future = (outlook.depth, outlook.tail, outlook.expectation, expected_in_s)
    p.raw(_PUT.pack(put.key, put.parent, *sizes, *future)).raw(b"".join(names))


def _unpack_put(u: Unpacker, before: BlockSpec | None = None) -> BlockSpec:
    """Read a reservation; values of a batch share what they have in common with ``before``."""
    fields = _PUT.unpack(u.raw(_PUT.size))
    key, parent, size, count, tokens, model, tenant, session, depth, tail, future, due = fields
    if future >= len(_EXPECTATIONS):
        raise RemoteProtocolError(f"an expectation numbered {future}")
    expectation, expected_in_s = _EXPECTATIONS[future], None if due == _NOT_KNOWN else due
    ranges = shared_ranges(size, count)
    owner = _unpack_owner(u.raw(model + tenant + session), model, tenant)
    outlook = before.outlook if before is not None else NO_OUTLOOK
    alike = (depth, tail, expectation, expected_in_s) == (
        outlook.depth,
        outlook.tail,
        outlook.expectation,
        outlook.expected_in_s,
    )
    if not alike:
        outlook = Outlook(expectation, expected_in_s, depth, bool(tail))
    put = BlockSpec(BlockKey(key), BlockKey(parent), tokens, ranges, owner, outlook)
    checked = (
        before is not None
        and alike
        and before.ranges is ranges
        and before.owner is owner
        and before.tokens == tokens
        and key != parent
    )
    if not checked:
        check_put(put)
    return put


@lru_cache(maxsize=4_096)
def _unpack_owner(names: bytes, model: int, tenant: int) -> Owner:
    """Split names by their lengths; cached, so slots of the same owner share the value."""
    parts = names[:model], names[model : model + tenant], names[model + tenant :]
    try:
        return shared_owner(*(part.decode() for part in parts))
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("a name is not UTF-8") from error


def check_put(put: BlockSpec) -> None:
    """Check the numbers and names of a reservation from any transport.

    Raises:
        RemoteProtocolError: a size or name is out of bounds.
    """
    if put.key == put.parent:
        raise RemoteProtocolError("a block can't be its own parent")
    ranges, owner, outlook = put.ranges, put.owner, put.outlook
    if not 1 <= ranges.count <= limits.MAX_LAYERS:
        raise RemoteProtocolError(f"a block of {ranges.count} ranges; 1 to {limits.MAX_LAYERS}")
    if not 1 <= ranges.size_bytes * ranges.count <= limits.MAX_SLOT_BYTES:
        raise RemoteProtocolError(f"a block of {ranges.size_bytes} x {ranges.count} bytes")
    if not 0 <= put.tokens <= limits.MAX_CONTEXT_TOKENS:
        raise RemoteProtocolError(f"a block of {put.tokens} tokens")
    if not 0 <= outlook.depth <= limits.MAX_CONTEXT_TOKENS:
        raise RemoteProtocolError(f"a block behind {outlook.depth} others")
    if outlook.expected_in_s is not None and not 0.0 <= outlook.expected_in_s < MAX_NUMBER:
        raise RemoteProtocolError(f"a use expected in {outlook.expected_in_s} s makes no sense")
    for name in (owner.model, owner.tenant, owner.session):
        if name and not _NAME.fullmatch(name):
            raise RemoteProtocolError(f"{name[:40]!r} is not a name")
