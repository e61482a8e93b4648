"""What the scheduler may be told.

Read by scheduler/requests/state.py and scheduler/dispatcher.py; built by the composition root.
Every value has a default that works for one machine, and rates are only used until a node has
measured its own.
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
        refresh_interval_s: time between two looks at the list of nodes.
        locate_timeout_s: a directory slower than this answers "no hits". Long enough for a front
            that looks at its sockets late: a wave that is sent blind goes where its KV is not.
        directory_backoff_s: after failures the directory is left alone up to this long.
        lease_s: what a locate finds is kept from eviction until its request is served; a lost front
            keeps it no longer than this.
        namespace_ttl_s: how long a namespace's key and policy are trusted before they are asked for
            again; so long may a change take.
        node_wait_s: how long a request waits for a node to appear or to come back.
        max_attempts: how many nodes one stage of a request may lose before it fails.
        backoff_initial_s: suspension of a node after its first failure; doubles with each one.
        backoff_max_s: longest suspension of a node.
        max_requests: requests in flight or waiting before new ones are refused.
        max_waiting: requests that wait here for room at a node before new ones are refused.
        max_in_flight_per_node: requests a node is given at a time; the others wait here, where they
            may still go elsewhere. As many as a node batches (``compute.max_running``).
        node_queue_s: with several nodes to choose from, a node is given no more prompts while those
            it has will take longer than this.
        priority_step_s: how much waiting outweighs one step of priority.
        ttft_slo_s: target for the time to the first token; a request that can't meet it because of
            those before it is refused at once. 0.0: none.
        prefetches_per_node: waiting requests whose blocks a node loads ahead at a time.
        queue_weight: ``c`` of ``wait + service + c*Q * taken``; of 1, 3 and 8 the last kept nodes
            that don't take the predicted time stable at full load (docs/performance.md).
        decode_harm: how much a second counts for which a prefill holds up one running decode,
            beside a second to the first token; a reader notices a pause less than a wait.
        handoff_s: time to pass a request from a prefill to a decode node, but for its KV.
        direct_tokens: uncached tokens that a decode node may compute itself, if they are at most
            half of the prompt and cheaper there; longer prompts would hold its decodes up.
        prefill_tokens_per_s: prefill rate of a node that has not measured any, as long as no other
            node of its model has.
        l2_bytes_per_s: load rate from the host's own segment until measured (a DRAM copy).
        l3_bytes_per_s: load rate from other hosts until measured (10 Gbit/s Ethernet).
        l4_bytes_per_s: rate of bringing up what rests on disk until measured (a slow NVMe drive).
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
        """How fast a node is taken to be until it measured that."""
        return Rates(
            StepCost(1.0 / self.prefill_tokens_per_s),
            Line(0.0, self.l2_bytes_per_s),
            Line(0.0, self.l3_bytes_per_s),
            Line(0.0, self.l4_bytes_per_s),
        )
