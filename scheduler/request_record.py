"""One live request as the scheduler's core sees it: its phase, its node, its story.

A part of SchedulerState, mutated only through it. TRANSITIONS is the truth about what may follow
what; anything else raises.
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
    """Where a request is in its life."""

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
"""Every move a request may make; anything else is our bug and raises with its story."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One live request.

    Attributes:
        arrived: what came in.
        phase: see TRANSITIONS.
        stage: what the next (or running) dispatch asks for.
        total_tokens: prompt and what was generated so far.
        near: blocks near each node; pool: blocks anywhere.
        node: who runs it; None unless RUNNING.
        queued_tokens: what it adds to ``node.waiting_tokens`` until its first token.
        refused: nodes whose queue was full.
        lives_lost: lives of nodes that died under it.
        losses: lives lost, and streams lost after progress.
        attempts: sends so far.
        arrived_s: when it came; ``rank`` orders it among those that wait.
        waiting_since_s: when it last began to wait.
        service_s: predicted seconds of its prefill, loading included, where it would go.
        awaits: the node it waits for; None unless WAITING for room at one.
        awaited_tokens: what it will add to that node's queue.
        asked_ahead: a node was asked to load its blocks, since it last began to wait.
        ahead: the node that does that now; None: nobody.
        successor: who is to go on after the prefill stage; it loads ahead.
        prefetched_tokens: how much of the prompt it was told to load.
        give_up_s: when waiting ends; None while the answer makes progress.
        story: what happened to it and when, oldest first, bounded.
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
    rank: tuple[float, int] = (0.0, 0)
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
        """Its name."""
        return self.arrived.request_id

    def tell(self, what: str, now: float) -> None:
        """Add a line to the story."""
        self.story.append((now, what))
        if len(self.story) > STORY_LINES:
            del self.story[0]

    def move(self, phase: RequestPhase, now: float) -> None:
        """Go to another phase.

        Raises:
            InvalidTransition: TRANSITIONS does not have it.
        """
        if phase not in TRANSITIONS[self.phase]:
            story = "; ".join(f"{at_s:.3f} {what}" for at_s, what in self.story)
            raise InvalidTransition(
                f"{self.request_id}: {self.phase} -> {phase} is no transition ({story})"
            )
        self.phase = phase
        self.tell(phase, now)


class InvalidTransition(AssertionError):
    """A request was moved in a way TRANSITIONS does not allow; carries its story."""
