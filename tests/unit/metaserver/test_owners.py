"""Owners of blocks are spread evenly, and move little when servers change."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierkv.kvcore.ids import BlockKey
from tierkv.metaserver.block_owners import BlockOwners, asked_of, joined_versions
from tierkv.metaserver.server_group import (
    FIRST_TIMEOUT_S,
    LEAST_TIMEOUT_S,
    MOST_TIMEOUT_S,
    ServerHealth,
)

ADDRESSES = [f"10.0.0.{n}:7400" for n in range(1, 6)]


def keys(count: int, salt: int = 0) -> list[BlockKey]:
    return [
        BlockKey(blake2b(f"{salt}/{n}".encode(), digest_size=16).digest()) for n in range(count)
    ]


def test_shares_are_even_and_owners_differ() -> None:
    table = BlockOwners(ADDRESSES).of(keys(20_000))
    assert (table[:, 0] != table[:, 1]).all()
    shares = np.bincount(table[:, 0], minlength=5) / 4_000
    assert shares.min() > 0.95 and shares.max() < 1.05
    both = np.bincount(table.ravel(), minlength=5) / 8_000
    assert both.min() > 0.95 and both.max() < 1.05


@given(st.permutations(range(5)), st.integers(0, 1000))
def test_the_order_of_addresses_does_not_matter(order: list[int], salt: int) -> None:
    some = keys(50, salt)
    plain = BlockOwners(ADDRESSES).of(some)
    shuffled = BlockOwners([ADDRESSES[n] for n in order]).of(some)
    assert [[order[n] for n in row] for row in shuffled.tolist()] == plain.tolist()


def test_a_server_that_goes_moves_only_its_own_blocks() -> None:
    some = keys(5_000)
    before, after = BlockOwners(ADDRESSES).of(some), BlockOwners(ADDRESSES[:-1]).of(some)
    stays = (before != 4).all(axis=1)
    assert (before[stays] == after[stays]).all()
    assert (before[~stays][:, 0] == 4).sum() > 800


def test_one_server_owns_all() -> None:
    assert BlockOwners(["a"]).of(keys(3)).tolist() == [[0], [0], [0]]
    assert BlockOwners(["a"]).of([]).tolist() == []


def test_blocks_of_a_server_out_of_use_are_asked_of_their_second_owner() -> None:
    table = np.array([[0, 1], [1, 2], [2, 0], [0, 2]])
    assert asked_of(table, [True, True, True]) == {0: [0, 3], 1: [1], 2: [2]}
    assert asked_of(table, [False, True, True]) == {1: [0, 1], 2: [2, 3]}
    assert asked_of(table, [False, True, False]) == {0: [3], 1: [0, 1], 2: [2]}


def test_the_time_out_follows_the_answers() -> None:
    health = ServerHealth()
    assert health.timeout_s == FIRST_TIMEOUT_S
    for _ in range(50):
        health.answered(0.001)
    assert health.timeout_s == LEAST_TIMEOUT_S
    for _ in range(50):
        health.answered(0.12)
    assert 0.12 < health.timeout_s < MOST_TIMEOUT_S
    for _ in range(50):
        health.answered(3.0)
    assert health.timeout_s == MOST_TIMEOUT_S


def test_looks_become_rarer_until_one_succeeds() -> None:
    health = ServerHealth()
    health.lost()
    pauses = []
    for _ in range(6):
        pauses.append(health.look_s)
        health.looked(well=False)
    assert pauses == sorted(pauses) and pauses[0] < pauses[-1] <= 1.0 and not health.usable
    health.looked(well=True)
    assert health.usable and health.look_s == pauses[0]


def test_versions_of_several_servers_are_one_number() -> None:
    both = joined_versions({0: 5, 1: 7})
    assert both == joined_versions({1: 7, 0: 5}) != 0
    assert len({both, joined_versions({0: 5}), joined_versions({0: 5, 1: 8})}) == 3
    assert joined_versions({0: 5, 1: 0}) == 0, "a server of an earlier release says nothing"
