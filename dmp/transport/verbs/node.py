"""A DMP node reached over one-sided RDMA (tier L3): bytes by READ and WRITE, control over TCP.

Implements tierkv.dmp.pool_node.PoolNode. The node's processor takes no part in a transfer; a reader
checks header and checksum after the bytes have arrived. If no rail works, a call uses TCP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import xxhash

from tierkv.dmp.pool_node import PathInfo, PoolNodeStats, PutGrant, RangeRead, RangeWrite
from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.segment import STAMP_BYTES, parse_stamp
from tierkv.dmp.segment.segment_place import PAGE
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.pending import as_bytes
from tierkv.dmp.transport.remote_slots import RangeSpan, ReadLog, check_stamp, range_span, ranges_in
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.dmp.transport.verbs.device import Op
from tierkv.dmp.transport.verbs.fabric import Fabric, address_of, local_fabric
from tierkv.dmp.transport.verbs.lane import (
    LanePool,
    MemorySpan,
    VerbsLane,
    VerbsSettings,
    copy_in,
    copy_out,
)
from tierkv.dmp.transport.verbs.rail_board import NoRailError, RailBoard
from tierkv.dmp.transport.verbs.rails import Piece
from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.zone_traffic import received, sent
from tierkv.kvcore.block import BlockSpec, Location, RangeShape
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import ChecksumError, StaleEpochError, TransportError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation

T = TypeVar("T")
_BATCH: Final = 512
"""Ranges per batch; a batch is verified as a whole after its bytes have arrived."""

_STAMPS_AT: Final = 8 * _BATCH
_STAMP_STEP: Final = -(-STAMP_BYTES // 8) * 8
_INCARNATION_AT: Final = _STAMPS_AT + _STAMP_STEP * _BATCH
_WORDS: Final = -(-(_INCARNATION_AT + 8) // PAGE) * PAGE
"""Bytes at the start of a bounce buffer for checksums, headers and the node's incarnation."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A range of a block, and the destination memory.

    Attributes:
        location: slot of the block.
        index: number of the range.
        local: address of the memory.
        size: number of bytes of the range.
        view: the same memory, if the processor can reach it; otherwise the memory must be
            registered.
    """

    location: Location
    index: int
    local: int
    size: int
    view: memoryview | None = None


class VerbsPoolNode(TcpPoolNode):
    """PoolNode over RDMA.

    A read has two steps: first payload and checksums, then the slots' headers and the node's
    incarnation. A header read after the bytes proves that the bytes belong to the block: a slot's
    generation grows before any writer may write to the slot again. A late write into the slot of
    another block is found by the other block's readers, because the stored checksums come from the
    block's writer.

    Attributes:
        board: the RDMA ports of both sides, as far as known.
    """

    def __init__(
        self,
        peer: Peer,
        fabric: Fabric,
        *,
        host: HostId,
        settings: VerbsSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(peer, host=host, clock=clock)
        self._fabric = fabric
        self.board = RailBoard(fabric, self.peer, self._clock)
        self._lanes = LanePool(self.board, settings or VerbsSettings(), _WORDS)
        self._log = ReadLog()

    @property
    def path(self) -> PathInfo:
        reason = self.board.why_tcp()
        return PathInfo("tcp", reason) if reason else PathInfo("rdma", self.board.describe())

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        self._report_reads()
        return super().promote(keys)

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        self._report_reads()  # The reservation may evict blocks.
        return super().reserve(puts, deadline_s=deadline_s)

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        self.pending.check(writes)
        try:
            for part in _parts(writes):
                with self._lanes.one() as lane:
                    self._write(lane, part)
                self.pending.written(part)
                sent(self.other_zone, sum(write.data.nbytes for write in part))
        except NoRailError as error:
            self.board.note_path(error.message)
            super().write_ranges(writes)
        else:
            self.board.note_path()

    def _write(self, lane: VerbsLane, writes: Sequence[RangeWrite]) -> None:
        incarnation = _common_life([write.grant.location for write in writes])
        shape = lane.link(incarnation).accept.geometry
        spans = []
        for write in writes:
            grant = write.grant
            span = range_span(
                shape,
                self.mine(grant.location),
                grant.block.ranges,
                write.index,
            )
            spans.append(_host_span(as_bytes(write.data), span.payload_at))
        for wave in lane.waves(spans):
            copy_in(wave)
            lane.move(Op.WRITE, wave.jobs, incarnation, self._clock)

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        try:
            for part in _parts(reads):
                with self._lanes.one() as lane:
                    self._read(lane, part)
                self._note(
                    [read.location for read in part], sum(r.destination.nbytes for r in part)
                )
        except NoRailError as error:
            self.board.note_path(error.message)
            super().read_ranges(reads)
        else:
            self.board.note_path()

    def _read(self, lane: VerbsLane, reads: Sequence[RangeRead]) -> None:
        views = [as_bytes(read.destination) for read in reads]
        targets = [
            Landing(read.location, read.index, address_of(view), len(view), view)
            for read, view in zip(reads, views, strict=True)
        ]
        sums = self._land(lane, targets)
        bad = [
            RangeRef(read.location, read.index)
            for read, view, checksum in zip(reads, views, sums, strict=True)
            if xxhash.xxh3_64_intdigest(view) != checksum
        ]
        if bad:
            self.suspect(bad)
            raise ChecksumError(f"{len(bad)} ranges from {self.node_id} have wrong checksums")

    def land(self, targets: Sequence[Landing]) -> list[int]:
        """Read ranges into registered memory outside the processor's reach, for example a GPU's.

        Headers are checked as by ``read_ranges``. Checksums can't be checked without the bytes.

        Returns:
            the expected xxh3_64 of each range, for the caller to verify at the destination.

        Raises:
            CacheError: as ``read_ranges``; NoRailError if no rail works, because TCP cannot replace
                RDMA here.
        """
        sums: list[int] = []
        for part in _parts(targets):
            with self._lanes.one() as lane:
                sums += self._land(lane, part)
            self._note([t.location for t in part], sum(t.size for t in part))
        return sums

    def _land(self, lane: VerbsLane, targets: Sequence[Landing]) -> list[int]:
        incarnation = _common_life([self.mine(t.location) for t in targets])
        shape = lane.link(incarnation).accept.geometry
        spans = [_span_of(shape, target) for target in targets]
        base = lane.bounce.memory.start
        sums = [Piece(base + 8 * i, span.checksum_at, 8) for i, span in enumerate(spans)]
        waves = lane.waves(
            [
                MemorySpan(target.local, target.size, span.payload_at, target.view)
                for target, span in zip(targets, spans, strict=True)
            ]
        )
        waves[0].jobs += lane.own_jobs(sums)
        for wave in waves:
            lane.move(Op.READ, wave.jobs, incarnation, self._clock)
            copy_out(wave)
        self._read_headers(lane, targets, spans, incarnation)
        words = lane.bounce.view
        return [int.from_bytes(words[8 * i : 8 * i + 8], "little") for i in range(len(targets))]

    def _read_headers(
        self,
        lane: VerbsLane,
        targets: Sequence[Landing],
        spans: Sequence[RangeSpan],
        incarnation: Incarnation,
    ) -> None:
        """Read the slots' headers, after the bytes, and check that the bytes are the blocks'."""
        headers = list(dict.fromkeys(span.header_at for span in spans))
        steps = {at: _STAMPS_AT + _STAMP_STEP * i for i, at in enumerate(headers)}
        base = lane.bounce.memory.start
        pieces = [Piece(base + step, at, STAMP_BYTES) for at, step in steps.items()]
        pieces.append(Piece(base + _INCARNATION_AT, g.INCARNATION_AT, 8))
        lane.move(Op.READ, lane.own_jobs(pieces), incarnation, self._clock)
        words = lane.bounce.view
        now = int.from_bytes(words[_INCARNATION_AT : _INCARNATION_AT + 8], "little")
        if now != incarnation:
            raise StaleEpochError(f"{self.node_id} is in incarnation {now}, not {incarnation}")
        for target, span in zip(targets, spans, strict=True):
            stamp = parse_stamp(words, steps[span.header_at])
            check_stamp(target.location, stamp, range_bytes=target.size)

    def register(self, memory: memoryview) -> None:
        # A hint: memory that can't be registered goes through bounce buffers.
        with contextlib.suppress(TransportError):
            self._fabric.register(memory)

    def stats(self) -> PoolNodeStats:
        self._report_reads()
        return super().stats()

    def close(self) -> None:
        self._lanes.close()
        super().close()

    def _note(self, locations: Sequence[Location], size: int) -> None:
        received(self.other_zone, size)
        if self._log.note(locations, size):
            with contextlib.suppress(TransportError):  # The read itself succeeded.
                self._report_reads()

    def _report_reads(self) -> None:
        reads = self._log.take()
        if reads.locations:
            self.touch(reads.locations, read_bytes=reads.read_bytes)


def open_verbs_node(
    peer: Peer,
    *,
    host: HostId,
    devices: Sequence[str] = (),
    settings: VerbsSettings | None = None,
) -> VerbsPoolNode | str:
    """Return a PoolNode over RDMA, or why RDMA is impossible; asks the node.

    A silent node does not count as a refusal: the PoolNode asks the node again later.

    Args:
        peer: the node's TCP side.
        host: host of the node.
        devices: our devices to use; empty means all.
        settings: sizes and depths.
    """
    fabric = local_fabric(tuple(devices))
    if isinstance(fabric, str):
        return fabric
    node = VerbsPoolNode(peer, fabric, host=host, settings=settings)
    reason = node.board.ask()
    if not node.board.is_refused:
        return node
    node.close()
    return reason


def _host_span(view: memoryview, at: int) -> MemorySpan:
    return MemorySpan(address_of(view), len(view), at, view)


def _span_of(shape: g.Geometry, target: Landing) -> RangeSpan:
    size = target.size
    count = ranges_in(shape, target.location, size)
    return range_span(shape, target.location, RangeShape(size, count), target.index)


def _common_life(locations: Sequence[Location]) -> Incarnation:
    """Return the common incarnation of references; an older one is stale: StaleEpochError."""
    youngest = max(location.incarnation for location in locations)
    for location in locations:
        if location.incarnation != youngest:
            raise StaleEpochError(f"slot {location.slot}: a reference of an older incarnation")
    return youngest


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
