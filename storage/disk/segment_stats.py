"""Counters of a segment store; read by tier L4, benchmarks and tests."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.kvcore.node import TierStats


@dataclass(frozen=True, slots=True)
class SegmentStoreStats:
    """Counters of a segment store; cumulative, but for the last two.

    Attributes:
        tier: what every tier counts; bytes used are those of readable records.
        puts: blocks stored.
        gets: reads answered.
        copied_bytes: payload written again by garbage collection.
        checksum_errors: reads with bad bytes.
        io_errors: failed reads and writes.
        degraded: why puts are refused now; empty if accepted.
        direct_io: whether I/O bypasses the page cache.
    """

    tier: TierStats
    puts: int
    gets: int
    copied_bytes: int
    checksum_errors: int
    io_errors: int
    degraded: str
    direct_io: bool
