"""What a writer remembers of its grants: checksums of the ranges written so far, and the deadline.

Shared by the three transports. Checksums come from the writer's own bytes, not from the slot, so
that a late writer of an older grant can't have its bytes sealed as somebody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from dmp.messages import Sealing
from dmp.pool_node import PutGrant
from kvcore.clock import Clock
from kvcore.errors import BlockNotFoundError, LeaseExpiredError


@dataclass(slots=True)
class _Pending:
    deadline: float
    checksums: dict[int, int] = field(default_factory=dict)


class PendingPuts:
    """Grants between reserve and seal; thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[object, _Pending] = {}

    def opened(self, grants: Sequence[PutGrant | None], *, deadline: float) -> None:
        """Remember new grants; forget those whose deadline passed unsealed."""
        now = self._clock.now()
        with self._lock:
            for place in [p for p, pending in self._pending.items() if pending.deadline <= now]:
                del self._pending[place]
            for grant in grants:
                if grant is not None:
                    self._pending[grant.location] = _Pending(deadline)

    def check(self, grant: PutGrant, index: int, data: memoryview) -> None:
        """Refuse a range that may not be written.

        Raises:
            LeaseExpiredError: the grant is unknown or too old.
            BlockNotFoundError: no such range, or not of that size.
        """
        with self._lock:
            pending = self._pending.get(grant.location)
        if pending is None or pending.deadline <= self._clock.now():
            raise LeaseExpiredError(f"the grant for slot {grant.location.slot} expired")
        if not 0 <= index < grant.range_count or data.nbytes != grant.range_bytes:
            raise BlockNotFoundError(
                f"range {index} of {data.nbytes} bytes does not fit a grant of "
                f"{grant.range_count} x {grant.range_bytes}"
            )

    def written(self, grant: PutGrant, index: int, data: memoryview) -> None:
        """Remember the checksum of a range that was written."""
        checksum = xxhash.xxh3_64_intdigest(data)
        with self._lock:
            pending = self._pending.get(grant.location)
            if pending is not None:
                pending.checksums[index] = checksum

    def closed(self, grants: Sequence[PutGrant]) -> list[Sealing | None]:
        """Forget grants; answer what to seal, None for those not wholly written."""
        answer: list[Sealing | None] = []
        with self._lock:
            for grant in grants:
                pending = self._pending.pop(grant.location, None)
                if pending is None or len(pending.checksums) != grant.range_count:
                    answer.append(None)
                    continue
                sums = tuple(pending.checksums[i] for i in range(grant.range_count))
                answer.append(Sealing(grant.location, sums))
        return answer
