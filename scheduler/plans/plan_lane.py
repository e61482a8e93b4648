"""One node's part of a statement's plan: its next calls, and its blocks in use.

A part of PlanState, mutated only through PlanState. Positions are handed out depth first. A
position whose prefix is being computed waits, together with all later positions under the same
stem.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.plans.plan_events import PlanNode
from tierkv.scheduler.plans.plan_runs import CallRun
from tierkv.scheduler.plans.plan_tree import ROOT, PrefixTree

Span = tuple[int, int]
"""Unsent positions ``[first, stop)``."""


class NodeLane:
    """One node's part of a plan.

    Attributes:
        node: the node; None: any node that the scheduler chooses.
        runs: runs not begun yet, in order.
        in_flight: positions sent and not ended.
        computing: per stem, the position that computes the stem here.
        resident: stems in use here: computed, or being computed.
        used_blocks: blocks of the resident stems, and own blocks of calls in flight.
        prefetched: stems that the node was told to load.
    """

    def __init__(self, tree: PrefixTree, node: PlanNode | None) -> None:
        self.node = node
        self.runs: deque[CallRun] = deque()
        self.in_flight: set[int] = set()
        self.computing: dict[int, int] = {}
        self.resident: set[int] = set()
        self.used_blocks = 0
        self.prefetched: set[int] = set()
        self._tree = tree
        self._todo: list[Span] = []  # A heap; spans are disjoint.
        self._parked: dict[int, list[Span]] = {}
        self._computed_by: dict[int, list[int]] = {}

    @property
    def node_id(self) -> NodeId | None:
        """Return the node's name."""
        return self.node.node_id if self.node else None

    @property
    def speed(self) -> float:
        """Return the node's speed relative to a typical node."""
        return self.node.speed if self.node else 1.0

    @property
    def has_work(self) -> bool:
        """Return whether any call is unsent."""
        return bool(self._todo or self._parked or self.runs)

    @property
    def left(self) -> int:
        """Count the calls that have not ended: in flight, or unsent."""
        spans = (*self._todo, *(span for spans in self._parked.values() for span in spans))
        unsent = sum(stop - first for first, stop in spans) + sum(run.calls for run in self.runs)
        return len(self.in_flight) + unsent

    @property
    def spare_run(self) -> CallRun | None:
        """Return the last unsent calls under one stem, unless the node would be idle without them.

        These are the last run, or the last unsent span of a run that has begun.
        """
        if len(self.runs) > (not (self._todo or self._parked or self.in_flight)):
            return self.runs[-1]
        if not self._todo or not self.in_flight:
            return None
        first, stop = max(self._todo)
        stems = self._tree.stems
        stem = next((s for s in self._tree.path(first) if stems[s].stop >= stop), ROOT)
        return CallRun(first, stop, stem, 0.0)

    def give_last(self, calls: int) -> CallRun:
        """Remove the last ``calls`` calls of ``spare_run`` from this lane and return the calls."""
        run = self.spare_run
        assert run is not None and 0 < calls <= run.calls, (run, calls)
        kept, run = run.without_last(calls)
        if self.runs:
            self.runs.pop()
            if kept.calls:
                self.runs.append(kept)
        else:
            self._todo.remove((kept.first, run.stop))
            if kept.calls:
                self._todo.append((kept.first, kept.stop))
            heapify(self._todo)
        return run

    def next_position(self) -> int | None:
        """Find the first position without a prefix being computed here; it stays unsent."""
        while True:
            if not self._todo:
                if not self.runs or self._awaited(self.runs[0].first) is not None:
                    return None  # A run that could not begin stays whole for other lanes to take.
                run = self.runs.popleft()
                heappush(self._todo, (run.first, run.stop))
            first, stop = self._todo[0]
            stem = self._awaited(first)
            if stem is None:
                return first
            heappop(self._todo)
            end = min(stop, self._tree.stems[stem].stop)
            self._parked.setdefault(stem, []).append((first, end))
            if end < stop:
                heappush(self._todo, (end, stop))

    def peek(self) -> int | None:
        """Return the next position of the lane, even if it can't be sent now."""
        if self._todo:
            return self._todo[0][0]
        return self.runs[0].first if self.runs else None

    def _awaited(self, position: int) -> int | None:
        return next((s for s in self._tree.path(position) if s in self.computing), None)

    def new_stems(self, position: int) -> list[int]:
        """Return the stems of a call that are not in use here."""
        return [s for s in self._tree.path(position) if s not in self.resident]

    def has_stem(self, stem: int) -> bool:
        """Return whether a stem and all stems above are in use here, so more calls cost no more."""
        return all(each in self.resident for each in self._tree.up(stem))

    def has_room(self, position: int) -> bool:
        """Return whether the call's blocks fit next to used blocks; a single call always fits."""
        if not self.in_flight or self.node is None or not self.node.room_blocks:
            return True
        blocks = sum(self._tree.stems[s].blocks for s in self.new_stems(position))
        blocks += self._tree.own_blocks(position)
        return self.used_blocks + blocks <= self.node.room_blocks

    def send(self, position: int) -> None:
        """Move the first unsent position into flight; its call computes all missing stems."""
        first, stop = heappop(self._todo)
        assert first == position, (first, position)
        if first + 1 < stop:
            heappush(self._todo, (first + 1, stop))
        new = self.new_stems(position)
        self._computed_by[position] = new
        for stem in new:
            self.computing[stem] = position
            self.resident.add(stem)
            self.used_blocks += self._tree.stems[stem].blocks
        self.in_flight.add(position)
        self.used_blocks += self._tree.own_blocks(position)

    def prefilled(self, position: int) -> list[int]:
        """Record a call's computed prefix and release the positions waiting for the prefix.

        Returns:
            the stems that the call computed.
        """
        computed = self._computed_by.pop(position, [])
        for stem in computed:
            del self.computing[stem]
            self._unpark(stem)
        return computed

    def ended(self, position: int) -> None:
        """Remove an ended call; stems left unfinished by the call count as not computed."""
        self.in_flight.remove(position)
        self.used_blocks -= self._tree.own_blocks(position)
        for stem in self._computed_by.pop(position, ()):
            del self.computing[stem]
            self.drop(stem)
            self._unpark(stem)

    def drop(self, stem: int) -> None:
        """Remove a stem from use."""
        if stem in self.resident:
            self.resident.remove(stem)
            self.used_blocks -= self._tree.stems[stem].blocks

    def _unpark(self, stem: int) -> None:
        for span in self._parked.pop(stem, ()):
            heappush(self._todo, span)

    def give_up(self) -> list[CallRun]:
        """Return all unsent positions as runs and leave the lane without work."""
        spans = [*self._todo, *(span for spans in self._parked.values() for span in spans)]
        left = [CallRun(first, stop, 0, 0.0) for first, stop in sorted(spans)] + list(self.runs)
        self._todo, self._parked = [], {}
        self.runs.clear()
        return left

    def unsent(self) -> Iterator[int]:
        """Yield all unsent positions, for the invariants."""
        for first, stop in self._todo:
            yield from range(first, stop)
        for stem, spans in self._parked.items():
            assert stem in self.computing, f"nobody computes stem {stem}"
            for first, stop in spans:
                yield from range(first, stop)
        for run in self.runs:
            yield from range(run.first, run.stop)

    def check_invariants(self) -> None:
        """Assert correct block counts, and a running call behind every parked position."""
        blocks = sum(self._tree.stems[s].blocks for s in self.resident)
        blocks += sum(self._tree.own_blocks(p) for p in self.in_flight)
        assert blocks == self.used_blocks, (blocks, self.used_blocks)
        assert set(self.computing) <= self.resident
        assert set(self.computing.values()) <= self.in_flight
