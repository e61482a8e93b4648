"""Questions to the simulator and options of a simulated cluster, and checks of their combinations.

The command line, the SQL function and its child process all use ``parse``; benchmarks make options
directly. Names in a question are the names of the command's options with underscores; a value of
None counts as not given. Every error message names the option and the cure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.policies.select import PRODUCTION_POLICIES
from tierkv.simulator.trace import DEFAULT_BLOCK_TOKENS

GB = 1e9
DEFAULT_MODEL: Final = "dense-70b-h20"


class RouterName(StrEnum):
    """Routers, which choose the node of each request."""

    TIERKV = "tierkv"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_WORK = "least_work"
    STICKY = "sticky"
    DYNAMO = "dynamo"
    CONDUCTOR = "conductor"


class Gate(StrEnum):
    """What the choice between loading and recomputing knows.

    LIVE: node and router see the queue of the pool's link; NODE: only the node sees the queue;
    BLIND: neither sees the queue; OFF: all blocks in the pool are loaded.
    """

    LIVE = "live"
    NODE = "node"
    BLIND = "blind"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of one cluster.

    Attributes:
        nodes: number of prefill nodes.
        router: router that chooses the node.
        policy: eviction policy of every cache.
        local_gb: memory for KV on each node, in 10^9 bytes.
        pool_gb: memory of the shared pool; 0.0 means no pool.
        pool_gbps: bandwidth of the pool's link for all nodes together, in 10^9 bytes per second.
        gate: what the choice between loading and recomputing knows.
        closed_loop: a session's next request arrives a pause after the previous answer.
        speed: divisor of all timestamps.
        slo_s: time to first token that counts as good; 0.0: good requests are not counted.
        reserve: blocks promised to a request stay until the request is served.
        model: name in the constants file.
        block_tokens: tokens per id of the trace.
        seed: seed of all random choices.
        noise: nodes deviate from the predicted time, and news comes late
            (simulator/nodes/node.py).
    """

    nodes: int = 1
    router: RouterName = RouterName.TIERKV
    policy: str = "default"
    local_gb: float = 1000.0
    pool_gb: float = 0.0
    pool_gbps: float = 0.0
    gate: Gate = Gate.LIVE
    closed_loop: bool = False
    speed: float = 1.0
    slo_s: float = 0.0
    reserve: bool = True
    model: str = DEFAULT_MODEL
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    seed: int = 0
    noise: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= limits.MAX_SIMULATED_NODES:
            raise ConfigError(
                f"--nodes must be 1 to {limits.MAX_SIMULATED_NODES}, not {self.nodes}"
            )
        if self.policy not in PRODUCTION_POLICIES:
            known = ", ".join(sorted(PRODUCTION_POLICIES))
            raise ConfigError(
                f"--policy {self.policy} can't run a cluster; its caches know: {known}",
                hint="Give --capacity-blocks instead of --nodes to replay one cache under it.",
            )
        _check_range("--local-gb", self.local_gb, 0.0, limits.MAX_SIMULATED_GB)
        _check_range("--pool-gb", self.pool_gb, 0.0, limits.MAX_SIMULATED_GB)
        _check_range("--pool-gbps", self.pool_gbps, 0.0, limits.MAX_SIMULATED_GB)
        _check_range("--speed", self.speed, 1e-3, 1e3)
        _check_range("--slo", self.slo_s, 0.0, 1e6)
        _check_range("--block-tokens", self.block_tokens, 1, limits.MAX_SIMULATED_BLOCK_TOKENS)
        if bool(self.pool_gb) != bool(self.pool_gbps):
            given, missing = (
                ("--pool-gb", "--pool-gbps") if self.pool_gb else ("--pool-gbps", "--pool-gb")
            )
            raise ConfigError(
                f"{given} needs {missing}: a pool has a size and a bandwidth",
                hint=f"Add {missing}, or leave {given} out to simulate without a pool.",
            )


