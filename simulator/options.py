"""Options of a simulated cluster, and checks of their combinations.

Made by the command line, the SQL function and the benchmarks from plain values; every error message
names the option and the cure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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
