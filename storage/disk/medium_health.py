"""Whether a disk accepts writes, and when to try again after a failure.

A pure state: the segment store reports failures and asks before each put. Reads are never refused.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

RETRY_S: Final = 30.0
"""Seconds for which puts are refused after the disk was full or read-only."""

FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PASSING_ERRNOS: Final = FULL_ERRNOS | {errno.EROFS}


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