def _check_range(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{option} must be {low:g} to {high:g}, not {value:g}")


@dataclass(frozen=True, slots=True)
class CacheQuestion:
    """How often does one cache hit?

    Attributes:
        policy: name of the policy.
        capacity_blocks: capacity of the cache in blocks.
        block_tokens: tokens per id of the trace.
        seed: seed of the policy's random choices.
    """

    policy: str
    capacity_blocks: int
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CostQuestion:
    """What does the pool cost per saved node?

    Attributes:
        regions: regions of the prices; empty: all.
        slo_share: share of requests that must meet the SLO.
        prices: file of prices; None: simulator/prices.toml.
    """

    regions: tuple[str, ...] = ()
    slo_share: float = 0.9
    prices: Path | None = None


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """A question to the simulator: a cache, or a cluster and the worth of its pool.

    Attributes:
        cache: replay one cache.
        cluster: simulate a cluster.
        cost: also search for the smallest clusters.
        simulates_nodes: False when only ``cost`` was requested.
        constants: file of models and nodes; None: simulator/models.toml.
    """

    cache: CacheQuestion | None = None
    cluster: ClusterOptions | None = None
    cost: CostQuestion | None = None
    simulates_nodes: bool = True
    constants: Path | None = None


def parse(values: Mapping[str, Any]) -> SimulationRequest:
    """Check named values and return the question.

    Raises:
        ConfigError: a value is unknown, out of range, missing or contradicts another; the message
            gives the cure.
    """
    given = {name: value for name, value in values.items() if value is not None}
    unknown = sorted(set(given) - set(_READERS))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(_READERS))}")
    read = {name: _READERS[name](name, value) for name, value in given.items()}
    is_cluster = "nodes" in read or bool(read.get("cost"))
    if "capacity_blocks" in read:
        return _cache(read)
    if not is_cluster:
        raise ConfigError(
            "say what to simulate: --capacity-blocks N for one cache, or --nodes N for a cluster",
            hint="For instance --policy default and --capacity-blocks 20000.",
        )
    return _cluster(read)


def _cache(read: dict[str, Any]) -> SimulationRequest:
    alien = sorted(name for name in read if name not in _OF_CACHE)
    if alien:
        raise ConfigError(
            f"--capacity-blocks replays one cache, which has no {_option(alien[0])}",
            hint="Give --nodes and --local-gb instead of --capacity-blocks for a cluster.",
        )
    names = ("capacity_blocks", "block_tokens", "seed")
    known = {name: read[name] for name in names if name in read}
    return SimulationRequest(cache=CacheQuestion(policy=read.get("policy", "default"), **known))


def _cluster(read: dict[str, Any]) -> SimulationRequest:
    wants_cost = bool(read.pop("cost", False))
    if not wants_cost:
        for name in ("region", "slo_share", "prices"):
            if name in read:
                raise ConfigError(f"{_option(name)} says how to count --cost; add --cost")
    elif not read.get("slo") or not read.get("pool_gb"):
        missing = "--slo SECONDS" if not read.get("slo") else "--pool-gb and --pool-gbps"
        raise ConfigError(
            f"--cost needs {missing}: it looks for the fewest nodes that meet the SLO, with the "
            "pool and without"
        )
    cost = CostQuestion(
        regions=read.pop("region", ()),
        slo_share=read.pop("slo_share", 0.9),
        prices=read.pop("prices", None),
    )
    constants = read.pop("constants", None)
    simulates_nodes = "nodes" in read
    if "slo" in read:
        read["slo_s"] = read.pop("slo")
    options = ClusterOptions(**read)
    return SimulationRequest(
        None, options, cost if wants_cost else None, simulates_nodes, constants
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _whole(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        number = _finite(name, value)
        if number != int(number) or not low <= number <= high:
            raise ConfigError(
                f"{_option(name)} must be a whole number from {low} to {high}, not {value!r}"
            )
        return int(number)

    return read


def _finite(name: str, value: Any) -> float:
    """Read a number; the caller checks the range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{_option(name)} must be a number, not {value!r}")
    return float(value)


def _share(name: str, value: Any) -> float:
    number = _finite(name, value)
    if not 0.0 < number <= 1.0:
        raise ConfigError(f"{_option(name)} must be above 0 and at most 1, not {value!r}")
    return number


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{_option(name)} must be true or false, not {value!r}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{_option(name)} must be a name, not {value!r}")
    return value


def _one_of(kind: type[StrEnum]) -> Callable[[str, Any], StrEnum]:
    def read(name: str, value: Any) -> StrEnum:
        known = [member.value for member in kind]
        if value not in known:
            raise ConfigError(f"unknown {_option(name)} {value!r}; known: {', '.join(known)}")
        return kind(value)

    return read


def _path(name: str, value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_text(name, value))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ConfigError(f"{_option(name)} must be names, not {value!r}")
    return tuple(_text(name, item) for item in items)


_READERS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "policy": _text,
    "capacity_blocks": _whole(1, 1 << 40),
    "nodes": _whole(1, limits.MAX_SIMULATED_NODES),
    "router": _one_of(RouterName),
    "local_gb": _finite,
    "pool_gb": _finite,
    "pool_gbps": _finite,
    "gate": _one_of(Gate),
    "closed_loop": _switch,
    "speed": _finite,
    "slo": _finite,
    "reserve": _switch,
    "model": _text,
    "block_tokens": _whole(1, limits.MAX_SIMULATED_BLOCK_TOKENS),
    "seed": _whole(0, (1 << 63) - 1),
    "cost": _switch,
    "region": _texts,
    "slo_share": _share,
    "prices": _path,
    "constants": _path,
}
_OF_CACHE: Final = frozenset({"policy", "capacity_blocks", "block_tokens", "seed"})
