"""One life of one compute node as the scheduler knows it: its reports, and our account of it.

A part of the fleet, mutated only through SchedulerState. Between two heartbeats the record keeps
account of what was sent to the node, so that a burst does not all go to the node, or over the path,
that looked idle. Answers teach how far predictions are off (costing/correction.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tierkv.costing.correction import Correction
from tierkv.costing.node_cost import Rates
from tierkv.costing.node_service import speed_row
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import NodeInfo, NodeLoad, NodeRole
from tierkv.scheduler.events import SeenNode, WantedModel
from tierkv.scheduler.nodes.node_table import NodeTable

_NO_BYTES = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What a node was given to do before the first token of a request.

    Attributes:
        tokens: tokens to compute.
        compute_s: seconds that was predicted to take.
        load_bytes: bytes to load from L2, L3 and L4.
        predicted_s: predicted seconds to the first token, before any correction.
        corrected_s: the same, corrected.
    """

    tokens: int
    compute_s: float = 0.0
    load_bytes: tuple[float, float, float] = _NO_BYTES
    predicted_s: float = 0.0
    corrected_s: float = 0.0


class Peak(NamedTuple):
    """The most we had at a node between two looks at it: requests, tokens, and bytes by tier."""

    in_flight: int
    waiting_tokens: int
    load_bytes: tuple[float, float, float]


NOTHING = Peak(0, 0, _NO_BYTES)
LOOKS_COMPARED = 3
"""A report may be so many looks old: the node tells the meta server, and that tells us. What was
ours then must not be taken for that of others."""


def max_of(peaks: Iterable[Peak]) -> Peak:
    """The most of each over several times between looks."""
    in_flight, waiting_tokens, load_bytes = zip(*peaks, strict=True)
    l2, l3, l4 = map(max, zip(*load_bytes, strict=True))
    return Peak(max(in_flight), max(waiting_tokens), (l2, l3, l4))


class Account(NamedTuple):
    """What a node has to do, in the order of ``node_table.Figures``; see there.

    ``head_s`` is of the request it is at, which should have its first token at ``head_end_s``. When
    it has not, the node is late, by as much again as it is already.
    """

    l2_queued_bytes: float
    l3_queued_bytes: float
    l4_queued_bytes: float
    waiting_s: float
    head_s: float
    head_end_s: float
    others_tokens: int
    outstanding: int


