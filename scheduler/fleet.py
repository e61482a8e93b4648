"""The compute nodes as the scheduler knows them: seen, loaded, suspected, probed.

A part of SchedulerState, mutated only through it. Between two heartbeats the fleet keeps its own
account of what was sent where, so that a burst does not all go to the node that looked idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvcore import limits
from kvcore.ids import NodeId, RequestId
from kvcore.layout import BlockLayout
from kvcore.node import ModelInfo, NodeInfo, NodeLoad, NodeRole
from scheduler.config import SchedulerConfig
from scheduler.cost import Rates, known_rates
from scheduler.events import SeenNode, Stage, WantedModel

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"
"""What the directory calls a node (metaserver.client.NodeState.state)."""

ABSENT_GRACE_S = 10.0
"""A node that vanished from the list stays usable this long: a restarted directory knows nobody."""


@dataclass(slots=True, eq=False)
class NodeRecord:
    """One life of one node.

    Attributes:
        info: its registration; fixed for a life.
        load: its last heartbeat; ``rates`` are what it tells, or defaults.
        state: alive, suspect or dead, as the directory says.
        seen_s: when it was last in the list.
        in_flight: requests of ours it is working on.
        waiting_tokens: prompt tokens of ours it has not answered with a first token.
        others_in_flight: requests of other fronts, as far as its load tells.
        others_waiting_tokens: their prompt tokens.
        failures: losses in a row; 0 means trusted.
        suspended_until_s: not used before that time while ``failures`` > 0.
        probe: the one request that may find out whether it is back.
        last_chosen: serial number of the last dispatch to it; breaks ties.
    """

    info: NodeInfo
    load: NodeLoad
    state: str
    seen_s: float
    rates: Rates
    in_flight: int = 0
    waiting_tokens: int = 0
    others_in_flight: int = 0
    others_waiting_tokens: int = 0
    failures: int = 0
    suspended_until_s: float = 0.0
    probe: RequestId | None = None
    last_chosen: int = 0
    _peak_in_flight: int = 0
    _peak_waiting_tokens: int = 0

    @property
    def outstanding(self) -> int:
        """Requests the node has, ours and others'."""
        return self.in_flight + self.others_in_flight

    def observe(self, seen: SeenNode, rates: Rates, now: float) -> None:
        """Take over a heartbeat.

        What it reports beyond the most we had there since the last look belongs to other fronts.
        """
        self.info, self.load, self.state, self.seen_s = seen.info, seen.load, seen.state, now
        self.rates = rates
        reported = seen.load.requests_running + seen.load.requests_waiting
        self.others_in_flight = max(0, reported - self._peak_in_flight)
        self.others_waiting_tokens = max(
            0, seen.load.waiting_prefill_tokens - self._peak_waiting_tokens
        )
        self._peak_in_flight, self._peak_waiting_tokens = self.in_flight, self.waiting_tokens

    def add(self, tokens: int) -> None:
        """Account for a request sent to the node."""
        self.in_flight += 1
        self.waiting_tokens += tokens
        self._peak_in_flight = max(self._peak_in_flight, self.in_flight)
        self._peak_waiting_tokens = max(self._peak_waiting_tokens, self.waiting_tokens)

    def usable(self, now: float) -> bool:
        """Whether a request may be sent there: trusted, or due for its one probe."""
        return self.failures == 0 or (now >= self.suspended_until_s and self.probe is None)

    def serves(self, wanted: WantedModel) -> bool:
        """Whether it serves the wanted model."""
        return any(wanted.matches(model) for model in self.info.models)

    def layout(self, wanted: WantedModel) -> BlockLayout:
        """KV layout of the wanted model, which the node serves."""
        return next(model.layout for model in self.info.models if wanted.matches(model))


