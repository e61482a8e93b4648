"""Configuration of the scheduler.

Read by scheduler/requests/state.py and scheduler/dispatcher.py; built by the composition root.
Every value has a default for a single machine. The default rates apply only until a node has
measured its own rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.costing.node_cost import Rates
from tierkv.costing.service_time import Line, StepCost
from tierkv.kvcore import limits


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds, waits and default rates.

    Attributes:
        refresh_interval_s: time between two refreshes of the node list.
        locate_timeout_s: a locate without a reply after this time counts as "no hits". Long enough
            for a front that reads its sockets late: a wave of calls sent without locations misses
            its KV.
        directory_backoff_s: longest pause between questions to a failing directory.
        lease_s: length of the lease on located blocks. The front extends the lease until the
            request is served; the lease of a lost front ends after this time.
        namespace_ttl_s: how long a namespace's key and policy are cached; a change may take as
            long.
        node_wait_s: how long a request waits for a node to appear or to come back.
        max_attempts: losses of nodes after which a request fails.
        backoff_initial_s: suspension of a node after its first failure; each further failure in a
            row doubles it.
        backoff_max_s: longest suspension of a node.
        max_requests: requests in flight or waiting before new requests are refused.
        max_waiting: requests waiting here for room at a node before new requests are refused.
        max_in_flight_per_node: requests sent to a node at a time, equal to the node's batch
            (``compute.max_running``). Further requests wait here, where another node may still take
            them.
        node_queue_s: with several candidates, a node gets no further prompt while its queued
            prompts will take longer than this.
        priority_step_s: waiting time that outweighs one step of priority.
        ttft_slo_s: target for the time to the first token; a request that can't meet the target
            because of earlier requests is refused at once. 0.0: no target.
        prefetches_per_node: waiting requests whose blocks a node loads ahead at a time.
        queue_weight: ``c`` of ``wait + service + c*Q * taken``; of 1, 3 and 8, only 8 kept nodes
            with mispredicted times stable at full load (docs/performance.md).
        decode_harm: weight of a second by which a prefill delays one running decode, relative to a
            second to the first token; a reader notices a pause less than a wait.
        handoff_s: time to pass a request from a prefill to a decode node, without the transfer of
            its KV.
        direct_tokens: uncached tokens that a decode node may compute itself, if they are at most
            half of the prompt and cheaper at the decode node; longer prompts would delay its
            decodes.
        prefill_tokens_per_s: prefill rate of a node until the node, or another node of its model,
            has measured a rate.
        l2_bytes_per_s: load rate from the host's own segment until measured (a DRAM copy).
        l3_bytes_per_s: load rate from other hosts until measured (10 Gbit/s Ethernet).
        l4_bytes_per_s: rate of promoting blocks from disk until measured (a slow NVMe drive).
        decisions_logged: routing decisions kept for the views.
    """

    refresh_interval_s: float = 1.0
    locate_timeout_s: float = 0.5
    directory_backoff_s: float = 1.0
    lease_s: float = 10.0
    namespace_ttl_s: float = 5.0
    node_wait_s: float = 30.0
    max_attempts: int = 5
    backoff_initial_s: float = 0.2
    backoff_max_s: float = 5.0
    max_requests: int = limits.MAX_QUEUED_REQUESTS
    max_waiting: int = 10_000
    max_in_flight_per_node: int = 64
    node_queue_s: float = 1.0
    priority_step_s: float = 10.0
    ttft_slo_s: float = 0.0
    prefetches_per_node: int = 2
    queue_weight: float = 8.0
    decode_harm: float = 0.05
    handoff_s: float = 0.005
    direct_tokens: int = 512
    prefill_tokens_per_s: float = 2_000.0
    l2_bytes_per_s: float = 4e9
    l3_bytes_per_s: float = 1e9
    l4_bytes_per_s: float = 5e8
    decisions_logged: int = 1_024

    @property
    def rates(self) -> Rates:
        """Default rates of a node without measurements."""
        return Rates(
            StepCost(1.0 / self.prefill_tokens_per_s),
            Line(0.0, self.l2_bytes_per_s),
            Line(0.0, self.l3_bytes_per_s),
            Line(0.0, self.l4_bytes_per_s),
        )
