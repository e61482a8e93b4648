"""What can happen to a statement's plan, and what it may ask for in return.

Events go into ``PlanState.handle`` (scheduler/plans/plan_state.py); instructions come out and are
carried out by scheduler/plans/statement_run.py. Calls are named by their index in the statement,
stems by their number in the prefix tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.kvcore.ids import NodeId


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A node that calls may be sent to.

    Attributes:
        node_id: its name.
        room_blocks: blocks the plan may keep in use there at once; 0 is unknown, no limit.
        speed: of what a typical node of the model does in a time; 0.5 is half as fast.
    """

    node_id: NodeId
    room_blocks: int = 0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class CallsLocated:
    """Where calls have more of their KV than anywhere else; told before the first NodesSeen.

    Attributes:
        homes: per call its node; calls that no node has more of are missing.
    """

    homes: Mapping[int, NodeId]


@dataclass(frozen=True, slots=True)
class PlanSawNodes:
    """The nodes there are; the first one starts the plan. Whoever is missing was lost."""

    nodes: tuple[PlanNode, ...]


@dataclass(frozen=True, slots=True)
class PlanLostNode:
    """A node is gone: what was not sent there yet goes to the others."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class CallPrefilled:
    """The call's first token is there: its prompt is in the cache of its node."""

    call: int


@dataclass(frozen=True, slots=True)
class CallFinished:
    """The call has its answer."""

    call: int


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The call will have no answer. Nobody knows what of its prompt was computed."""

    call: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The statement is over, whatever is still running."""


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
        call: its index.
        node_id: where its prefix is, or will be; None: anywhere.
        resident_tokens: leading tokens of the prompt that the plan has on that node, or will.
        pending_calls: calls not sent yet that share ``pending_tokens`` with it.
        pending_tokens: leading tokens that they share. Without pending calls those it had in common
            with the others of its subtree; 0 when it never had any.
    """

    call: int
    node_id: NodeId | None
    resident_tokens: int
    pending_calls: int
    pending_tokens: int


@dataclass(frozen=True, slots=True)
class PrefetchRun:
    """Have a node load what the first call of its next subtree shares with others.

    Attributes:
        call: one that has the prefix.
        node_id: where it is going to run.
        stem: the end of the prefix.
        tokens: how many there are.
    """

    call: int
    node_id: NodeId
    stem: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the blocks from the root to the end of a stem; asked again when they are computed."""

    stem: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """No pending call needs a held stem any more."""

    stem: int


PlanInstruction = SendCall | PrefetchRun | Hold | LetGo
