"""Random SQL through every door agrees with plain functions; ``make sql-fuzz`` goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.compare import Difference, Tally
from tests.differential.run import Doors, all_doors

pytestmark = pytest.mark.integration

SEEDS = 48
AT_ONCE = 24


@pytest.fixture(scope="module")
def doors() -> Iterator[list[Doors]]:
    with all_doors() as opened:
        yield opened


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_random_sql_agrees_with_plain_functions(doors: list[Doors], first: int) -> None:
    tally = Tally()
    differences: list[Difference] = []
    for seed in range(first, first + AT_ONCE):
        found = (some.play(seed, tally) for some in doors)
        differences += [difference for difference in found if difference is not None]
    assert not differences, "\n\n".join(map(str, differences))
    compared = sum(count for name, count in tally.counts.items() if name.endswith("compared"))
    assert compared > AT_ONCE, tally.counts
