"""What a writer remembers of its grants: checksums of the ranges written so far, and the deadline.

Shared by the three transports. Checksums come from the writer's own bytes, not from the slot, so
that a late writer of an older grant can't have its bytes sealed as somebody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from tierkv.dmp.pool_node import PutGrant, RangeWrite
from tierkv.dmp.wire.messages import Sealing
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import BlockNotFoundError, LeaseExpiredError


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

    def check(self, writes: Sequence[RangeWrite]) -> None:
        """Refuse ranges that may not be written.

        Raises:
            LeaseExpiredError: a grant is unknown or too old.
            BlockNotFoundError: no such range, or not of that size.
        """
        now = self._clock.now()
        with self._lock:
            for write in writes:
                _check(write, self._pending.get(write.grant.location), now)

    def written(self, writes: Sequence[RangeWrite]) -> None:
        """Remember the checksums of ranges that were written."""
        sums = [xxhash.xxh3_64_intdigest(write.data) for write in writes]
        with self._lock:
            for write, checksum in zip(writes, sums, strict=True):
                pending = self._pending.get(write.grant.location)
                if pending is not None:
                    pending.checksums[write.index] = checksum

    def closed(self, grants: Sequence[PutGrant]) -> list[Sealing | None]:
        """Forget grants; answer what to seal, None for those not wholly written."""
        answer: list[Sealing | None] = []
        with self._lock:
            for grant in grants:
                pending = self._pending.pop(grant.location, None)
                count = grant.block.ranges.count
                if pending is None or len(pending.checksums) != count:
                    answer.append(None)
                    continue
                sums = tuple(pending.checksums[i] for i in range(count))
                answer.append(Sealing(grant.location, sums))
        return answer


def _check(write: RangeWrite, pending: _Pending | None, now: float) -> None:
    grant = write.grant
    if pending is None or pending.deadline <= now:
        raise LeaseExpiredError(f"the grant for slot {grant.location.slot} expired")
    ranges = grant.block.ranges
    if not 0 <= write.index < ranges.count or write.data.nbytes != ranges.size_bytes:
        raise BlockNotFoundError(
            f"range {write.index} of {write.data.nbytes} bytes does not fit a grant of "
            f"{ranges.count} x {ranges.size_bytes}"
        )


def as_bytes(view: memoryview) -> memoryview:
    """Return a buffer as plain bytes, which it mostly is already."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
