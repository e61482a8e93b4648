"""Who is in the cluster and who still answers: a pure core.

Called by metaserver/state.py with ``now`` handed in; it never looks at a clock and never touches
blocks. It answers who died, and the caller drops what they held.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore import limits
from kvcore.errors import OverloadedError, StaleEpochError
from kvcore.ids import Incarnation, NodeId
from kvcore.node import NodeInfo, NodeReport
from metaserver.client import NodeState
from metaserver.config import MetaConfig

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    report: NodeReport
    heard_at: float
    dead: bool = False


class Membership:
    """The nodes of the cluster by incarnation and last sign of life.

    A node goes alive -> suspect -> dead -> forgotten by silence alone. Dead is final for one
    registration: the node must register again, so that it also sends an inventory.

    Attributes:
        _members: every node not yet forgotten, dead ones included.
        _next_look_at: nobody can die before this moment; spares a scan per call.
    """

    def __init__(self, config: MetaConfig) -> None:
        self._config = config
        self._members: dict[NodeId, _Member] = {}
        self._next_look_at = float("-inf")

    def register(self, info: NodeInfo, now: float) -> None:
        """Take a node in, or renew it.

        Raises:
            StaleEpochError: a newer incarnation of that node is alive.
            OverloadedError: the cluster is full.
        """
        known = self._members.get(info.node_id)
        if known and not known.dead and known.info.incarnation > info.incarnation:
            raise StaleEpochError(
                f"node {info.node_id} is already running as incarnation "
                f"{known.info.incarnation}; {info.incarnation} is older",
                hint="give each running node its own node id",
            )
        if known is None and len(self._members) >= limits.MAX_NODES:
            raise OverloadedError(f"the cluster already has {limits.MAX_NODES} nodes")
        same = known is not None and known.info.incarnation == info.incarnation
        report = known.report if known is not None and same else NodeReport()
        self._members[info.node_id] = _Member(info=info, report=report, heard_at=now)

    def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport, now: float
    ) -> bool:
        """Note a sign of life; False when that incarnation must register (again)."""
        member = self._members.get(node_id)
        if member is None or member.dead or member.info.incarnation != incarnation:
            return False
        member.heard_at = now
        member.report = report
        return True

    def deregister(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Forget a node that leaves; False when another incarnation is registered."""
        member = self._members.get(node_id)
        if member is None or member.info.incarnation != incarnation:
            return False
        del self._members[node_id]
        return True

    def expire(self, now: float) -> list[NodeId]:
        """Return who died since the last call; forget who has been silent for long."""
        if now < self._next_look_at:
            return []
        self._next_look_at = now + self._config.heartbeat_interval_s / 4
        died = []
        for node_id, member in list(self._members.items()):
            silence_s = now - member.heard_at
            if silence_s >= self._config.dead_after_s and not member.dead:
                member.dead = True
                died.append(node_id)
            if silence_s >= self._config.forget_after_s:
                del self._members[node_id]
        return died

    def nodes(self, now: float) -> tuple[NodeState, ...]:
        """Return every node with its state, sorted by name."""
        return tuple(
            NodeState(
                info=member.info,
                report=member.report,
                heartbeat_age_s=max(0.0, now - member.heard_at),
                state=self._state_of(member, now),
            )
            for _, member in sorted(self._members.items())
        )

    def _state_of(self, member: _Member, now: float) -> str:
        if member.dead:
            return DEAD
        return SUSPECT if now - member.heard_at >= self._config.suspect_after_s else ALIVE
