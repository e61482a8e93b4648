"""A locate's replicas in columns, and a sequence that makes Replica values on demand.

Made by metaserver/directory/directory.py or from a message (metaserver/rpc/wire.py). A chain
has thousands of replicas and a reader looks at few, so replicas are built on access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from tierkv.kvcore import limits
from tierkv.kvcore.block import Location, Replica, Tier
from tierkv.kvcore.errors import LocalProtocolError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, HostId, Incarnation, NodeId
from tierkv.metaserver.directory.arrays import Ints
from tierkv.metaserver.directory.copy_table import Places


def chain_of(keys: Sequence[BlockKey]) -> bytes:
    """Concatenate a chain's keys.

    Raises:
        LocalProtocolError: the chain is longer than a locate allows, or an element is not a key.
    """
    chain = b"".join(keys)
    if len(keys) > limits.MAX_CHAIN_BLOCKS:
        raise LocalProtocolError(
            f"a locate of {len(keys)} blocks; at most {limits.MAX_CHAIN_BLOCKS} go in one call"
        )
    if len(chain) != len(keys) * BLOCK_KEY_BYTES:
        raise LocalProtocolError(f"block keys have {BLOCK_KEY_BYTES} bytes each")
    return chain


def checked_question(chains: Iterable[bytes]) -> list[bytes]:
    """Return the chains of one question.

    Raises:
        LocalProtocolError: too many chains, or too many blocks in all chains, for one question.
    """
    asked = list(chains)
    blocks = sum(map(len, asked)) // BLOCK_KEY_BYTES
    if len(asked) > limits.MAX_CHAINS_PER_QUESTION or blocks > limits.MAX_CHAIN_BLOCKS:
        raise LocalProtocolError(
            f"a locate of {len(asked)} chains, {blocks} blocks; at most "
            f"{limits.MAX_CHAINS_PER_QUESTION} and {limits.MAX_CHAIN_BLOCKS} go in one call"
        )
    return asked


@dataclass(frozen=True, slots=True)
class ReplicaHolder:
    """One node's copies in one tier."""

    node: NodeId
    host: HostId
    tier: Tier
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class ReplicaColumns:
    """Replicas of consecutive blocks in sequence.

    Attributes:
        counts: [blocks] replicas of each block, at least one.
        holder: [replicas] index into ``holders``.
        places: [replicas] locations; generation 0 in L4: at rest, without a location.
        holders: nodes and tiers.
    """

    counts: Ints
    holder: Ints
    places: Places
    holders: tuple[ReplicaHolder, ...]


class ListedReplicas(Sequence[tuple[Replica, ...]]):
    """Replicas per block, built on access. Equal to any equal sequence."""

    def __init__(self, keys: bytes, columns: ReplicaColumns) -> None:
        """Wrap columns; ``keys`` are the concatenated keys of the chain, or of a longer chain."""
        self.columns = columns
        self._keys = keys
        self._rows: _Rows | None = None

    def __len__(self) -> int:
        return len(self.columns.counts)

    @overload
    def __getitem__(self, index: int) -> tuple[Replica, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Replica, ...], ...]: ...
    def __getitem__(
        self, index: int | slice
    ) -> tuple[Replica, ...] | tuple[tuple[Replica, ...], ...]:
        if isinstance(index, slice):
            return tuple(self._build(range(len(self))[index]))
        return next(self._build([range(len(self))[index]]))

    def __iter__(self) -> Iterator[tuple[Replica, ...]]:
        return self._build(range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ListedReplicas({list(self)!r})"

    def _build(self, blocks: Sequence[int]) -> Iterator[tuple[Replica, ...]]:
        if self._rows is None:
            self._rows = _Rows(self.columns)
        rows, holders = self._rows, self.columns.holders
        for block in blocks:
            key = BlockKey(self._keys[block * BLOCK_KEY_BYTES : (block + 1) * BLOCK_KEY_BYTES])
            begin, end = rows.ends[block], rows.ends[block + 1]
            yield tuple(
                [_replica(key, holders[n], *place) for n, *place in rows.replicas[begin:end]]
            )


class _Rows:
    """Columns as Python numbers, which are faster to read row by row than arrays."""

    __slots__ = ("ends", "replicas")

    def __init__(self, columns: ReplicaColumns) -> None:
        places = columns.places
        lists = (
            column.tolist()
            for column in (
                columns.holder, places.segments, places.slots, places.generations, places.lengths
            )
        )  # fmt: skip
        self.replicas: list[tuple[int, ...]] = list(zip(*lists, strict=True))
        self.ends: list[int] = [0, *np.cumsum(columns.counts).tolist()]


def _replica(
    key: BlockKey, holder: ReplicaHolder, segment: int, slot: int, generation: int, length: int
) -> Replica:
    node, host, tier = holder.node, holder.host, holder.tier
    if generation == 0 and tier is Tier.L4:
        return Replica(key, node, host, tier)
    location = Location(node, holder.incarnation, segment, slot, generation, length)
    return Replica(key, node, host, tier, location)
