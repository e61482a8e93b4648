"""The cost of a pool: the smallest clusters that meet the SLO with and without it, and prices.

Runs the cluster simulation with different numbers of nodes. Prices of pool memory by region come
from simulator/prices.toml or a file of the same form. Called by simulator/run.py for ``tierkv
simulate --cost`` and tierkv.simulate in SQL, and by the sizing benchmark.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import ConfigError
from tierkv.simulator.cluster import Cluster
from tierkv.simulator.nodes.serving_model import Constants
from tierkv.simulator.options import ClusterOptions
from tierkv.simulator.results import ResultLedger
from tierkv.simulator.workload import Workload

MOST_NODES = 256

SHIPPED: Final = Path(__file__).parent / "prices.toml"


@dataclass(frozen=True, slots=True)
class PoolWorth:
    """Nodes saved by a pool.

    Attributes:
        nodes_without: nodes that meet the SLO without the pool.
        nodes_with: nodes that meet the SLO with the pool.
    """

    nodes_without: int
    nodes_with: int

    @property
    def nodes_saved(self) -> int:
        """Number of saved nodes; negative when the pool does harm."""
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
        options: options with a pool and an SLO; ``nodes`` is ignored.
        constants: constants of models and nodes.
        slo_share: share of requests with a first token within the SLO.
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
    """Find the fewest nodes that meet the SLO: by doubling, then by bisection.

    Raises:
        ConfigError: even MOST_NODES nodes miss the SLO.
    """

    def suffices(nodes: int) -> bool:
        cluster = Cluster(workload, replace(options, nodes=nodes), constants)
        watch = _Watch(cluster.ledger, options.slo_s, slo_share, len(workload.prompts))
        try:
            cluster.run(watch)
        except _TooManyMissed:
            found = f"fewer than {slo_share:.1%}"
        else:
            found = f"{cluster.ledger.attainment(options.slo_s):.1%}"
        pool = f"pool {options.pool_gb:g} GB" if options.pool_gb else "no pool"
        told(f"{nodes} nodes, {pool}: {found} within {options.slo_s:g} s")
        return not watch.too_many

    low, high = 0, 1
    while not suffices(high):
        if high >= MOST_NODES:
            raise ConfigError(
                f"{MOST_NODES} nodes answer fewer than {slo_share:.1%} of the requests within "
                f"{options.slo_s:g} s",
                hint="Give a longer --slo or a smaller --slo-share.",
            )
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


class _TooManyMissed(Exception):
    """The SLO can't be met any more: the rest of the run would add no information."""


class _Watch:
    """Counts late first tokens while a cluster runs, and ends the run when too many are late.

    A hopeless cluster answers the last request hours too late, and simulating the delay takes
    longest.
    """

    def __init__(self, ledger: ResultLedger, slo_s: float, slo_share: float, requests: int) -> None:
        self._ledger = ledger
        self._slo_s = slo_s
        self._slo_share = slo_share
        self._requests = requests
        self._seen = 0
        self._missed = 0

    @property
    def too_many(self) -> bool:
        """Whether more first tokens were late than allowed, over all results so far."""
        ttfts_s = self._ledger.ttfts_s
        self._missed += sum(1 for ttft in ttfts_s[self._seen :] if ttft > self._slo_s)
        self._seen = len(ttfts_s)
        missed = self._missed + self._ledger.refused
        return (self._requests - missed) / max(1, self._requests) < self._slo_share

    def __call__(self, done: int, total: int) -> None:
        if self.too_many:
            raise _TooManyMissed


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of memory.

    Attributes:
        currency: currency of the prices.
        per_gb_month: price by region.
    """

    currency: str
    per_gb_month: Mapping[str, float]

    def regions(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Return the wanted regions, or all regions if ``wanted`` is empty.

        Spaces, hyphens, underscores and case are ignored: ``Hong Kong`` is ``hong_kong``.

        Raises:
            ConfigError: a region has no price.
        """
        names = {_plain(name): name for name in self.per_gb_month}
        for region in wanted:
            if _plain(region) not in names:
                known = ", ".join(self.per_gb_month)
                raise ConfigError(f"no price for region {region!r}; known: {known}")
        return tuple(names[_plain(region)] for region in wanted) or tuple(self.per_gb_month)


def load_prices(path: Path | None = None) -> PriceList:
    """Read a price list; None means simulator/prices.toml.

    Raises:
        ConfigError: the file can't be read, or a price is not a positive number.
    """
    file = path or SHIPPED
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"price list {file} can't be read: {error.strerror}", hint="Name one with --prices."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"price list {file} is not valid TOML: {error}") from None
    regions = data.get("regions")
    if not isinstance(regions, dict) or not regions:
        raise ConfigError(f"price list {file} has no table [regions]; see simulator/prices.toml")
    for region, price in regions.items():
        usable = isinstance(price, int | float) and not isinstance(price, bool)
        if not usable or not 0 < price < math.inf:
            raise ConfigError(f"{file}: regions.{region} = {price!r} must be a positive price")
    return PriceList(str(data.get("currency", "")), regions)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
