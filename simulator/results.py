"""Results of a simulated cluster: counted during the simulation, summed up at the end.

Times are virtual seconds, sizes bytes; ratios are 0 to 1. The names in a summary are the JSON keys
of ``tierkv simulate`` and the metrics of ``tierkv.simulate`` in SQL.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.simulator.nodes.job import SimulatedRequest
from tierkv.simulator.nodes.node import SimNode
from tierkv.simulator.nodes.prefix_cache import SimPool


@dataclass(slots=True)
class ResultLedger:
    """All counters of a simulation.

    Attributes:
        arrivals_s: arrival times of requests, in the order of service.
        ttfts_s: times to the first token of these requests.
        prompt_tokens: tokens of all prompts; the sum of local, pool and computed tokens.
        local_hit_tokens: tokens reused from the cache of the serving node.
        pool_hit_tokens: tokens loaded from the pool.
        computed_tokens: tokens computed.
        local_hit_blocks: blocks behind ``local_hit_tokens``.
        pool_read_bytes: bytes moved from the pool.
        pool_write_bytes: bytes moved to the pool.
        pool_skipped_write_bytes: bytes not written because the link was behind.
    """

    arrivals_s: array[float] = field(default_factory=lambda: array("d"))
    ttfts_s: array[float] = field(default_factory=lambda: array("d"))
    refused: int = 0
    prompt_tokens: int = 0
    local_hit_tokens: int = 0
    pool_hit_tokens: int = 0
    computed_tokens: int = 0
    local_hit_blocks: int = 0
    pool_read_bytes: int = 0
    pool_write_bytes: int = 0
    pool_skipped_write_bytes: int = 0
    local_evicted_blocks: int = 0
    pool_evicted_blocks: int = 0
    pool_used_blocks: int = 0
    block_bytes: int = 0
    prefill_busy_s: float = 0.0
    link_busy_s: float = 0.0
    span_s: float = 0.0
    nodes: int = 0

    @property
    def requests(self) -> int:
        """Requests that were served or refused."""
        return len(self.ttfts_s) + self.refused

    def served(self, job: SimulatedRequest, block_tokens: int) -> None:
        """Record a first token."""
        self.arrivals_s.append(job.arrived_s)
        self.ttfts_s.append(job.ttft_s)
        reused = job.local_blocks + job.loaded_blocks
        loaded = job.pool_blocks
        self.prompt_tokens += job.prompt.input_tokens
        self.local_hit_tokens += (reused - loaded) * block_tokens
        self.pool_hit_tokens += loaded * block_tokens
        self.computed_tokens += job.prompt.input_tokens - reused * block_tokens
        self.local_hit_blocks += reused - loaded

    def close(self, nodes: Sequence[SimNode], pool: SimPool, *, block_bytes: int) -> None:
        """Copy the counters of nodes, caches, pool and link."""
        self.nodes = len(nodes)
        self.block_bytes = block_bytes
        self.pool_read_bytes = pool.read_bytes
        self.pool_write_bytes = pool.write_bytes
        self.pool_skipped_write_bytes = pool.skipped_write_bytes
        self.prefill_busy_s = sum(node.busy_s for node in nodes)
        self.link_busy_s = pool.link.busy_s
        self.local_evicted_blocks = sum(node.cache.evicted_blocks for node in nodes)
        self.pool_evicted_blocks = pool.cache.evicted_blocks
        self.pool_used_blocks = len(pool.cache)
        if self.arrivals_s:
            ends = (a + t for a, t in zip(self.arrivals_s, self.ttfts_s, strict=True))
            self.span_s = max(ends) - min(self.arrivals_s)

    def attainment(self, slo_s: float) -> float:
        """Return the share of requests with a first token within ``slo_s``."""
        return sum(1 for ttft in self.ttfts_s if ttft <= slo_s) / max(1, self.requests)

    def summary(self, slo_s: float = 0.0) -> dict[str, float | int | None]:
        """Return the metrics by name, in reading order.

        Args:
            slo_s: time to the first token that counts as good; 0.0: ``slo_attainment`` is None.
        """
        ttfts = sorted(self.ttfts_s)
        tokens = max(1, self.prompt_tokens)
        return {
            "requests": self.requests,
            "refused_requests": self.refused,
            "ttft_p50_s": quantile(ttfts, 0.50),
            "ttft_p90_s": quantile(ttfts, 0.90),
            "ttft_p99_s": quantile(ttfts, 0.99),
            "ttft_mean_s": sum(ttfts) / len(ttfts) if ttfts else 0.0,
            "slo_attainment": self.attainment(slo_s) if slo_s else None,
            "token_hit_rate": (self.local_hit_tokens + self.pool_hit_tokens) / tokens,
            "prompt_tokens": self.prompt_tokens,
            "local_hit_tokens": self.local_hit_tokens,
            "pool_hit_tokens": self.pool_hit_tokens,
            "computed_tokens": self.computed_tokens,
            "local_hit_bytes": self.local_hit_blocks * self.block_bytes,
            "pool_read_bytes": self.pool_read_bytes,
            "pool_write_bytes": self.pool_write_bytes,
            "pool_skipped_write_bytes": self.pool_skipped_write_bytes,
            "pool_used_bytes": self.pool_used_blocks * self.block_bytes,
            "local_evicted_blocks": self.local_evicted_blocks,
            "pool_evicted_blocks": self.pool_evicted_blocks,
            "prefill_utilisation": self._share(self.prefill_busy_s, self.nodes),
            "pool_link_utilisation": self._share(self.link_busy_s, 1),
            "span_s": self.span_s,
        }

    def _share(self, busy_s: float, servers: int) -> float:
        whole_s = self.span_s * servers
        return min(1.0, busy_s / whole_s) if whole_s else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as ``share`` of all values.

    The result without values is 0.0.
    """
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 10**6) - 1))]
