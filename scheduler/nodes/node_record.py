"""One incarnation of one compute node: reports of the node, and our account of requests sent there.

Parts of the fleet, mutated only through SchedulerState. Between two heartbeats the record counts
the requests sent to the node, so a burst is spread over nodes and paths, even if a single node or
path looked idle. Answers correct later predictions (costing/correction.py). Each record keeps its
row in a table of all nodes' figures up to date, and scheduler/choosing/ reads columns: with a
hundred nodes this is fifty times faster than a loop over records.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.correction import Column, Correction, Corrections
from tierkv.costing.node_cost import Rates
from tierkv.costing.node_service import SPEED_ROWS, Columns, NodeSpeeds, speed_row, speeds_of
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import NodeInfo, NodeLoad, NodeRole
from tierkv.scheduler.events import SeenNode, WantedModel
from tierkv.scheduler.shared_state.contract import KEPT_S, FrontWork

_GROWTH = 64

_NO_BYTES = (0.0, 0.0, 0.0)


class Figures(NamedTuple):
    """Figures of some nodes, one number per node; seconds, bytes and tokens.

    Attributes:
        speeds: compute and load speeds.
        queued: [3, nodes] bytes being or to be loaded from L2, L3 and L4.
        waiting_s: seconds of computing for our requests, as predicted at dispatch.
        head_s, head_end_s: the part of ``waiting_s`` of the current request, and when it is due.
        others_tokens: tokens to compute for other fronts.
        outstanding: requests at the node.
        decodes, decode_step_s: requests being decoded, and seconds of one decode step.
        learned: corrections from earlier prediction errors.
        hands_over: 1.0 for a node that only prefills.
        last_chosen: serial number of the last request sent to the node.
    """

    speeds: NodeSpeeds
    queued: Columns
    waiting_s: Column
    head_s: Column
    head_end_s: Column
    others_tokens: Column
    outstanding: Column
    decodes: Column
    decode_step_s: Column
    learned: Corrections
    hands_over: Column
    last_chosen: Column


_QUEUED = slice(SPEED_ROWS, SPEED_ROWS + 3)
_ACCOUNT = slice(_QUEUED.stop, _QUEUED.stop + 7)
_LEARNED = slice(_ACCOUNT.stop, _ACCOUNT.stop + 3)
_WIDTH = _LEARNED.stop + 2


class NodeTable:
    """Rows of figures; a row belongs to one record until the row is freed.

    Changes between two reads are written once, before the second read; ``note`` announces a change.
    """

    def __init__(self) -> None:
        self._values = np.zeros((_WIDTH, _GROWTH))
        self._free = list(range(_GROWTH - 1, -1, -1))
        self._changed: dict[NodeRecord, None] = {}

    def take_row(self) -> int:
        """Return a free row of zeros."""
        if not self._free:
            size = self._values.shape[1]
            self._values = np.hstack((self._values, np.zeros((_WIDTH, size))))
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def free_row(self, row: int, owner: NodeRecord) -> None:
        """Free a row."""
        self._changed.pop(owner, None)
        self._values[:, row] = 0.0
        self._free.append(row)

    def note(self, owner: NodeRecord) -> None:
        """Mark the owner's row as out of date."""
        self._changed[owner] = None

    def put(self, row: int, figures: Sequence[float]) -> None:
        """Set all figures of a row, in the order of ``Figures``."""
        self._values[:, row] = figures

    def figures(self, rows: NDArray[np.intp]) -> Figures:
        """Copy the figures of the given rows, in this order."""
        self._write_changed()
        some = self._values[:, rows]
        columns = (*some[_ACCOUNT], Corrections(*some[_LEARNED]), *some[_LEARNED.stop :])
        return Figures(speeds_of(some), some[_QUEUED], *columns)

    def queued_bytes(self) -> Column:
        """Sum the bytes queued from L2, L3 and L4 over all nodes."""
        self._write_changed()
        total: Column = self._values[_QUEUED].sum(axis=1)
        return total

    def _write_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for owner in changed:
            owner.write_row()


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a node for a request before the first token.

    Attributes:
        tokens: tokens to compute.
        compute_s: predicted seconds to compute the tokens.
        load_bytes: bytes to load from L2, L3 and L4.
        predicted_s: predicted seconds to the first token, before any correction.
        corrected_s: predicted seconds to the first token, after correction.
    """

    tokens: int
    compute_s: float = 0.0
    load_bytes: tuple[float, float, float] = _NO_BYTES
    predicted_s: float = 0.0
    corrected_s: float = 0.0


class Peak(NamedTuple):
    """Maximum of our work at a node in some span: requests, tokens, and bytes by tier."""

    in_flight: int
    waiting_tokens: int
    load_bytes: tuple[float, float, float]


NOTHING = Peak(0, 0, _NO_BYTES)
PEAKS_KEPT, PEAK_S = 3, 0.9
"""A heartbeat is compared with our maximum over three spans of at least ``PEAK_S`` seconds. Nodes
report once a second and the report travels by the meta server, so it may be two seconds old however
often the list is refreshed. Our work of that time must not be counted as work of other fronts."""


def max_of(peaks: Iterable[Peak]) -> Peak:
    """Return the maximum of each field over several peaks."""
    in_flight, waiting_tokens, load_bytes = zip(*peaks, strict=True)
    l2, l3, l4 = map(max, zip(*load_bytes, strict=True))
    return Peak(max(in_flight), max(waiting_tokens), (l2, l3, l4))


class Account(NamedTuple):
    """Pending work of a node, in the order of ``Figures``; see there.

    ``head_s`` belongs to the request being computed, whose first token is due at ``head_end_s``.
    After ``head_end_s`` the node is late, and is predicted to stay late for as long again.
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
    """One incarnation of one node.

    Attributes:
        info: registration of the node; fixed for an incarnation.
        load: last heartbeat; ``rates`` are the reported rates, or defaults.
        state: alive, suspect or dead, as reported by the directory.
        seen_s: when the node was last in the list.
        table: holds the figures in row ``row``; -1 after the incarnation has ended.
        in_flight: our requests at the node.
        waiting_tokens: prompt tokens of our requests without a first token.
        others_in_flight: requests of other fronts: as the fronts say, or derived from the
            heartbeat.
        others_waiting_tokens: prompt tokens of these requests.
        others_bytes: bytes that the node loads for these requests from L2, L3 and L4.
        other_fronts: how many other fronts have requests at the node; 0 if fronts do not tell.
        others_told_s: when the other fronts told last.
        correction: learned from the node's answers.
        failures: losses in a row; 0 means trusted.
        suspended_until_s: not used before this time while ``failures`` > 0.
        probe: the single request that may test a suspended node.
        last_chosen: serial number of the last dispatch to the node; breaks ties.
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
    other_fronts: int = 0
    others_told_s: float = -math.inf
    correction: Correction = field(default_factory=Correction)
    failures: int = 0
    suspended_until_s: float = 0.0
    probe: RequestId | None = None
    last_chosen: int = 0
    _work: dict[RequestId, tuple[Work, float]] = field(default_factory=dict)
    _compute_s: float = 0.0
    _bytes: tuple[float, float, float] = _NO_BYTES
    _peaks: deque[Peak] = field(default_factory=lambda: deque([NOTHING], maxlen=PEAKS_KEPT))
    _peak_began_s: float = -math.inf

    @property
    def outstanding(self) -> int:
        """Return the number of requests at the node, ours and others'."""
        return self.in_flight + self.others_in_flight

    @property
    def queued_bytes(self) -> tuple[float, float, float]:
        """Return the bytes being or to be loaded from L2, L3 and L4: ours and others'."""
        ours, others = self._bytes, self.others_bytes
        return (ours[0] + others[0], ours[1] + others[1], ours[2] + others[2])

    def observe(self, seen: SeenNode, rates: Rates, now: float) -> None:
        """Apply a heartbeat.

        Reported work beyond our recent maximum at the node belongs to other fronts.
        """
        load = seen.load
        self.info, self.load, self.state, self.seen_s = seen.info, load, seen.state, now
        self.rates = rates
        reported = load.requests_running + load.requests_waiting
        most = max_of(self._peaks)
        if now - self.others_told_s >= KEPT_S:
            self.other_fronts = 0
            self.others_in_flight = max(0, reported - most.in_flight)
            self.others_waiting_tokens = max(0, load.waiting_prefill_tokens - most.waiting_tokens)
        ours = most.load_bytes
        self.others_bytes = (
            max(0.0, load.l2_queued_bytes - ours[0]),
            max(0.0, load.l3_queued_bytes - ours[1]),
            max(0.0, load.l4_queued_bytes - ours[2]),
        )
        if now - self._peak_began_s >= PEAK_S:
            self._peaks.append(self._now())
            self._peak_began_s = now
        self.correction.fade(now)
        self._note()

    def observe_others(self, work: FrontWork, now: float) -> None:
        """Apply what other fronts say; heartbeats do not count for a while, being older."""
        self.others_told_s, self.other_fronts = now, work.fronts
        self.others_in_flight = work.requests
        self.others_waiting_tokens = work.waiting_tokens
        self._note()

    def take(self, request_id: RequestId, work: Work, now: float) -> None:
        """Account for a request sent to the node."""
        self.in_flight += 1
        self.waiting_tokens += work.tokens
        self._work[request_id] = (work, now)
        self._compute_s += work.compute_s
        self._move_bytes(work, 1.0)
        self._raise_peak()
        self._note()

    def _raise_peak(self) -> None:
        """Raise the maximum of the current span to the present work."""
        peak = self._peaks[-1]
        if self._bytes != _NO_BYTES:
            self._peaks[-1] = max_of((peak, self._now()))
        elif self.in_flight > peak.in_flight or self.waiting_tokens > peak.waiting_tokens:
            self._peaks[-1] = Peak(
                max(self.in_flight, peak.in_flight),
                max(self.waiting_tokens, peak.waiting_tokens),
                peak.load_bytes,
            )

    def _now(self) -> Peak:
        return Peak(self.in_flight, self.waiting_tokens, self._bytes)

    def answered(self, request_id: RequestId, now: float) -> None:
        """Record the request's first token: end its work and learn from the measured time."""
        if request_id in self._work:
            work, sent_s = self._work[request_id]
            self.correction.learn(work.predicted_s, now - sent_s, now)
            self._forget_work(request_id)
            self._note()

    def leave(self, request_id: RequestId) -> None:
        """Remove the request from the node's account."""
        self.in_flight -= 1
        self._forget_work(request_id)
        self._note()

    def _forget_work(self, request_id: RequestId) -> None:
        if request_id in self._work:
            work, _ = self._work.pop(request_id)
            self.waiting_tokens -= work.tokens
            self._compute_s = self._compute_s - work.compute_s if self._work else 0.0
            self._move_bytes(work, -1.0)

    def _move_bytes(self, work: Work, sign: float) -> None:
        if not self._work:
            self._bytes = _NO_BYTES  # Removes rounding errors.
        elif work.load_bytes != _NO_BYTES:
            l2, l3, l4 = (a + sign * b for a, b in zip(self._bytes, work.load_bytes, strict=True))
            self._bytes = (l2, l3, l4)

    def mark(self, serial: int) -> None:
        """Record the serial number of a dispatch to the node; breaks ties."""
        self.last_chosen = serial
        self._note()

    def end(self) -> None:
        """End the incarnation and return its row."""
        if self.row >= 0:
            self.table.free_row(self.row, self)
            self.row = -1

    def _note(self) -> None:
        if self.row >= 0:
            self.table.note(self)

    def account(self) -> Account:
        """Return the pending work of the node."""
        head_s, head_end_s = 0.0, math.inf
        for work, sent_s in self._work.values():
            head_s, head_end_s = work.compute_s, sent_s + work.corrected_s
            break
        return Account(
            *self.queued_bytes,
            max(self._compute_s, head_s),
            head_s,
            head_end_s,
            self.others_waiting_tokens,
            self.outstanding,
        )

    def write_row(self) -> None:
        """Write the current figures into the table, before the table is read."""
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
        """Return whether the node may get a request: trusted, or due for its single probe."""
        return self.failures == 0 or (now >= self.suspended_until_s and self.probe is None)

    def serves(self, wanted: WantedModel) -> bool:
        """Return whether the node serves the wanted model."""
        return any(wanted.matches(model) for model in self.info.models)

    def layout(self, wanted: WantedModel) -> BlockLayout:
        """Return the KV layout of the wanted model, which the node serves."""
        return next(model.layout for model in self.info.models if wanted.matches(model))
