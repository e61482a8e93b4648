"""One live request in the scheduler's core: its phase, its node, its story.

A part of SchedulerState, mutated only through SchedulerState. TRANSITIONS lists the allowed moves
between phases; any other move raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tierkv.costing.node_cost import NOTHING_CACHED, CachedPrefix
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.scheduler.events import RequestArrived, Stage
from tierkv.scheduler.nodes.node_record import NodeRecord

STORY_LINES = 32


class RequestPhase(StrEnum):
    """Phase in the life of a request."""

    LOCATING = "locating"
    RUNNING = "running"
    WAITING = "waiting"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({RequestPhase.LOCATING, RequestPhase.RUNNING, RequestPhase.WAITING})

TRANSITIONS: dict[RequestPhase, frozenset[RequestPhase]] = {
    RequestPhase.LOCATING: frozenset(
        {RequestPhase.RUNNING, RequestPhase.WAITING, RequestPhase.FAILED, RequestPhase.CANCELLED}
    ),
    RequestPhase.WAITING: frozenset(
        {RequestPhase.RUNNING, RequestPhase.WAITING, RequestPhase.FAILED, RequestPhase.CANCELLED}
    ),
    RequestPhase.RUNNING: frozenset(
        {
            RequestPhase.RUNNING,
            RequestPhase.WAITING,
            RequestPhase.FINISHED,
            RequestPhase.FAILED,
            RequestPhase.CANCELLED,
        }
    ),
}
"""All allowed moves of a request; any other move is a bug here and raises with the request's story.
"""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One live request.

    Attributes:
        arrived: the arrival event.
        phase: see TRANSITIONS.
        stage: the stage of the next (or running) dispatch.
        total_tokens: prompt tokens and generated tokens.
        near: blocks near each node; pool: blocks anywhere.
        node: the node running the request; None unless RUNNING.
        queued_tokens: tokens of this request in ``node.waiting_tokens`` until the first token
            comes.
        refused: nodes whose queue was full.
        lives_lost: incarnations of nodes that died while serving the request.
        losses: incarnations lost, and streams lost after progress.
        attempts: number of sends.
        arrived_s: arrival time.
        due_s: arrival time, later by the request's priority.
        rank: orders waiting requests: the time of the request's turn, and a number. The turn is
            ``due_s``, or later if others of the tenant wait (choosing/admission.py).
        has_turn: the turn is settled, also if the request waits again.
        waiting_since_s: when the request last began to wait.
        service_s: predicted seconds of the prefill, loading included, at the chosen node.
        awaits: the node for which the request waits; None unless WAITING for room at a node.
        awaited_tokens: tokens to be added to the queue of ``awaits``.
        asked_ahead: a node was asked to load blocks ahead since the request last began to wait.
        ahead: the node loading blocks ahead now; None: no node.
        successor: the node that continues after the prefill stage; it loads blocks ahead.
        prefetched_tokens: tokens of the prompt that the successor was told to load.
        give_up_s: when waiting ends; None while the answer makes progress.
        story: past events with their times, oldest first, bounded.
    """

    arrived: RequestArrived
    phase: RequestPhase = RequestPhase.LOCATING
    stage: Stage = Stage.WHOLE
    total_tokens: int = 0
    near: dict[NodeId, CachedPrefix] = field(default_factory=dict)
    pool: CachedPrefix = NOTHING_CACHED
    node: NodeRecord | None = None
    queued_tokens: int = 0
    refused: set[NodeId] = field(default_factory=set)
    lives_lost: set[tuple[NodeId, int]] = field(default_factory=set)
    losses: int = 0
    attempts: int = 0
    arrived_s: float = 0.0
    due_s: float = 0.0
    rank: tuple[float, int] = (0.0, 0)
    has_turn: bool = False
    waiting_since_s: float = 0.0
    service_s: float = 0.0
    awaits: NodeId | None = None
    awaited_tokens: int = 0
    asked_ahead: bool = False
    ahead: NodeId | None = None
    successor: NodeRecord | None = None
    prefetched_tokens: int = 0
    first_token_seen: bool = False
    give_up_s: float | None = None
    story: list[tuple[float, str]] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        """Return the request's id."""
        return self.arrived.request_id

    def is_urgent(self, now: float) -> bool:
        """Return False for bulk, until its lower priority is outweighed by the time it waited."""
        return self.due_s <= now

    def tell(self, what: str, now: float) -> None:
        """Add a line to the story."""
        self.story.append((now, what))
        if len(self.story) > STORY_LINES:
            del self.story[0]

    def move(self, phase: RequestPhase, now: float) -> None:
        """Go to another phase.

        Raises:
            InvalidTransition: TRANSITIONS does not allow the move.
        """
        if phase not in TRANSITIONS[self.phase]:
            story = "; ".join(f"{at_s:.3f} {what}" for at_s, what in self.story)
            raise InvalidTransition(
                f"{self.request_id}: {self.phase} -> {phase} is no transition ({story})"
            )
        self.phase = phase
        self.tell(phase, now)


class InvalidTransition(AssertionError):
    """A request made a move that TRANSITIONS does not allow; carries the request's story."""
