"""What can happen to the scheduler, and what it may ask for in return.

Events go into ``SchedulerState.handle``; instructions come out and are carried out by
scheduler/dispatcher.py. All are frozen values, so a scenario is a list of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tierkv.costing.node_cost import NOTHING_CACHED, CachedPrefix, CostSplit
from tierkv.kvcore.ids import Incarnation, NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeLoad, PreferredNode

IDLE = NodeLoad()


class Stage(StrEnum):
    """Which part of an answer a node is asked for."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


class Failure(StrEnum):
    """Why the scheduler gives a request up."""

    OVERLOADED = "overloaded"
    NO_NODE = "no_node"
    NODE_LOST = "node_lost"


@dataclass(frozen=True, slots=True)
class WantedModel:
    """Which model a request is for.

    A request that was prepared for certain weights and a certain KV layout is never sent to
    others of the same name: its namespace key names KV of just those.

    Attributes:
        name: what requests call it.
        revision: which weights; None takes any.
        layout: which KV layout; None takes any.
    """

    name: str
    revision: str | None = None
    layout: BlockLayout | None = None

    def __hash__(self) -> int:
        """Each request looks nodes up with it several times: the layout would cost the most."""
        return hash((self.name, self.revision))

    def matches(self, model: ModelInfo) -> bool:
        """Whether a served model is the wanted one."""
        return (
            model.name == self.name
            and self.revision in (None, model.revision)
            and self.layout in (None, model.layout)
        )


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A compute node as the directory (or the node itself) describes it.

    Attributes:
        info: its registration.
        load: its last heartbeat.
        state: ``alive``, ``suspect`` or ``dead``, as the directory says.
    """

    info: NodeInfo
    load: NodeLoad = IDLE
    state: str = "alive"


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The whole list of compute nodes; whoever is not in it is doubted, and later forgotten.

    Attributes:
        nodes: the compute nodes.
        pool_nodes: how many nodes' memory and disks they share; 0: unknown, and no load is assumed
            to wait for those of other compute nodes.
    """

    nodes: tuple[SeenNode, ...]
    pool_nodes: int = 0


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A new request.

    Attributes:
        request_id: unique among live requests.
        model: which model.
        prompt_tokens: length of the prompt.
        session_id: breaks ties towards the node that answered this session last.
        locatable: the prompt has a full block and may use the cache.
        splittable: a prefill node may hand it over. Blended KV is never published, so a request
            with chunks to blend stays where it was prefilled, and so does one that only asks about
            its prompt.
        priority: lower goes earlier, when it has to wait.
        preferred_node: where the plan of its statement has its prefix; None: no wish.
    """

    request_id: RequestId
    model: WantedModel
    prompt_tokens: int
    session_id: str | None = None
    locatable: bool = False
    splittable: bool = True
    priority: int = 0
    preferred_node: PreferredNode | None = None


@dataclass(frozen=True, slots=True)
class ChainLocated:
    """The directory answered, or did not (then everything is empty).

    Attributes:
        request_id: whose chain.
        near: per compute node, blocks in its L1 and on its host.
        pool: blocks in anybody's memory (``l3_blocks``) and with disk (``l4_blocks``).
    """

    request_id: RequestId
    near: Mapping[NodeId, CachedPrefix] = field(default_factory=dict)
    pool: CachedPrefix = NOTHING_CACHED


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The node that runs the request's current stage sent its first token."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """KV of the prompt's first ``published_tokens`` is in the pool; its prefill stage goes on."""

    request_id: RequestId
    published_tokens: int


@dataclass(frozen=True, slots=True)
class PrefetchDone:
    """A node that was asked to load ahead answered: it has the first ``tokens``, maybe none."""

    request_id: RequestId
    node_id: NodeId
    tokens: int


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """The prefill stage ended; ``total_tokens`` is the prompt and what was generated."""

    request_id: RequestId
    total_tokens: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node died under the request. ``total_tokens`` as in HandoffDone."""

    request_id: RequestId
    total_tokens: int


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The node's queue is full; it is healthy."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The time a request was told to wait has passed."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The answer is complete."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request can't work, or its node broke a rule; nobody else is tried."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller went away."""

    request_id: RequestId


Event = (
    NodesSeen
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
    """Ask the directory where the request's chain is, then say ChainLocated."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """One node that could take a request, and what it would cost there."""

    node_id: NodeId
    cost: CostSplit


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request's next stage to that life of that node.

    Attributes:
        request_id: which request.
        node_id: where to.
        incarnation: which life of the node was meant.
        stage: what to ask for.
        candidates: the cheapest that were weighed, the chosen one first.
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
    """Have a node load the prompt's first ``tokens``, then say PrefetchDone; nobody waits for it.

    It is the node that will go on after the prefill, or the one a waiting request will go to.
    """

    request_id: RequestId
    node_id: NodeId
    incarnation: Incarnation
    tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """No node has room for it now; say WaitOver at ``until_s`` unless told otherwise before."""

    request_id: RequestId
    until_s: float


@dataclass(frozen=True, slots=True)
class RefreshNodes:
    """Look at the list of nodes now: something about it is no longer true."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Stop listening to the node: its life ended. Say NodeLost, as if it had hung up."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the request up; the caller is told why, and after how long to try again."""

    request_id: RequestId
    failure: Failure
    reason: str
    retry_after_s: float = 1.0


Instruction = Locate | Dispatch | Prefetch | Wait | RefreshNodes | Abandon | Fail
