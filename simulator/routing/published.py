"""Two routers that others published, from their formulas and with their defaults.

For comparison with ours. Both see an up-to-date directory, exact queue lengths and the same node
below them, gate included, so that only the choice of the node differs.
"""

from __future__ import annotations

from random import Random  # noqa: TID251 - seeded: a simulation's chance is its seed

from tierkv.simulator.nodes.job import Job
from tierkv.simulator.routing.contract import ClusterView, InstantRouter


class DynamoRouter(InstantRouter):
    """NVIDIA Dynamo's KV router, in blocks.

    ``cost = max(0, (active_prefill_tokens + tokens) / block - credit) + decode_blocks`` where the
    credit is 1.0 per block in the node's cache, and with a pool m per further block in it. The
    least cost wins, chance among equals.

    Ref: ai-dynamo/dynamo, KV router selector, defaults of 1.6.1 (weight 1, temperature 0).
    """

    def __init__(self, cluster: ClusterView) -> None:
        super().__init__(cluster)
        self._random = Random(cluster.options.seed)

    def choose(self, job: Job, now: float) -> int:
        found = self.cluster.look_up(job)
        block_tokens = self.cluster.options.block_tokens
        shared = self.cluster.constants.routers.dynamo_shared_credit
        blocks = len(job.prompt.blocks) + 1
        costs = []
        for node, local in zip(self.cluster.nodes, found.local, strict=True):
            raw = (node.queued_tokens + job.prompt.input_tokens) / block_tokens
            credit = local + shared * max(0, found.pool - local)
            costs.append(max(0.0, raw - credit) + node.active_blocks + blocks)
        least = min(costs)
        return self._random.choice([i for i, cost in enumerate(costs) if cost == least])


class ConductorRouter(InstantRouter):
    """Mooncake's conductor: the least time to the first token, moving a prefix where that pays.

    The queue is the node's seconds of work; the transfer is one at the pool's rate. What the
    algorithm replicates from another instance comes from the pool here, where every block that was
    computed is. Rejection by SLO is left out: every router serves every request.

    Ref: Mooncake (FAST '25), Algorithm 1.
    """

    def choose(self, job: Job, now: float) -> int:
        found = self.cluster.look_up(job)
        threshold = self.cluster.constants.routers.conductor_threshold
        best, best_s = 0, float("inf")
        for node, local in zip(self.cluster.nodes, found.local, strict=True):
            reused, transfer_s = local, 0.0
            if found.pool > threshold * local:
                reused, transfer_s = (
                    found.pool,
                    self.cluster.pool.nominal_load_s(found.pool - local),
                )
            tokens = reused * self.cluster.options.block_tokens
            prefill_s = self.cluster.model.prefill_s(tokens, job.prompt.input_tokens - tokens)
            ttft_s = node.work_s(now) + transfer_s + prefill_s
            if ttft_s < best_s:
                best, best_s = node.index, ttft_s
        return best
