"""What a node's heartbeat says of its load: figures that loads and steps measured.

Called by the engine after each step; read by the scheduler, which predicts with the formulas that
this node decides with (costing/service_time.py, costing/node_cost.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.sequence import Phase, Sequence
from tierkv.compute.l1.page_pool import PagePool
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.compute.transfers.loads import Loads
from tierkv.costing.fit import Rate
from tierkv.costing.service_time import Line, tell_cost
from tierkv.kvcore.location import Tier
from tierkv.kvcore.node import NodeLoad

_UNKNOWN = Line(0.0, 0.0)


class LoadReport:
    """Puts a NodeLoad together.

    Attributes:
        prefill_rate: tokens per second in steps that were clearly prefill.
        decode_rate: tokens per second of one request in steps that only decoded.
        decode_steps: such steps per second.
    """

    def __init__(self, figures: LoadFigures, step_tokens: int) -> None:
        self.prefill_rate = Rate()
        self.decode_rate = Rate()
        self.decode_steps = Rate()
        self._figures = figures
        self._step_tokens = step_tokens

    def decoded(self, tokens_each: float, seconds: float) -> None:
        """Take in a step that only decoded."""
        self.decode_rate.add(tokens_each, seconds)
        self.decode_steps.add(1, seconds)

    def prefilled(self, tokens: int, pairs: float, seconds: float, sequences: int) -> None:
        """Take in a step that was clearly prefill."""
        self.prefill_rate.add(tokens, seconds)
        self._figures.steps.add(tokens, pairs, seconds, sequences)

    def node_load(
        self, batcher: Batcher, pool: PagePool, loads: Loads, sequences: Iterable[Sequence]
    ) -> NodeLoad:
        """Say how loaded the node is now; O(sequences and loads)."""
        l2, l3, l4 = (self._figures.path(tier) or _UNKNOWN for tier in (Tier.L2, Tier.L3, Tier.L4))
        steps_per_s = self.decode_steps.value
        return replace(
            tell_cost(self._figures.steps.cost),
            requests_running=batcher.active,
            requests_waiting=batcher.waiting,
            waiting_prefill_tokens=batcher.uncomputed_tokens(),
            kv_usage=pool.used / max(1, pool.num_pages - 1),
            prefill_tokens_per_s=self.prefill_rate.value,
            decode_tokens_per_s=self.decode_rate.value,
            l2_bytes_per_s=l2.bytes_per_s,
            l3_bytes_per_s=l3.bytes_per_s,
            l4_bytes_per_s=l4.bytes_per_s,
            l2_latency_s=l2.latency_s,
            l3_latency_s=l3.latency_s,
            l4_latency_s=l4.latency_s,
            l2_queued_bytes=loads.queued_bytes(Tier.L2),
            l3_queued_bytes=loads.queued_bytes(Tier.L3),
            l4_queued_bytes=loads.queued_bytes(Tier.L4),
            step_tokens=self._step_tokens,
            decode_step_s=1 / steps_per_s if steps_per_s else 0.0,
            decodes_running=sum(
                seq.phase is Phase.RUNNING and seq.first_token_s >= 0.0 for seq in sequences
            ),
        )
