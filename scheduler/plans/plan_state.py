"""The plan of one statement: node and order of each call, and the blocks worth keeping.

A pure core: ``PlanState.handle`` applies an event and returns instructions;
scheduler/plans/statement_run.py carries them out. The plan has no clock: it defines an order, not
times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.plans.plan_events import (
    CallFailed,
    CallFinished,
    CallPrefilled,
    CallsLocated,
    Cancelled,
    Hold,
    LetGo,
    PlanEvent,
    PlanInstruction,
    PlanLostNode,
    PlanNode,
    PlanSawNodes,
    PrefetchRun,
    SendCall,
)
from tierkv.scheduler.plans.plan_lane import NodeLane
from tierkv.scheduler.plans.plan_runs import CallRun, Effort, cut, deal
from tierkv.scheduler.plans.plan_tree import PrefixTree


class PlanState:
    """One statement's plan. Mutated only through ``handle``.

    Every call is sent exactly once, to the lane of a single node; neighbours in the prefix tree go
    to the same node in sequence. A stem is held while calls without a prefill need the stem, and
    let go after the last of these calls.

    Attributes:
        tree: prefixes shared by the calls.
        runs: the cut made at the first PlanSawNodes.
        lanes: one lane per node; a single lane without a node while no node is known.
        held: stems with a Hold.
        left: calls that have not ended.
        over: True once every call has ended or the statement was cancelled.
    """

    def __init__(self, tree: PrefixTree, effort: Effort, *, max_in_flight: int) -> None:
        """Make a plan; it begins with the first PlanSawNodes.

        Args:
            tree: prefix tree of all calls of the statement.
            effort: cost of calls.
            max_in_flight: upper bound on calls sent and not ended.
        """
        self.tree = tree
        self.runs: tuple[CallRun, ...] = ()
        self.lanes: list[NodeLane] = []
        self.held: set[int] = set()
        self.left = len(tree.order)
        self.over = not tree.order
        self._effort = effort
        self._max_in_flight = max(1, max_in_flight)
        self._homes: dict[int, NodeId] = {}
        self._orphans: deque[CallRun] = deque()
        self._position = {call: at for at, call in enumerate(tree.order)}
        self._lane_of: dict[int, NodeLane] = {}
        self._prefilled: set[int] = set()
        calls = [stem.stop - stem.first for stem in tree.stems]
        self._unsent = list(calls)
        self._unprefilled = list(calls)
        self._unfinished = list(calls)

    @property
    def has_unsent(self) -> bool:
        """Return whether any call is still unsent."""
        if self.over:
            return False
        return not self.lanes or bool(self._orphans) or any(lane.has_work for lane in self.lanes)

    def handle(self, event: PlanEvent) -> list[PlanInstruction]:
        """Apply an event and return instructions.

        Events about calls that have ended, and events after the end, are ignored.
        """
        if self.over:
            return []
        match event:
            case CallsLocated():
                self._homes = dict(event.homes)
                return []
            case PlanSawNodes():
                self._see(event.nodes)
            case PlanLostNode():
                self._see(tuple(n for n in self._nodes() if n.node_id != event.node_id))
            case CallPrefilled():
                return [*self._on_prefilled(self._position[event.call]), *self._fill()]
            case CallFinished():
                position = self._position[event.call]
                return [*self._on_prefilled(position), *self._on_ended(position), *self._fill()]
            case CallFailed():
                return [*self._on_ended(self._position[event.call]), *self._fill()]
            case Cancelled():
                return self._on_cancelled()
        return self._fill()

    # -- nodes

    def _nodes(self) -> Iterator[PlanNode]:
        return (lane.node for lane in self.lanes if lane.node is not None)

    def _see(self, nodes: tuple[PlanNode, ...]) -> None:
        if not self.lanes:
            self._begin(nodes)
            return
        seen = {node.node_id: node for node in nodes}
        wanted: set[NodeId | None] = set(seen) or {None}
        for lane in self.lanes:
            if lane.node_id not in wanted:
                self._orphans.extend(lane.give_up())
        self.lanes = [lane for lane in self.lanes if lane.node_id in wanted]
        for lane in self.lanes:
            lane.node = seen.get(lane.node_id) if lane.node_id else None
        known = {lane.node_id for lane in self.lanes}
        self.lanes += [
            NodeLane(self.tree, seen.get(node_id) if node_id else None)
            for node_id in (*seen, *(() if seen else (None,)))
            if node_id not in known
        ]

    def _begin(self, nodes: tuple[PlanNode, ...]) -> None:
        self.lanes = [NodeLane(self.tree, node) for node in nodes] or [NodeLane(self.tree, None)]
        self.runs = cut(self.tree, self._effort, len(self.lanes))
        lane_of = {lane.node_id: number for number, lane in enumerate(self.lanes)}
        homes = {
            self._position[call]: lane_of[node_id]
            for call, node_id in self._homes.items()
            if node_id in lane_of
        }
        speeds = [lane.speed for lane in self.lanes]
        for lane, runs in zip(self.lanes, deal(self.runs, speeds, homes), strict=True):
            lane.runs.extend(runs)

    # -- calls

    def _on_prefilled(self, position: int) -> list[PlanInstruction]:
        lane = self._lane_of.get(position)
        if lane is None or position in self._prefilled:
            return []
        computed = lane.prefilled(position)
        done = self._no_longer_pending(position)
        worth = [stem for stem in computed if self._unprefilled[stem]]
        self.held.update(worth)
        return [*done, *(Hold(stem) for stem in worth)]

    def _no_longer_pending(self, position: int) -> list[PlanInstruction]:
        self._prefilled.add(position)
        done: list[PlanInstruction] = []
        for stem in self.tree.path(position):
            self._unprefilled[stem] -= 1
            if not self._unprefilled[stem] and stem in self.held:
                self.held.remove(stem)
                done.append(LetGo(stem))
        return done

    def _on_ended(self, position: int) -> list[PlanInstruction]:
        lane = self._lane_of.pop(position, None)
        if lane is None:
            return []
        done = [] if position in self._prefilled else self._no_longer_pending(position)
        lane.ended(position)
        self.left -= 1
        self.over = not self.left
        for stem in self.tree.path(position):
            self._unfinished[stem] -= 1
            if not self._unfinished[stem]:
                for each in self.lanes:
                    each.drop(stem)
        return done

    def _on_cancelled(self) -> list[PlanInstruction]:
        self.over = True
        held, self.held = sorted(self.held), set()
        return [LetGo(stem) for stem in held]

    # -- sending

    def _fill(self) -> list[PlanInstruction]:
        """Send as many calls as may be in flight, to the least loaded node first."""
        if not self.lanes or self.over:
            return []
        out: list[PlanInstruction] = []
        touched: dict[int, NodeLane] = {}
        while len(self._lane_of) < self._max_in_flight:
            self._employ_idle()
            found = self._next()
            if found is None:
                break
            lane, position = found
            out.append(self._send(lane, position))
            touched[id(lane)] = lane
        return out + [each for lane in touched.values() for each in self._look_ahead(lane)]

    def _employ_idle(self) -> None:
        """Give calls of others to lanes without unsent calls, at half their calls in flight.

        Earlier, a lane would take calls from nodes that are merely about to report the end of a
        step; later, its steps would become small.
        """
        per_speed = self._in_flight_per_speed()
        for lane in self.lanes:
            if lane.has_work or 2 * len(lane.in_flight) > math.ceil(per_speed * lane.speed):
                continue
            if not self._take_over(lane):
                return

    def _in_flight_per_speed(self) -> float:
        """Return the calls that a lane of speed 1 may have in flight: lanes share by speed."""
        return self._max_in_flight / sum(lane.speed for lane in self.lanes)

    def _next(self) -> tuple[NodeLane, int] | None:
        """Find a call that may go now.

        A lane's share of the calls in flight does not grow when other lanes have no calls left: a
        call in flight can't be taken over.
        """
        per_speed = self._in_flight_per_speed()
        busy = [lane for lane in self.lanes if lane.has_work]
        for lane in sorted(busy, key=lambda each: len(each.in_flight) / each.speed):
            if len(lane.in_flight) >= math.ceil(per_speed * lane.speed):
                return None
            position = lane.next_position()
            if position is not None and lane.has_room(position):
                return lane, position
        return None

    def _send(self, lane: NodeLane, position: int) -> SendCall:
        lane.send(position)
        self._lane_of[position] = lane
        path = self.tree.path(position)
        for stem in path:
            self._unsent[stem] -= 1
        resident = self.tree.stems[path[0]].end_tokens if path else 0
        return SendCall(self.tree.order[position], lane.node_id, resident, *self._pending(path))

    def _pending(self, path: list[int]) -> tuple[int, int]:
        """Count the unsent calls sharing most with a call, and the shared tokens."""
        for number in path:
            if self._unsent[number]:
                return self._unsent[number], self.tree.stems[number].end_tokens
        return (0, self.tree.stems[path[-1]].end_tokens) if path else (0, 0)

    def _take_over(self, lane: NodeLane) -> bool:
        """Give an idle lane an orphaned run, or calls of the lane that would end last.

        The idle lane gets as many calls as let both lanes end together, not more: each moved call
        leaves the node with the row's KV. A run with a prefix that neither node has moves as a
        whole or not at all.
        """
        if self._orphans:
            lane.runs.append(self._orphans.popleft())
            return True
        givers = [each for each in self.lanes if each.spare_run is not None]
        last = max(givers, key=lambda each: each.left / each.speed, default=None)
        if last is None or (run := last.spare_run) is None:
            return False
        lacks_stem = not lane.has_stem(run.stem)
        whole = lacks_stem and not last.has_stem(run.stem)
        extra = self._stem_calls(lane, run) if lacks_stem and not whole else 0.0
        calls = min(_calls_to_move(last, lane, extra), run.calls)
        if whole:
            calls = run.calls if calls >= max(1, run.calls // 2) else 0
        if not calls:
            return False
        lane.runs.append(last.give_last(calls))
        return True

    def _stem_calls(self, lane: NodeLane, run: CallRun) -> float:
        """Return the tokens of a run's prefix that a lane lacks, in calls of that run."""
        stems = self.tree.stems
        lacking = [stems[s] for s in self.tree.up(run.stem) if s not in lane.resident]
        tokens = sum(stem.blocks * stem.block_tokens for stem in lacking)
        return tokens / max(1, self.tree.own_tokens(run.first))

    def _look_ahead(self, lane: NodeLane) -> list[PlanInstruction]:
        """Have the node load the lane's next prefix, unless the prefix is in use already."""
        position = lane.peek()
        if position is None or lane.node is None:
            return []
        deepest = self.tree.deepest[position]
        new = lane.new_stems(position)
        if not new or deepest in lane.prefetched:
            return []
        lane.prefetched.update(new)
        self.held.update(new)
        tokens = self.tree.stems[deepest].end_tokens
        prefetch = PrefetchRun(self.tree.order[position], lane.node.node_id, deepest, tokens)
        return [*(Hold(stem) for stem in new), prefetch]

    def check_invariants(self) -> None:
        """Assert what must hold between any two events; O(calls + stems)."""
        if not self.lanes or self.over:
            assert not self.held or not self.over
            return
        unsent = [p for lane in self.lanes for p in lane.unsent()]
        unsent += [p for run in self._orphans for p in range(run.first, run.stop)]
        assert len(unsent) + len(self._lane_of) == self.left
        assert len(set(unsent) | set(self._lane_of)) == self.left
        assert len(self._lane_of) <= self._max_in_flight
        assert all(self._unprefilled[stem] for stem in self.held)
        for lane in self.lanes:
            lane.check_invariants()
        if unsent:  # A call runs, or a call could be sent.
            assert self._lane_of, "a plan with work left has stopped"


def _calls_to_move(giver: NodeLane, taker: NodeLane, extra: float) -> int:
    """Count the calls to move so that both lanes end at the same time; 0 if the giver ends first.

    ``extra`` is work that the taker would do in addition, in calls.
    """
    surplus = giver.left * taker.speed - (taker.left + extra) * giver.speed
    return max(0, int(surplus / (giver.speed + taker.speed)))
