"""Leases: what is granted, moved, ended and forgotten, and who must be told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierkv.kvcore import limits
from tierkv.kvcore.block_event import NO_LEASE, HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.metaserver.directory.leases import NO_CHANGE, Asked, Leases

A, B = NodeId("a"), NodeId("b")
KEYS = [BlockKey(bytes([n]) * 16) for n in range(4)]
CHAIN = b"".join(KEYS)


@pytest.fixture
def leases() -> Iterator[Leases]:
    table = Leases(first_lease=7, max_leases=3, max_kept_keys=16)
    yield table
    table.check_invariants()


def test_a_grant_tells_each_holder_which_keys_to_keep(leases: Leases) -> None:
    change = leases.grant(CHAIN, {A: CHAIN, B: KEYS[1]}, 5.0, 100.0)
    assert change.lease == 7
    assert change.orders == (Asked(A, LeaseId(7), CHAIN, 5.0), Asked(B, LeaseId(7), KEYS[1], 5.0))
    assert change.orders[1].order() == HoldOrder(LeaseId(7), (KEYS[1],), 5.0)
    assert leases.orders_of(A, 102.0) == (Asked(A, LeaseId(7), CHAIN, 3.0),)
    assert leases.chains() == (CHAIN,)


def test_ending_lets_go_once_and_answers_what_was_located(leases: Leases) -> None:
    lease = leases.grant(CHAIN, {A: CHAIN}, 5.0, 0.0).lease
    ended = leases.end(lease, used=True)
    assert (ended.lease, ended.chain) == (lease, CHAIN)
    assert ended.orders == (Asked(A, lease, b"", 0.0),)
    assert leases.end(lease, used=True) == NO_CHANGE
    assert leases.extend(lease, 1.0, 0.0) == NO_CHANGE
    assert (len(leases), leases.kept_keys) == (0, 0)
    assert (leases.counts.committed, leases.counts.unknown) == (1, 2)


def test_an_extended_lease_outlives_its_first_deadline(leases: Leases) -> None:
    first = leases.grant(CHAIN, {A: CHAIN}, 1.0, 0.0).lease
    second = leases.grant(KEYS[0], {A: KEYS[0]}, 1.0, 0.0).lease
    assert leases.extend(first, 2.0, 0.5).orders == (Asked(A, first, b"", 2.0),)
    leases.expire(1.0)
    assert [asked.lease for asked in leases.orders_of(A, 1.0)] == [first]
    assert leases.end(second, used=False) == NO_CHANGE
    leases.expire(2.5)
    assert (len(leases), leases.counts.expired) == (0, 2)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), limits.MAX_LEASE_S + 1])
def test_a_time_that_can_not_be_is_refused_and_counted(leases: Leases, ttl_s: float) -> None:
    assert leases.grant(CHAIN, {A: CHAIN}, ttl_s, 0.0) == NO_CHANGE
    lease = leases.grant(CHAIN, {A: CHAIN}, 5.0, 0.0).lease
    assert leases.extend(lease, ttl_s, 0.0) == NO_CHANGE
    assert leases.orders_of(A, 0.0)[0].ttl_s == 5.0
    assert leases.counts.refused_ttl == 2


def test_a_full_table_reserves_nothing_until_there_is_room(leases: Leases) -> None:
    given = [leases.grant(KEYS[0], {A: KEYS[0]}, 1.0, 0.0).lease for _ in range(4)]
    assert given[3] == NO_LEASE and NO_LEASE not in given[:3]
    leases.end(given[0], used=False)
    assert leases.grant(CHAIN * 2, {A: CHAIN, B: CHAIN}, 1.0, 0.0) == NO_CHANGE  # too many keys
    assert leases.grant(CHAIN, {A: CHAIN, B: KEYS[0]}, 1.0, 0.0) != NO_CHANGE
    assert leases.counts.refused_full == 2


def test_a_node_that_is_gone_is_asked_nothing_more(leases: Leases) -> None:
    lease = leases.grant(CHAIN, {A: CHAIN, B: KEYS[0]}, 1.0, 0.0).lease
    leases.drop_node(A)
    leases.check_invariants()
    assert leases.orders_of(A, 0.0) == ()
    assert [asked.node_id for asked in leases.end(lease, used=False).orders] == [B]


def test_many_extensions_leave_no_queue_behind(leases: Leases) -> None:
    lease = leases.grant(KEYS[0], {A: KEYS[0]}, 1.0, 0.0).lease
    for step in range(500):
        leases.extend(lease, 1.0, step / 10)
    assert leases.queued_deadlines <= 70
    leases.expire(50.8)
    assert len(leases) == 1
    leases.expire(50.9)
    assert len(leases) == 0
