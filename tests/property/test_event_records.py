"""Packed block events: what a node packs is what the meta server reads in columns."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.kvcore import limits
from tierkv.kvcore.block import NO_OUTLOOK, NO_RANGES, BlockSpec, Location, Owner, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, EventBatch
from tierkv.kvcore.ids import BlockKey, Incarnation, NodeId
from tierkv.kvwire.event_records import (
    NOWHERE,
    OWN,
    RECORD_BYTES,
    REMOVED,
    TIER_CODES,
    EventRecords,
    pack_events,
)
from tierkv.metaserver.directory.event_columns import RECORD, records_of

NODE, LIFE = NodeId("dmp-0"), Incarnation(7)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=16, max_size=16).map(BlockKey)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
LOCATIONS = st.builds(Location, st.just(NODE), st.just(LIFE), U32, U64, U64, U64)
STORED = st.builds(
    BlockStored,
    st.builds(
        BlockSpec,
        KEYS,
        KEYS,
        U32,
        ranges=st.just(NO_RANGES),
        owner=st.builds(Owner, TEXTS, TEXTS, TEXTS),
        outlook=st.just(NO_OUTLOOK),
    ),
    tier=st.sampled_from(Tier),
    location=st.none() | LOCATIONS,
)
EVENTS = st.lists(st.builds(BlockRemoved, KEYS, st.sampled_from(Tier)) | STORED, max_size=6)
TIERS = {code: tier for tier, code in TIER_CODES.items()}


def half(number: Any) -> bytes:
    return int(number).to_bytes(8, "little")


def event(record: Any, batch: EventRecords) -> BlockEvent:
    """Read one record as the layout says."""
    key = BlockKey(half(record["low"]) + half(record["high"]))
    tier = TIERS[int(record["tier"])]
    if record["kind"] == REMOVED:
        assert record["where"] == NOWHERE and not record["parents"].any()
        return BlockRemoved(key, tier)
    where = [int(record[name]) for name in ("segment", "slot", "generation", "length")]
    return BlockStored(
        BlockSpec(
            key,
            BlockKey(b"".join(map(half, record["parents"]))),
            int(record["tokens"]),
            owner=Owner(
                batch.models[record["model"]],
                batch.tenants[record["tenant"]],
                batch.sessions[record["session"]],
            ),
        ),
        tier,
        Location(NODE, LIFE, *where) if record["where"] == OWN else None,
    )


@given(EVENTS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_is_packed_is_read(events: list[BlockEvent]) -> None:
    batch = pack_events(EventBatch(NODE, LIFE, 3, tuple(events), inventory=True, more=True, part=9))
    assert len(batch.records) == RECORD_BYTES * len(events) and RECORD.itemsize == RECORD_BYTES
    assert [event(record, batch) for record in records_of(batch)] == events
    assert (batch.seq, batch.inventory, batch.more, batch.part) == (3, True, True, 9)


def test_a_name_that_is_too_long_is_cut_and_not_refused_for_ever() -> None:
    key = BlockKey(bytes(16))
    long = BlockStored(BlockSpec(key, key, 4, owner=Owner(session="s" * 500)), Tier.L1)
    batch = pack_events(EventBatch(NODE, LIFE, 1, (long,)))
    assert batch.sessions == ("", "s" * limits.MAX_NAME_CHARS)
