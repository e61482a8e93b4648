"""Packed block events as columns, and the refusal of invalid events.

Used by metaserver/directory/directory.py. Nothing here changes the directory. The functions select
the records allowed to a node, and the last of several records about a block and tier.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvwire.event_records import NOWHERE, OWN, RECORD_BYTES, REMOVED, STORED, EventRecords
from tierkv.metaserver.directory.arrays import Bools, Ints
from tierkv.metaserver.directory.block_table import NO_BLOCK, SpecColumns
from tierkv.metaserver.directory.copy_table import L1, L2, L4, Places

RECORD: Final = np.dtype(
    [
        ("low", "<u8"),
        ("high", "<u8"),
        ("parents", "<u8", 2),
        ("slot", "<u8"),
        ("generation", "<u8"),
        ("length", "<u8"),
        ("segment", "<u4"),
        ("tokens", "<u4"),
        ("session", "<u4"),
        ("model", "<u2"),
        ("tenant", "<u2"),
        ("kind", "u1"),
        ("tier", "u1"),
        ("where", "u1"),
        ("zero", "u1", 5),
    ]
)
"""kvwire/event_records.py as columns."""

Records = NDArray[Any]
_MOST_SLOTS: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class NameNumbers:
    """The directory's numbers of a batch's names: entry i belongs to the batch's name i."""

    models: NDArray[np.uint32]
    tenants: NDArray[np.uint32]
    sessions: NDArray[np.uint32]


def records_of(batch: EventRecords) -> Records:
    """View a batch's records; raise RemoteProtocolError when records are cut or too many."""
    size = len(batch.records)
    if size % RECORD_BYTES or size > limits.MAX_EVENTS_PER_BATCH * RECORD_BYTES:
        raise RemoteProtocolError(
            f"batch.records has {size} bytes; it must be at most {limits.MAX_EVENTS_PER_BATCH} "
            f"events of {RECORD_BYTES}"
        )
    return np.frombuffer(batch.records, RECORD)


def acceptable(
    records: Records, batch: EventRecords, *, computes: bool, pools: bool
) -> tuple[Records, Counter[str]]:
    """Separate acceptable from refused records.

    Args:
        records: records of ``batch``.
        batch: its name tables bound the numbers of names.
        computes: the node has an L1.
        pools: the node is a DMP node, which may hold blocks at rest.

    Returns:
        The records to apply, and the number of refused records by reason: ``kind`` and ``tier``
            (unknown), ``name`` (a number without a name), ``key`` (never occurs), ``owner`` (a copy
            that a node of this role cannot have, or a location on another node), ``size`` (0 or
            more than a slot), ``slot`` (a number outside every segment).
    """
    refused: Counter[str] = Counter()
    good = np.ones(len(records), bool)
    stored = records["kind"] == STORED
    tier = records["tier"]

    def refuse(wrong: Bools, reason: str) -> None:
        wrong = wrong & good
        if wrong.any():
            refused[reason] += int(np.count_nonzero(wrong))
            np.logical_and(good, ~wrong, out=good)

    refuse(~stored & (records["kind"] != REMOVED), "kind")
    refuse((tier != L1) & (tier != L2) & (tier != L4), "tier")
    refuse((records["low"] == NO_BLOCK) & (records["high"] == NO_BLOCK), "key")
    names = records["model"] >= len(batch.models)
    names |= records["tenant"] >= len(batch.tenants)
    names |= records["session"] >= len(batch.sessions)
    refuse(names, "name")  # Checked for removals too: their numbers are looked up with all others.
    placed = stored & (tier != L1)
    resting = placed & (tier == L4) & (records["where"] == NOWHERE)
    if not computes:
        refuse(stored & (tier == L1), "owner")
    if not pools:
        refuse(resting, "owner")
    placed &= ~resting
    refuse(placed & (records["where"] != OWN), "owner")
    length = records["length"]
    refuse(placed & ((length == 0) | (length > limits.MAX_SLOT_BYTES)), "size")
    refuse(placed & (records["slot"] >= _MOST_SLOTS), "slot")
    return (records if good.all() else records[good]), refused


def group_keys(records: Records) -> tuple[Ints, Ints]:
    """Group records by key.

    Returns:
        A record number per key, and for each record the index of its key in this list.
    """
    low, high = records["low"], records["high"]
    ordered = np.sort(low)
    if not (ordered[1:] == ordered[:-1]).any():
        each = np.arange(len(records))
        return each, each
    order = np.lexsort((high, low))
    low, high = low[order], high[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    groups = np.empty(len(order), np.int64)
    groups[order] = np.cumsum(begins) - 1
    return order[begins], groups


def last_of(chosen: Ints, groups: Ints) -> Ints:
    """Return the last record of each group, from ``chosen`` record numbers in order."""
    backwards = chosen[::-1]
    return backwards[np.unique(groups[backwards], return_index=True)[1]]


def specs_of(records: Records, names: NameNumbers) -> SpecColumns:
    """Read the specs of blocks from records."""
    return SpecColumns(
        low=records["low"].copy(),
        high=records["high"].copy(),
        parents=records["parents"],
        tokens=records["tokens"],
        models=names.models[records["model"]],
        tenants=names.tenants[records["tenant"]],
        sessions=names.sessions[records["session"]],
    )


def places_of(records: Records) -> Places:
    """Read the locations of copies; copies in L1 or at rest have no location."""
    nowhere = (records["tier"] == L1) | (records["where"] != OWN)
    some = ~nowhere
    return Places(
        generations=records["generation"] * some,
        slots=(records["slot"] * some).astype(np.uint32),
        lengths=(records["length"] * some).astype(np.uint32),
        segments=records["segment"] * some,
    )
