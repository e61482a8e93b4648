"""A writer's open grants: checksums of the ranges written so far, and the deadline.

Shared by all transports. Checksums are computed from the writer's own bytes, not from the slot. So
a late writer of an older grant cannot get foreign bytes into a sealed block unnoticed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from tierkv.dmp.pool_node import PutGrant, RangeWrite
from tierkv.dmp.wire.messages import Sealing
from tierkv.kvcore.block import BlockSpec, Location
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
        """Add new grants; forget unsealed grants whose deadline has passed."""
        now = self._clock.now()
        with self._lock:
            for place in [p for p, pending in self._pending.items() if pending.deadline <= now]:
                del self._pending[place]
            for grant in grants:
                if grant is not None:
                    self._pending[grant.location] = _Pending(deadline)

    def check(self, writes: Sequence[RangeWrite]) -> None:
        """Check that ranges may be written.

        Raises:
            LeaseExpiredError: a grant is unknown or too old.
            BlockNotFoundError: the range does not exist or has another size.
        """
        now = self._clock.now()
        with self._lock:
            for write in writes:
                _check(write, self._pending.get(write.grant.location), now)

    def written(self, writes: Sequence[RangeWrite]) -> None:
        """Note the checksums of written ranges."""
        sums = [xxhash.xxh3_64_intdigest(write.data) for write in writes]
        with self._lock:
            for write, checksum in zip(writes, sums, strict=True):
                pending = self._pending.get(write.grant.location)
                if pending is not None:
                    pending.checksums[write.index] = checksum

    def closed(self, grants: Sequence[PutGrant]) -> list[Sealing | None]:
        """Remove grants; return the slots to seal, None for partly written grants."""
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
    """Return a buffer as plain bytes; most buffers need no change."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def as_grant(put: BlockSpec, location: Location | None) -> PutGrant | None:
    """Turn a node's answer into a grant."""
    if location is None:
        return None
    return PutGrant(put, location)
