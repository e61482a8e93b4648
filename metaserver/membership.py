"""The members of the cluster and their liveness: a pure core.

Called by metaserver/state.py with ``now`` passed in; never reads a clock and never touches blocks.
Returns dead nodes, and the caller drops the blocks of these nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import OverloadedError, StaleEpochError
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.metaserver.client import DirectoryNode
from tierkv.metaserver.config import MetaConfig

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"


_RIVAL_SHOWN_S: Final = 10.0
"""How long a refused rival of a node is shown; a rival asks again every few seconds."""


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    report: NodeReport
    heard_at: float
    home: str = ""
    dead: bool = False
    rival: str = ""
    rival_at: float = 0.0


class Membership:
    """The nodes of the cluster by incarnation and last sign of life.

    Silence alone moves a node alive -> suspect -> dead -> forgotten. Dead is final for a
    registration: the node must register again and then sends an inventory.

    Attributes:
        _members: all nodes not yet forgotten, including dead nodes.
        _next_look_at: no node can die before this moment; saves a scan per call.
    """

    def __init__(self, config: MetaConfig) -> None:
        self._config = config
        self._members: dict[NodeId, _Member] = {}
        self._next_look_at = float("-inf")

    def register(self, info: NodeInfo, now: float, *, home: str = "") -> None:
        """Add a node or renew its registration.

        A newer incarnation is a restart of the node, unless the home differs. With another home the
        old incarnation may still be running, and the new one waits until the old one is dead.

        Args:
            info: the node.
            now: current time.
            home: an address that a single process of this name can have at a time; empty if
                unknown.

        Raises:
            StaleEpochError: a newer incarnation of the node is alive, or an incarnation at another
                home.
            OverloadedError: the cluster is full.
        """
        known = self._members.get(info.node_id)
        if known and not known.dead and known.info.incarnation != info.incarnation:
            _refuse_rival(known, info, home, now)
        if known is None and len(self._members) >= limits.MAX_NODES:
            raise OverloadedError(f"the cluster already has {limits.MAX_NODES} nodes")
        same = known is not None and known.info.incarnation == info.incarnation
        report = known.report if known is not None and same else NodeReport()
        self._members[info.node_id] = _Member(info, report, heard_at=now, home=home)

    def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport, now: float
    ) -> bool:
        """Record a sign of life; return False when the incarnation must register (again)."""
        member = self._members.get(node_id)
        if member is None or member.dead or member.info.incarnation != incarnation:
            return False
        member.heard_at = now
        member.report = report
        return True

    def deregister(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Remove a leaving node; return False when another incarnation is registered."""
        member = self._members.get(node_id)
        if member is None or member.info.incarnation != incarnation:
            return False
        del self._members[node_id]
        return True

    def expire(self, now: float) -> list[NodeId]:
        """Return nodes that died since the last call; forget nodes after a long silence."""
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

    def nodes(self, now: float) -> tuple[DirectoryNode, ...]:
        """Return every node with its state, sorted by name."""
        return tuple(
            DirectoryNode(
                info=member.info,
                report=member.report,
                heartbeat_age_s=max(0.0, now - member.heard_at),
                state=self._state_of(member, now),
                rival=member.rival if now - member.rival_at <= _RIVAL_SHOWN_S else "",
            )
            for _, member in sorted(self._members.items())
        )

    def _state_of(self, member: _Member, now: float) -> str:
        if member.dead:
            return DEAD
        return SUSPECT if now - member.heard_at >= self._config.suspect_after_s else ALIVE


def _refuse_rival(known: _Member, info: NodeInfo, home: str, now: float) -> None:
    """Raise StaleEpochError unless a process is the restart of a live node."""
    mine, others = known.info.incarnation, info.incarnation
    elsewhere = home and known.home and home != known.home
    if not elsewhere and mine < others:
        return
    why = (
        f"at {_place_of(known.info)}" if elsewhere else f"as incarnation {mine}; {others} is older"
    )
    known.rival, known.rival_at = _place_of(info), now
    raise StaleEpochError(
        f"node {info.node_id} is already running {why}",
        hint="give each running node its own node id (--node-id), or stop the other one",
    )


def _place_of(info: NodeInfo) -> str:
    address = info.control_address or info.data_address
    return f"{address} (host {info.host})"[: limits.MAX_REASON_CHARS] if address else info.host
