"""Events of the scheduler core, and the instructions that the core returns.

Events go into ``SchedulerState.handle``; scheduler/dispatcher.py carries out the returned
instructions. All are frozen values, so a scenario is a list of events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tierkv.costing.node_cost import NOTHING_CACHED, CachedPrefix, CostSplit
from tierkv.kvcore.ids import Incarnation, NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeLoad, PreferredNode
from tierkv.scheduler.shared_state.contract import FrontWork

IDLE = NodeLoad()


class Stage(StrEnum):
    """Which part of an answer a node is asked for."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


class Failure(StrEnum):
    """Why the scheduler gives up a request."""

    OVERLOADED = "overloaded"
    NO_NODE = "no_node"
    NODE_LOST = "node_lost"


@dataclass(frozen=True, slots=True)
class WantedModel:
    """The model that a request needs.

    A request prepared for certain weights and a certain KV layout is never sent to a model of the
    same name with different weights or layout: the request's namespace key names KV of exactly
    these weights and this layout.

    Attributes:
        name: model name in requests.
        revision: identifies the weights; None accepts any.
        layout: KV layout; None accepts any.
    """

    name: str
    revision: str | None = None
    layout: BlockLayout | None = None

    def __hash__(self) -> int:
        """Hash without the layout: hashing a layout is slow, and each request looks up often."""
        return hash((self.name, self.revision))

    def matches(self, model: ModelInfo) -> bool:
        """Return whether a served model is the wanted model."""
        return (
            model.name == self.name
            and self.revision in (None, model.revision)
            and self.layout in (None, model.layout)
        )


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A compute node as described by the directory (or by the node itself).

    Attributes:
        info: registration of the node.
        load: last heartbeat of the node.
        state: ``alive``, ``suspect`` or ``dead``, as reported by the directory.
    """

    info: NodeInfo
    load: NodeLoad = IDLE
    state: str = "alive"


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The complete list of compute nodes. A missing node becomes suspect and is removed later.

    Attributes:
        nodes: the compute nodes.
        pool_nodes: number of pool nodes whose memory and disks the compute nodes share. 0: unknown;
            then no load is predicted to wait for loads of other compute nodes.
    """

    nodes: tuple[SeenNode, ...]
    pool_nodes: int = 0


@dataclass(frozen=True, slots=True)
class OthersSeen:
    """What all other fronts together have at the nodes; nodes without such work are missing."""

    work: Mapping[NodeId, FrontWork]


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A new request.

    Attributes:
        request_id: unique among live requests.
        model: the model to use.
        prompt_tokens: length of the prompt.
        session_id: breaks ties in favour of the node that last answered this session.
        locatable: the prompt has a full block and may use the cache.
        splittable: a prefill node may hand the request over. False for a request with chunks to
            blend, because blended KV is never published, and for a request that only reads out its
            prompt.
        priority: a lower priority goes earlier among waiting requests.
        preferred_node: the node where the statement's plan has the prefix; None: no preference.
        tenant: whose turn the request takes among waiting requests.
        weight: the tenant's share of the turns, relative to other tenants; above 0.
    """

    request_id: RequestId
    model: WantedModel
    prompt_tokens: int
    session_id: str | None = None
    locatable: bool = False
    splittable: bool = True
    priority: int = 0
    preferred_node: PreferredNode | None = None
    tenant: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ChainLocated:
    """The directory's reply. Without a reply all counts are empty.

    Attributes:
        request_id: the request whose chain was located.
        near: per compute node, blocks in its L1 and on its host.
        pool: blocks in the memory of any node (``l3_blocks``), and in memory or on disk
            (``l4_blocks``).
    """

    request_id: RequestId
    near: Mapping[NodeId, CachedPrefix] = field(default_factory=dict)
    pool: CachedPrefix = NOTHING_CACHED


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The node running the request's current stage sent its first token."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The pool has KV of the prompt's first ``published_tokens``; the prefill stage goes on."""

    request_id: RequestId
    published_tokens: int


@dataclass(frozen=True, slots=True)
class PrefetchDone:
    """A node has answered a Prefetch: its pages hold the first ``tokens``, possibly 0."""

    request_id: RequestId
    node_id: NodeId
    tokens: int


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """The prefill stage ended; ``total_tokens`` counts the prompt and the generated tokens."""

    request_id: RequestId
    total_tokens: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node died while serving the request. ``total_tokens`` as in HandoffDone."""

    request_id: RequestId
    total_tokens: int


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The node refused the request because its queue is full; the node is healthy."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The time given in a Wait has passed."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The answer is complete."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request can't succeed, or its node broke a rule; no other node is tried."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller went away."""

    request_id: RequestId


Event = (
    NodesSeen
    | OthersSeen
    | RequestArrived
    | ChainLocated
    | FirstToken
    | PrefillProgress
    | PrefetchDone
    | HandoffDone
    | NodeLost
    | NodeRefused
    | WaitOver
    | RequestFinished
    | RequestFailed
    | RequestCancelled
)


@dataclass(frozen=True, slots=True)
class Locate:
    """Ask the directory where the request's chain is, then report ChainLocated."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """A candidate node for a request, and the cost at this node."""

    node_id: NodeId
    cost: CostSplit


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request's next stage to one incarnation of a node.

    Attributes:
        request_id: the request.
        node_id: the destination.
        incarnation: the intended incarnation of the node.
        stage: the part of the answer to ask for.
        candidates: the cheapest candidates that were compared, the chosen node first.
        attempt: counts sends of this request, from 1.
    """

    request_id: RequestId
    node_id: NodeId
    incarnation: Incarnation
    stage: Stage
    candidates: Sequence[CandidateCost]
    attempt: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Have a node load the prompt's first ``tokens``, then report PrefetchDone.

    No request waits for the load. The node is the successor after the prefill, or the node for
    which the request waits.
    """

    request_id: RequestId
    node_id: NodeId
    incarnation: Incarnation
    tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """No node has room now; report WaitOver at ``until_s`` unless instructed otherwise before."""

    request_id: RequestId
    until_s: float


@dataclass(frozen=True, slots=True)
class RefreshNodes:
    """Refresh the list of nodes now: a part of the list is out of date."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Stop listening to a node whose incarnation ended. Report NodeLost, as for a hang-up."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up the request; the caller is told the reason and when to retry."""

    request_id: RequestId
    failure: Failure
    reason: str
    retry_after_s: float = 1.0


Instruction = Locate | Dispatch | Prefetch | Wait | RefreshNodes | Abandon | Fail
