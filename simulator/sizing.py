"""How many nodes a load needs, with a pool and without: the smallest cluster that meets the SLO.

Runs the cluster simulation at one number of nodes after the other; used by ``--cost`` and the
sizing benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcore.errors import ConfigError
from simulator.cluster import Cluster
from simulator.options import ClusterOptions
from simulator.serving_model import Constants
from simulator.workload import Workload

MOST_NODES = 256


@dataclass(frozen=True, slots=True)
class PoolWorth:
    """What a pool saves.

    Attributes:
        nodes_without: nodes that meet the SLO without it.
        nodes_with: nodes that meet it with the pool.
    """

    nodes_without: int
    nodes_with: int

    @property
    def nodes_saved(self) -> int:
        """How many nodes fewer; negative when the pool does harm."""
        return self.nodes_without - self.nodes_with


def pool_worth(
    workload: Workload,
    options: ClusterOptions,
    constants: Constants,
    *,
    slo_share: float,
    told: Callable[[str], None] = lambda line: None,
) -> PoolWorth:
    """Find the smallest clusters with and without the pool of ``options``.

    Args:
        workload: the load.
        options: with a pool and an SLO; ``nodes`` is not looked at.
        constants: of models and nodes.
        slo_share: share of requests whose first token must come within the SLO.
        told: called with a line about each run.

    Raises:
        ConfigError: no number of nodes meets the SLO.
    """
    plain = replace(options, pool_gb=0.0, pool_gbps=0.0)
    return PoolWorth(
        nodes_without=smallest_cluster(workload, plain, constants, slo_share=slo_share, told=told),
        nodes_with=smallest_cluster(workload, options, constants, slo_share=slo_share, told=told),
    )


def smallest_cluster(
    workload: Workload,
    options: ClusterOptions,
    constants: Constants,
    *,
    slo_share: float,
    told: Callable[[str], None] = lambda line: None,
) -> int:
    """Find the fewest nodes that meet the SLO: doubled until they do, then by bisection.

    Raises:
        ConfigError: not even MOST_NODES do.
    """

    def attained(nodes: int) -> float:
        ledger = Cluster(workload, replace(options, nodes=nodes), constants).run()
        share = ledger.attainment(options.slo_s)
        pool = f"pool {options.pool_gb:g} GB" if options.pool_gb else "no pool"
        told(f"{nodes} nodes, {pool}: {share:.1%} within {options.slo_s:g} s")
        return share

    low, high = 0, 1
    while (share := attained(high)) < slo_share:
        if high >= MOST_NODES:
            raise ConfigError(
                f"{MOST_NODES} nodes answer only {share:.1%} of the requests within "
                f"{options.slo_s:g} s; {slo_share:.1%} were asked for",
                hint="Give a longer --slo or a smaller --slo-share.",
            )
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if attained(middle) < slo_share:
            low = middle
        else:
            high = middle
    return high
