"""Values that a Pool's caller writes range by range: opened, written, then sealed or aborted.

Called by dmp/client/pool.py. An open put has a slot and is invisible to readers. A put ends by
``seal``, ``abort``, the pool's ``close`` or its deadline. After a failure or loss of the node the
result is False.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tierkv.dmp.client.node_link import Act, NodeLink
from tierkv.dmp.client.values import Value, to_bytes_view
from tierkv.dmp.pool_node import PutGrant, RangeWrite
from tierkv.kvcore.block import BlockSpec, Location
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.ids import BlockKey

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True, eq=False)
class OpenPut:
    """A reserved slot, written range by range by any threads.

    Attributes:
        grant: the slot, and the value's key and ranges.
        link: the node of the slot.
        deadline_s: time at which the node takes the slot back.
    """

    grant: PutGrant
    link: NodeLink
    deadline_s: float
    _owner: OpenPuts = field(repr=False)

    @property
    def key(self) -> BlockKey:
        """Key of the value."""
        return self.grant.block.key

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole value."""
        return self.grant.block.ranges.payload_bytes

    def write(self, index: int, data: Value) -> bool:
        """Write one range; False if the slot is gone, and then the value can't be sealed either.

        Raises:
            ValueError: the range does not exist or the data has another length.
        """
        return self._owner.write([(self, index, data)])[0]


Write = tuple[OpenPut, int, Value]
"""One range of an open put and its bytes."""


class OpenPuts:
    """The open puts of one Pool; thread-safe."""

    def __init__(self, offer: Callable[[Sequence[BlockKey], Act], None], clock: Clock) -> None:
        self._offer = offer
        self._clock = clock
        self._lock = threading.Lock()
        self._open: set[OpenPut] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self, puts: Sequence[BlockSpec], *, deadline_s: float
    ) -> dict[BlockKey, OpenPut | None]:
        """Reserve slots for values with distinct keys.

        Returns:
            An entry per value that a node answered for: the open put, or None if the value exists
            already. A value that no node accepts has no entry.
        """
        by_key = {put.key: put for put in puts}
        answer: dict[BlockKey, OpenPut | None] = {}
        deadline = self._clock.now() + deadline_s

        def reserve(link: NodeLink, keys: list[BlockKey]) -> set[BlockKey]:
            grants = link.reserve([by_key[key] for key in keys], deadline_s=deadline_s)
            taken = {g.block.key: OpenPut(g, link, deadline, self) for g in grants if g is not None}
            there = link.describe([key for key in keys if key not in taken])
            answer.update(taken)
            answer.update(dict.fromkeys(there))
            return taken.keys() | there.keys()

        self._offer(list(by_key), reserve)
        with self._lock:
            self._open |= {put for put in answer.values() if put is not None}
        return answer

    def write(self, writes: Sequence[Write]) -> list[bool]:
        """Write ranges, in one batch per node; return which ranges are written.

        Raises:
            ValueError: a range does not exist or the data has another length; nothing is written.
        """
        ready = [_to_range_write(*write) for write in writes]
        with self._lock:
            mine = [i for i, (put, *_) in enumerate(writes) if put in self._open]
        done: set[int] = set()
        for link, group in _by(lambda i: writes[i][0].link, mine).items():
            if _write_on(link, [ready[i] for i in group]):
                done.update(group)
                continue
            # One expired put must not fail the others.
            for alone in _by(lambda i: writes[i][0], group).values():
                if len(alone) < len(group) and _write_on(link, [ready[i] for i in alone]):
                    done.update(alone)
        return [i in done for i in range(len(writes))]

    def seal(self, puts: Sequence[OpenPut]) -> list[bool]:
        """Make values readable, in one batch per node; return which values are.

        A put with unwritten ranges is aborted; a put that has ended already is ignored.
        """
        sealed: set[OpenPut] = set()
        for link, group in _by(lambda put: put.link, self._take(puts)).items():
            for put, place in zip(group, _seal_on(link, group), strict=True):
                if place is not None:
                    sealed.add(put)
        return [put in sealed for put in puts]

    def abort(self, puts: Iterable[OpenPut]) -> None:
        """Free the slots of puts; puts that have ended already are ignored."""
        for link, group in _by(lambda put: put.link, self._take(puts)).items():
            if link.up:  # A node that is down frees the slots at the deadline.
                with link.absorb():
                    link.opened.abort([put.grant for put in group])

    def expire(self) -> None:
        """Forget puts whose deadline has passed; their nodes have taken the slots back."""
        now = self._clock.now()
        with self._lock:
            self._open = {put for put in self._open if put.deadline_s > now}

    def close(self) -> None:
        """Abort all open puts."""
        self.abort(list(self._open))

    def _take(self, puts: Iterable[OpenPut]) -> list[OpenPut]:
        """Take the open ones of ``puts`` out of the table and return them; each put ends once."""
        with self._lock:
            taken = [put for put in dict.fromkeys(puts) if put in self._open]
            self._open.difference_update(taken)
        return taken


def _to_range_write(put: OpenPut, index: int, data: Value) -> RangeWrite:
    view, ranges = to_bytes_view(data), put.grant.block.ranges
    if not 0 <= index < ranges.count or view.nbytes != ranges.size_bytes:
        raise ValueError(
            f"range {index} of {view.nbytes} bytes; the value has {ranges.count} ranges of "
            f"{ranges.size_bytes}"
        )
    return RangeWrite(put.grant, index, view)


def _write_on(link: NodeLink, writes: Sequence[RangeWrite]) -> bool:
    done = False
    if link.up:
        with link.absorb():
            link.opened.write_ranges(writes)
            done = True
    return done


def _seal_on(link: NodeLink, puts: Sequence[OpenPut]) -> list[Location | None]:
    places: list[Location | None] = [None] * len(puts)
    if link.up:
        with link.absorb():
            places = link.opened.seal([put.grant for put in puts])
    return places


def _by(name: Callable[[T], K], items: Iterable[T]) -> dict[K, list[T]]:
    """Group items by name, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return groups
