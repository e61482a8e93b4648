"""Counters of a segment store; read by tier L4, the admin views and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentStoreStats:
    """Counters of a segment store; cumulative, but for the first four and the last two.

    Attributes:
        capacity_bytes: size of the disk tier.
        used_bytes: bytes of records, dead records included.
        live_bytes: bytes of readable records.
        blocks: readable blocks.
        puts: blocks stored.
        gets: reads answered.
        read_bytes: payload read.
        write_bytes: payload written by puts.
        evicted_blocks: blocks dropped by garbage collection.
        copied_bytes: payload written again by garbage collection.
        checksum_errors: reads with bad bytes.
        io_errors: failed reads and writes.
        degraded: why puts are refused now; empty if accepted.
        direct_io: whether I/O bypasses the page cache.
    """

    capacity_bytes: int
    used_bytes: int
    live_bytes: int
    blocks: int
    puts: int
    gets: int
    read_bytes: int
    write_bytes: int
    evicted_blocks: int
    copied_bytes: int
    checksum_errors: int
    io_errors: int
    degraded: str
    direct_io: bool
