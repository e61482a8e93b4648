"""What may be asked, what not, and that every refusal names the option and the cure."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.kvcore.errors import ConfigError
from tierkv.simulator.nodes.serving_model import load_constants
from tierkv.simulator.options import CacheQuestion, ClusterOptions, Gate, RouterName, parse
from tierkv.simulator.sizing import pool_worth
from tierkv.simulator.trace import Request
from tierkv.simulator.workload import make_workload


def test_a_cache_or_a_cluster() -> None:
    asked = parse({"capacity_blocks": 10, "policy": "lru", "nodes": None})
    assert asked.cache == CacheQuestion("lru", 10)
    asked = parse({"nodes": 3.0, "router": "dynamo", "slo": 2, "gate": "blind", "cost": False})
    assert asked.cluster == ClusterOptions(
        nodes=3, router=RouterName.DYNAMO, slo_s=2.0, gate=Gate.BLIND
    )
    assert asked.cost is None


def test_cost_searches_for_nodes_unless_they_are_given_too() -> None:
    pool = {"slo": 5, "pool_gb": 10, "pool_gbps": 1, "cost": True}
    asked = parse(pool | {"region": "tokyo"})
    assert asked.cost is not None
    assert asked.cost.regions == ("tokyo",)
    assert not asked.simulates_nodes
    assert parse(pool | {"nodes": 2}).simulates_nodes


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "--capacity-blocks N for one cache, or --nodes N"),
        ({"nodes": 2, "capacity_blocks": 5}, "has no --nodes"),
        ({"capacity_blocks": 5, "slo": 1}, "has no --slo"),
        ({"capacity_blocks": 0}, "--capacity-blocks must be a whole number from 1"),
        ({"nodes": 2.5}, "--nodes must be a whole number"),
        ({"nodes": 0}, "--nodes must be a whole number from 1"),
        ({"nodes": True}, "--nodes must be a number"),
        ({"nodes": 2, "router": "best"}, "unknown --router 'best'; known: tierkv, random"),
        ({"nodes": 2, "policy": "belady"}, "--policy belady can't run a cluster"),
        ({"nodes": 2, "pool_gb": 5}, "--pool-gb needs --pool-gbps"),
        ({"nodes": 2, "pool_gbps": 5}, "--pool-gbps needs --pool-gb"),
        ({"nodes": 2, "local_gb": -1}, "--local-gb must be 0 to"),
        ({"nodes": 2, "local_gb": float("nan")}, "--local-gb must be a number"),
        ({"nodes": 2, "speed": 0}, "--speed must be 0.001 to"),
        ({"nodes": 2, "closed_loop": 1}, "--closed-loop must be true or false"),
        ({"nodes": 2, "model": ""}, "--model must be a name"),
        ({"nodes": 2, "region": "tokyo"}, "--region says how to count --cost; add --cost"),
        ({"cost": True, "pool_gb": 1, "pool_gbps": 1}, "--cost needs --slo"),
        ({"cost": True, "slo": 1}, "--cost needs --pool-gb and --pool-gbps"),
        ({"cost": True, "slo_share": 1.5}, "--slo-share must be above 0 and at most 1"),
        ({"nodes": 2, "region": 3}, "--region must be names"),
        ({"knots": 2}, "unknown option 'knots'"),
    ],
)
def test_refusals_name_the_option(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(values)
    assert says in refused.value.message


def test_what_a_pool_saves_is_counted_in_nodes() -> None:
    # Two conversations of 30 K tokens in turn, at a rate that one node can't compute; with room for
    # one of them on a node, a pool for both saves nodes.
    requests = [
        Request(2.0 * n, 30_720 + 256, 1, tuple(range(100 * (n % 4), 100 * (n % 4) + 60)))
        for n in range(40)
    ]
    options = ClusterOptions(
        local_gb=11.0, pool_gb=100.0, pool_gbps=40.0, slo_s=4.0, policy="leaf_lru"
    )
    told: list[str] = []
    load = make_workload(requests, block_tokens=512)
    worth = pool_worth(load, options, load_constants(), slo_share=0.8, told=told.append)
    assert worth.nodes_with < worth.nodes_without
    assert worth.nodes_saved == worth.nodes_without - worth.nodes_with
    assert any("no pool" in line for line in told)


def test_an_slo_that_no_cluster_meets_is_said() -> None:
    load = make_workload([Request(0.0, 100_000, 1, ())], block_tokens=512)
    options = ClusterOptions(pool_gb=1.0, pool_gbps=1.0, slo_s=0.1, policy="leaf_lru")
    with pytest.raises(ConfigError, match="256 nodes answer fewer than 90"):
        pool_worth(load, options, load_constants(), slo_share=0.9)
