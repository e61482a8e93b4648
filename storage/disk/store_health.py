"""Counters of a segment store, and whether the disk accepts writes.

Pure state: the segment store reports failures and asks before each put; a failed disk is tried
again after a while. Reads are never refused. Tier L4, benchmarks and tests read the counters.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.node import TierStats

RETRY_S: Final = 30.0
"""Seconds for which puts are refused after the disk was full or read-only."""

FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PASSING_ERRNOS: Final = FULL_ERRNOS | {errno.EROFS}


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


@dataclass(slots=True)
class MediumHealth:
    """The state of a store's disk for writing.

    Attributes:
        reason: why puts are refused, in words; empty when they are not.
        full: the reason is a lack of room.
        retry_at: when the next put is let through as a trial.
    """

    reason: str = ""
    full: bool = False
    retry_at: float = 0.0

    def refuses(self, now: float) -> bool:
        """Whether to refuse a put now; one put every RETRY_S is allowed as a trial."""
        if not self.reason:
            return False
        if now >= self.retry_at:
            self.retry_at = now + RETRY_S
            return False
        return True

    def failed(self, error: OSError, now: float) -> bool:
        """Note a failed write.

        Returns:
            True if this failure made the store degraded (worth one log line).
        """
        if error.errno not in PASSING_ERRNOS:
            return False  # A bad place on disk: its file is abandoned, the other files stay in use.
        return self.degrade(error.strerror or str(error), now, full=error.errno in FULL_ERRNOS)

    def degrade(self, reason: str, now: float, *, full: bool) -> bool:
        """Refuse puts from now on; return whether that is news."""
        fresh = not self.reason
        self.reason, self.full, self.retry_at = reason, full, now + RETRY_S
        return fresh

    def worked(self) -> bool:
        """Note a write that went well; return whether the store was degraded until now."""
        was, self.reason = bool(self.reason), ""
        return was