@dataclass(slots=True, eq=False)
class NodeRecord:
    """One life of one node.

    Attributes:
        info: its registration; fixed for a life.
        load: its last heartbeat; ``rates`` are what it tells, or defaults.
        state: alive, suspect or dead, as the directory says.
        seen_s: when it was last in the list.
        table: where its figures are kept, in row ``row``; -1 when the life is over.
        in_flight: requests of ours it is working on.
        waiting_tokens: prompt tokens of ours it has not answered with a first token.
        others_in_flight: requests of other fronts, as far as its load tells.
        others_waiting_tokens: their prompt tokens.
        others_bytes: bytes it loads for them from L2, L3 and L4.
        correction: what its answers taught.
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
    table: NodeTable
    row: int
    in_flight: int = 0
    waiting_tokens: int = 0
    others_in_flight: int = 0
    others_waiting_tokens: int = 0
    others_bytes: tuple[float, float, float] = _NO_BYTES
    correction: Correction = field(default_factory=Correction)
    failures: int = 0
    suspended_until_s: float = 0.0
    probe: RequestId | None = None
    last_chosen: int = 0
    _work: dict[RequestId, tuple[Work, float]] = field(default_factory=dict)
    _bytes: tuple[float, float, float] = _NO_BYTES
    _peaks: deque[Peak] = field(default_factory=lambda: deque([NOTHING], maxlen=LOOKS_COMPARED))

    @property
    def outstanding(self) -> int:
        """Requests the node has, ours and others'."""
        return self.in_flight + self.others_in_flight

    @property
    def queued_bytes(self) -> tuple[float, float, float]:
        """Bytes it loads, or will, from L2, L3 and L4: ours and others'."""
        ours, others = self._bytes, self.others_bytes
        return (ours[0] + others[0], ours[1] + others[1], ours[2] + others[2])

    def observe(self, seen: SeenNode, rates: Rates, now: float) -> None:
        """Take over a heartbeat.

        What it reports beyond the most we had there lately belongs to other fronts.
        """
        load = seen.load
        self.info, self.load, self.state, self.seen_s = seen.info, load, seen.state, now
        self.rates = rates
        reported = load.requests_running + load.requests_waiting
        most = max_of(self._peaks)
        self.others_in_flight = max(0, reported - most.in_flight)
        self.others_waiting_tokens = max(0, load.waiting_prefill_tokens - most.waiting_tokens)
        ours = most.load_bytes
        self.others_bytes = (
            max(0.0, load.l2_queued_bytes - ours[0]),
            max(0.0, load.l3_queued_bytes - ours[1]),
            max(0.0, load.l4_queued_bytes - ours[2]),
        )
        self._peaks.append(self._now())
        self.correction.fade(now)
        self._note()

    def take(self, request_id: RequestId, work: Work, now: float) -> None:
        """Account for a request sent to the node."""
        self.in_flight += 1
        self.waiting_tokens += work.tokens
        self._work[request_id] = (work, now)
        self._move_bytes(work, 1.0)
        self._peaks[-1] = max_of((self._peaks[-1], self._now()))
        self._note()

    def _now(self) -> Peak:
        return Peak(self.in_flight, self.waiting_tokens, self._bytes)

    def answered(self, request_id: RequestId, now: float) -> None:
        """Its first token came: what it was to do before is done, and took so long."""
        if request_id in self._work:
            work, sent_s = self._work[request_id]
            self.correction.learn(work.predicted_s, now - sent_s, now)
            self._forget_work(request_id)
            self._note()

    def leave(self, request_id: RequestId) -> None:
        """The node has nothing more to do for the request."""
        self.in_flight -= 1
        self._forget_work(request_id)
        self._note()

    def _forget_work(self, request_id: RequestId) -> None:
        if request_id in self._work:
            work, _ = self._work.pop(request_id)
            self.waiting_tokens -= work.tokens
            self._move_bytes(work, -1.0)

    def _move_bytes(self, work: Work, sign: float) -> None:
        if not self._work:
            self._bytes = _NO_BYTES  # No rounding is left over.
        elif work.load_bytes != _NO_BYTES:
            l2, l3, l4 = (a + sign * b for a, b in zip(self._bytes, work.load_bytes, strict=True))
            self._bytes = (l2, l3, l4)

    def mark(self, serial: int) -> None:
        """Note that it was chosen: the serial number breaks ties."""
        self.last_chosen = serial
        self._note()

    def end(self) -> None:
        """Give the row back: this life is over."""
        if self.row >= 0:
            self.table.free_row(self.row, self)
            self.row = -1

    def _note(self) -> None:
        if self.row >= 0:
            self.table.note(self)

    def account(self) -> Account:
        """Say what it has to do; O(requests it has)."""
        head_s, head_end_s = 0.0, math.inf
        for work, sent_s in self._work.values():
            head_s, head_end_s = work.compute_s, sent_s + work.corrected_s
            break
        return Account(
            *self.queued_bytes,
            sum(work.compute_s for work, _ in self._work.values()),
            head_s,
            head_end_s,
            self.others_waiting_tokens,
            self.outstanding,
        )

    def write_row(self) -> None:
        """Write its figures into the table, as they are now."""
        load, correction = self.load, self.correction
        figures = (
            *speed_row(self.rates),
            *self.account(),
            *(load.decodes_running, load.decode_step_s),
            *(correction.overhead_s, correction.factor, correction.doubt),
            float(self.info.role is NodeRole.PREFILL),
            self.last_chosen,
        )
        self.table.put(self.row, figures)

    def usable(self, now: float) -> bool:
        """Whether a request may be sent there: trusted, or due for its one probe."""
        return self.failures == 0 or (now >= self.suspended_until_s and self.probe is None)

    def serves(self, wanted: WantedModel) -> bool:
        """Whether it serves the wanted model."""
        return any(wanted.matches(model) for model in self.info.models)

    def layout(self, wanted: WantedModel) -> BlockLayout:
        """KV layout of the wanted model, which the node serves."""
        return next(model.layout for model in self.info.models if wanted.matches(model))
