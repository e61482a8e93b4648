"""Where prompts went, in numbers: hits, misses and overrides of decisions with a choice."""

from __future__ import annotations

import pytest

from tierkv.costing.node_cost import CostSplit, ServiceCost
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.events import CandidateCost
from tierkv.scheduler.routing_stats import Affinity, AffinityCounts

BLOCK_TOKENS = 16


def candidate(l1: int = 0, l2: int = 0, l3: int = 0, l4: int = 0) -> CandidateCost:
    tiers = (l1, l2, l3, l4)
    service = ServiceCost(sum(tiers), 0.0, 1.0, 1.0, tiers)
    return CandidateCost(NodeId("n"), CostSplit(0.0, service, 1.0))


CASES = {
    "one node": ([candidate(l1=3)], AffinityCounts(1, 0, 0, 0, 48, 48)),
    "most is here": ([candidate(l1=3), candidate(l2=1)], AffinityCounts(1, 1, 0, 0, 48, 48)),
    "as much is there": ([candidate(l2=3), candidate(l1=3)], AffinityCounts(1, 1, 0, 0, 48, 48)),
    "nobody has any": ([candidate(), candidate()], AffinityCounts(1, 0, 1, 0, 0, 0)),
    "all is far": ([candidate(l3=2), candidate(l4=3)], AffinityCounts(1, 0, 1, 0, 48, 32)),
    "another has more": (
        [candidate(l2=1, l3=4), candidate(), candidate(l1=2, l3=3)],
        AffinityCounts(1, 0, 0, 1, 80, 80),
    ),
    "and would reuse more": ([candidate(), candidate(l1=5)], AffinityCounts(1, 0, 0, 1, 80, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_decision_is_counted_as_what_it_was(case: str) -> None:
    candidates, counts = CASES[case]
    counted = AffinityCounts()
    counted.decided(candidates, BLOCK_TOKENS)
    assert counted == counts
    counted.decided(candidates, BLOCK_TOKENS)
    assert (counted.decisions, counted.matched_tokens) == (2, 2 * counts.matched_tokens)


def test_waits_and_models_are_counted_apart() -> None:
    affinity = Affinity()
    affinity.of("a").waited(0.25)
    affinity.of("a").waited(0.5)
    affinity.of("b").decided([candidate()], BLOCK_TOKENS)
    counts = affinity.counts()
    assert (counts["a"]["queued"], counts["a"]["queue_time"]) == (2, 750.0)
    assert (counts["b"]["decisions"], counts["b"]["queued"]) == (1, 0)
    affinity.of("b").waited(1.0)
    assert counts["b"]["queued"] == 0