class Fleet:
    """All nodes by id.

    Attributes:
        records: the current life of each node; superseded lives live on in their requests only.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.records: dict[NodeId, NodeRecord] = {}
        self._config = config
        self._serving: dict[WantedModel, list[NodeRecord]] = {}

    def see(self, nodes: Iterable[SeenNode], now: float) -> list[NodeRecord]:
        """Take over a list of nodes.

        Returns:
            lives that ended: replaced by a newer incarnation, or called dead.
        """
        ended: list[NodeRecord] = []
        self._serving.clear()
        for seen in nodes:
            rates = known_rates(seen.load, self._config)
            known = self.records.get(seen.info.node_id)
            if known is not None and known.info.incarnation > seen.info.incarnation:
                continue
            if known is None or known.info.incarnation < seen.info.incarnation:
                if known is not None:
                    ended.append(known)
                known = NodeRecord(seen.info, seen.load, seen.state, now, rates)
                self.records[seen.info.node_id] = known
            known.observe(seen, rates, now)
            if known.state == DEAD:
                ended.append(known)
        self._age(now)
        return ended

    def _age(self, now: float) -> None:
        for node_id, record in list(self.records.items()):
            if record.seen_s < now and record.state == ALIVE:
                record.state = SUSPECT
            if now - record.seen_s > ABSENT_GRACE_S:
                del self.records[node_id]

    def serving(self, wanted: WantedModel) -> list[NodeRecord]:
        """Nodes that serve a model, whatever their state; found once per look at the list."""
        found = self._serving.get(wanted)
        if found is None:
            if len(self._serving) >= limits.MAX_MODELS_PER_NODE:
                self._serving.clear()
            found = [record for record in self.records.values() if record.serves(wanted)]
            self._serving[wanted] = found
        return found

    def candidates(
        self,
        wanted: WantedModel,
        stage: Stage,
        *,
        refused: Collection[NodeId],
        now: float,
    ) -> list[NodeRecord]:
        """Nodes that could take a stage, only those of the best rank there is.

        A node of the wrong role is better than a suspect's silence but worse than a suspect of the
        right role; a node called dead is asked last, in case only its heartbeats were lost.
        """
        ranked: dict[int, list[NodeRecord]] = {}
        for record in self.records.values():
            if record.usable(now) and record.info.node_id not in refused and record.serves(wanted):
                ranked.setdefault(_rank(record, stage), []).append(record)
        return ranked[min(ranked)] if ranked else []

    def decoders(
        self, wanted: WantedModel, *, refused: Collection[NodeId], now: float
    ) -> list[NodeRecord]:
        """Live nodes that are there to continue answers others began, not to begin them."""
        return [
            r
            for r in self.serving(wanted)
            if r.info.role is NodeRole.DECODE
            and r.state == ALIVE
            and r.usable(now)
            and r.info.node_id not in refused
        ]

    def decodes_elsewhere(self, wanted: WantedModel, now: float) -> bool:
        """Whether some live node continues answers that a prefill node began."""
        return any(
            r.info.role.decodes and r.state == ALIVE and r.usable(now) for r in self.serving(wanted)
        )

    def next_probe_s(self, wanted: WantedModel, now: float) -> float | None:
        """When the next suspended node of that model may be tried; None if there is none."""
        times = [
            r.suspended_until_s for r in self.serving(wanted) if r.failures and r.probe is None
        ]
        return max(now, min(times)) if times else None

    def fail(self, record: NodeRecord, request_id: RequestId, now: float) -> None:
        """Suspend a node, twice as long as the last time.

        Requests that were lost together count once: only the probe, or the first of them, does.
        """
        if record.failures and record.probe != request_id:
            return
        record.probe = None
        record.failures += 1
        backoff_s = self._config.backoff_initial_s * 2.0 ** min(record.failures - 1, 16)
        record.suspended_until_s = now + min(backoff_s, self._config.backoff_max_s)

    def models(self) -> tuple[ModelInfo, ...]:
        """Models of all nodes, by name; live nodes' word counts first, then that of the doubted."""
        found: dict[str, ModelInfo] = {}
        for state in (ALIVE, SUSPECT, DEAD):
            for record in self.records.values():
                if record.state == state:
                    for model in record.info.models:
                        found.setdefault(model.name, model)
        return tuple(found[name] for name in sorted(found))


def _rank(record: NodeRecord, stage: Stage) -> int:
    if record.state == DEAD:
        return 4
    role = record.info.role
    fits = role.decodes if stage is Stage.DECODE else role.prefills
    return (0 if fits else 2) + (1 if record.state == SUSPECT else 0)
