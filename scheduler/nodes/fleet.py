"""The compute nodes in the scheduler's view, and which of them may be asked.

A part of SchedulerState, mutated only through SchedulerState. The data of a single node is in
scheduler/nodes/node_record.py; this file tracks the list: seen, suspected and probed nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.node_cost import known_rates, typical_load
from tierkv.costing.node_service import NodeSpeeds, typical_speeds
from tierkv.kvcore import limits
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.node import ModelInfo, NodeLoad, NodeRole
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import SeenNode, Stage, WantedModel
from tierkv.scheduler.nodes.node_record import NodeRecord, NodeTable
from tierkv.scheduler.shared_state.contract import NO_WORK, FrontWork

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"
"""States of a node in the directory (tierkv.metaserver.client.DirectoryNode.state)."""

ABSENT_GRACE_S = 10.0
"""A node missing from the list stays usable this long: a restarted directory lists no nodes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates prepared for one comparison.

    Attributes:
        nodes: the candidates in order.
        rows: their rows in the table.
        positions: index of each node in ``nodes``.
        typical: speeds of a typical candidate.
    """

    nodes: Sequence[NodeRecord]
    rows: NDArray[np.intp]
    positions: Mapping[NodeId, int]
    typical: NodeSpeeds


class Fleet:
    """All nodes by id.

    Attributes:
        config: default rates and suspension times.
        records: the current incarnation of each node; only requests refer to earlier incarnations.
        table: figures of all records.
        pool_nodes: nodes whose memory and disks make up L3 and L4; 0: unknown.
        changes: number of changes to the set of usable nodes.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.records: dict[NodeId, NodeRecord] = {}
        self.table = NodeTable()
        self.pool_nodes = 0
        self.changes = 0
        self._lists: dict[tuple[WantedModel, str], list[NodeRecord]] = {}
        self._groups: dict[int, Group] = {}
        self._models: tuple[ModelInfo, ...] | None = None
        self._all_usable = True

    def see(self, nodes: Iterable[SeenNode], now: float) -> list[NodeRecord]:
        """Apply a list of nodes.

        Returns:
            incarnations that ended: replaced by a newer incarnation, or reported as dead.
        """
        ended: list[NodeRecord] = []
        self._lists.clear()
        self._groups.clear()
        self._models = None
        self.changes += 1
        nodes = tuple(nodes)
        typical = _typical_loads(nodes)
        for seen in nodes:
            like = next((typical[m] for m in map(_weights, seen.info.models) if m in typical), None)
            rates = known_rates(seen.load, self.config.rates, typical=like)
            known = self.records.get(seen.info.node_id)
            if known is not None and known.info.incarnation > seen.info.incarnation:
                continue
            if known is None or known.info.incarnation < seen.info.incarnation:
                if known is not None:
                    known.end()
                    ended.append(known)
                row = self.table.take_row()
                known = NodeRecord(seen.info, seen.load, seen.state, now, rates, self.table, row)
                self.records[seen.info.node_id] = known
            known.observe(seen, rates, now)
            if known.state == DEAD:
                ended.append(known)
        self._age(now)
        self._all_usable = not any(record.failures for record in self.records.values())
        return ended

    def see_others(self, work: Mapping[NodeId, FrontWork], now: float) -> None:
        """Apply the work of other fronts at the nodes, as told by the fronts."""
        for node_id, record in self.records.items():
            record.observe_others(work.get(node_id, NO_WORK), now)

    def _age(self, now: float) -> None:
        for node_id, record in list(self.records.items()):
            if record.seen_s < now and record.state == ALIVE:
                record.state = SUSPECT
            if now - record.seen_s > ABSENT_GRACE_S:
                record.end()
                del self.records[node_id]

    def serving(self, wanted: WantedModel) -> list[NodeRecord]:
        """Return the nodes that serve a model, in any state."""
        return self._found(
            (wanted, "serving"), lambda: [r for r in self.records.values() if r.serves(wanted)]
        )

    def _found(
        self, key: tuple[WantedModel, str], find: Callable[[], list[NodeRecord]]
    ) -> list[NodeRecord]:
        """Find nodes once per refresh of the list; callers do not change the returned list."""
        found = self._lists.get(key)
        if found is None:
            if len(self._lists) >= 4 * limits.MAX_MODELS_PER_NODE:
                self._lists.clear()
                self._groups.clear()
            found = self._lists[key] = find()
        return found

    def group(self, nodes: Sequence[NodeRecord]) -> Group:
        """Prepare nodes for comparison; cached for lists that this fleet returned."""
        known = self._groups.get(id(nodes))
        if known is not None and known.nodes is nodes:
            return known
        rows = np.array([record.row for record in nodes], dtype=np.intp)
        positions = {r.info.node_id: at for at, r in enumerate(nodes)}
        group = Group(nodes, rows, positions, typical_speeds(self.table.figures(rows).speeds))
        if any(found is nodes for found in self._lists.values()):
            self._groups[id(nodes)] = group
        return group

    def candidates(
        self,
        wanted: WantedModel,
        stage: Stage,
        *,
        refused: Collection[NodeId],
        now: float,
    ) -> list[NodeRecord]:
        """Return the nodes that could take a stage; only the nodes of the best rank.

        A suspect node of the right role ranks above an alive node of the wrong role. A dead node
        ranks last; it is asked only in case merely its heartbeats were lost.
        """
        if self._all_usable and not refused:
            key = (wanted, "decode" if stage is Stage.DECODE else "prefill")
            return self._found(key, lambda: _best_ranked(self.serving(wanted), stage))
        usable = [
            record
            for record in self.serving(wanted)
            if record.usable(now) and record.info.node_id not in refused
        ]
        return _best_ranked(usable, stage)

    def decoders(
        self, wanted: WantedModel, *, refused: Collection[NodeId], now: float
    ) -> list[NodeRecord]:
        """Return live decode nodes: they continue answers begun elsewhere, but begin none."""
        found = self._found((wanted, "decoders"), lambda: self._live_decoders(wanted))
        return [r for r in found if r.usable(now) and r.info.node_id not in refused]

    def _live_decoders(self, wanted: WantedModel) -> list[NodeRecord]:
        return [
            r for r in self.serving(wanted) if r.info.role is NodeRole.DECODE and r.state == ALIVE
        ]

    def decodes_elsewhere(self, wanted: WantedModel, now: float) -> bool:
        """Return whether some live node continues answers that a prefill node began."""
        return any(
            r.info.role.decodes and r.state == ALIVE and r.usable(now) for r in self.serving(wanted)
        )

    def next_probe_s(self, wanted: WantedModel, now: float) -> float | None:
        """Return when a suspended node of a model may be tried; None if no node is suspended."""
        times = [
            r.suspended_until_s for r in self.serving(wanted) if r.failures and r.probe is None
        ]
        return max(now, min(times)) if times else None

    def fail(self, record: NodeRecord, request_id: RequestId, now: float) -> None:
        """Suspend a node, twice as long as the last time.

        Requests lost together count once: only the probe, or the first lost request, counts.
        """
        if record.failures and record.probe != request_id:
            return
        record.probe = None
        record.failures += 1
        self.changes += 1
        self._all_usable = False
        backoff_s = self.config.backoff_initial_s * 2.0 ** min(record.failures - 1, 16)
        record.suspended_until_s = now + min(backoff_s, self.config.backoff_max_s)

    def trust(self, record: NodeRecord) -> None:
        """Clear the failures and the probe of a node."""
        record.failures, record.probe = 0, None
        self.changes += 1

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models of all nodes by name; alive nodes win, then suspect, then dead."""
        if self._models is None:
            self._models = self._find_models()
        return self._models

    def _find_models(self) -> tuple[ModelInfo, ...]:
        found: dict[str, ModelInfo] = {}
        for state in (ALIVE, SUSPECT, DEAD):
            for record in self.records.values():
                if record.state == state:
                    for model in record.info.models:
                        found.setdefault(model.name, model)
        return tuple(found[name] for name in sorted(found))


def _weights(model: ModelInfo) -> tuple[str, str]:
    return model.name, model.revision


def _typical_loads(nodes: Sequence[SeenNode]) -> dict[tuple[str, str], NodeLoad]:
    """Find the typical load of each model that several nodes serve and some have computed."""
    loads: dict[tuple[str, str], list[NodeLoad]] = {}
    for seen in nodes:
        for model in seen.info.models:
            loads.setdefault(_weights(model), []).append(seen.load)
    found = {name: typical_load(some) for name, some in loads.items() if len(some) > 1}
    return {name: load for name, load in found.items() if load is not None}


def _best_ranked(records: Sequence[NodeRecord], stage: Stage) -> list[NodeRecord]:
    ranked: dict[int, list[NodeRecord]] = {}
    for record in records:
        ranked.setdefault(_rank(record, stage), []).append(record)
    return ranked[min(ranked)] if ranked else []


def _rank(record: NodeRecord, stage: Stage) -> int:
    if record.state == DEAD:
        return 4
    role = record.info.role
    fits = role.decodes if stage is Stage.DECODE else role.prefills
    return (0 if fits else 2) + (1 if record.state == SUSPECT else 0)
