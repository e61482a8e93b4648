"""Events of a statement's plan, and the instructions that the plan returns.

Events go into ``PlanState.handle`` (scheduler/plans/plan_state.py);
scheduler/plans/statement_run.py carries out the returned instructions. Calls are named by index in
the statement, stems by number in the prefix tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.kvcore.ids import NodeId


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A node that may get calls.

    Attributes:
        node_id: name of the node.
        room_blocks: upper bound on the plan's blocks in use on the node at once; 0: unknown, no
            limit.
        speed: speed relative to a typical node of the model; 0.5 is half as fast.
    """

    node_id: NodeId
    room_blocks: int = 0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class CallsLocated:
    """Nodes with most of a call's KV, without ties; sent before the first PlanSawNodes.

    Attributes:
        homes: per call its node; a call without a home is missing.
    """

    homes: Mapping[int, NodeId]


@dataclass(frozen=True, slots=True)
class PlanSawNodes:
    """The current nodes; the first event starts the plan. A missing node was lost."""

    nodes: tuple[PlanNode, ...]


@dataclass(frozen=True, slots=True)
class PlanLostNode:
    """A node is gone: its unsent calls go to the other nodes."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class CallPrefilled:
    """The call's first token has come: its prompt is in the cache of its node."""

    call: int


@dataclass(frozen=True, slots=True)
class CallFinished:
    """The call has its answer."""

    call: int


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The call will have no answer. How much of the prompt was computed is unknown."""

    call: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The statement is over, including calls still running."""


PlanEvent = (
    CallsLocated
    | PlanSawNodes
    | PlanLostNode
    | CallPrefilled
    | CallFinished
    | CallFailed
    | Cancelled
)


@dataclass(frozen=True, slots=True)
class SendCall:
    """Send a call now.

    Attributes:
        call: index of the call.
        node_id: the node with its prefix, now or later; None: any node.
        resident_tokens: leading tokens of the prompt on the node by the plan, now or later.
        pending_calls: unsent calls sharing ``pending_tokens`` with this call.
        pending_tokens: leading tokens shared with the pending calls. Without pending calls, the
            tokens in common with the rest of the subtree; 0 without any.
    """

    call: int
    node_id: NodeId | None
    resident_tokens: int
    pending_calls: int
    pending_tokens: int


@dataclass(frozen=True, slots=True)
class PrefetchRun:
    """Have a node load the shared prefix of the first call of the next subtree.

    Attributes:
        call: a call that has the prefix.
        node_id: the node that will run the call.
        stem: the last stem of the prefix.
        tokens: tokens of the prefix.
    """

    call: int
    node_id: NodeId
    stem: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Hold the blocks from the root to the end of a stem; repeated when the blocks are computed."""

    stem: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """No pending call needs a held stem any more."""

    stem: int


PlanInstruction = SendCall | PrefetchRun | Hold | LetGo
