"""What a segment store counts; read by tier L4, the admin views and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentStoreStats:
    """Counters of a segment store; cumulative, but for the first four and the last two.

    Attributes:
        capacity_bytes: disk space taken.
        used_bytes: of it, bytes of records, dead ones included.
        live_bytes: of it, bytes of records that can be read.
        blocks: blocks that can be read.
        puts: blocks stored.
        gets: reads answered.
        read_bytes: payload read.
        write_bytes: payload written by puts.
        evicted_blocks: blocks dropped by garbage collection.
        copied_bytes: payload written again by garbage collection.
        checksum_errors: reads whose bytes were bad.
        io_errors: reads and writes that failed.
        degraded: why puts are refused at present; empty when they are not.
        direct_io: whether I/O goes past the page cache.
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
