"""Any legal history of requests and nodes: each request ends once, and the accounts agree.

With small bounds, so that requests wait, are refused, overtake by priority and load ahead.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.fix_scheduler import make_info
from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import Incarnation, NodeId, RequestId
from tierkv.kvcore.node import NodeRole
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    Abandon,
    ChainLocated,
    Dispatch,
    Event,
    Fail,
    FirstToken,
    HandoffDone,
    Locate,
    NodeLost,
    NodeRefused,
    NodesSeen,
    Prefetch,
    PrefetchDone,
    PrefillProgress,
    RefreshNodes,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    SeenNode,
    Stage,
    Wait,
    WaitOver,
    WantedModel,
)
from tierkv.scheduler.requests.state import SchedulerState

ROLES = {"c1": NodeRole.COMPUTE, "p1": NodeRole.PREFILL, "d1": NodeRole.DECODE}


class SchedulerHistory(RuleBasedStateMachine):
    """Plays the dispatcher: keeps, per request, what it was last told to do."""

    @initialize(slo_s=st.sampled_from([0.0, 0.2]))
    def begin(self, slo_s: float) -> None:
        self.state = SchedulerState(
            SchedulerConfig(
                max_requests=8,
                max_waiting=3,
                max_in_flight_per_node=2,
                node_wait_s=5.0,
                ttft_slo_s=slo_s,
                prefetches_per_node=1,
            )
        )
        self.ahead: dict[RequestId, NodeId] = {}
        self.now = 0.0
        self.serial = 0
        self.told: dict[RequestId, object] = {}
        self.ended: dict[RequestId, str] = {}
        self.incarnations = dict.fromkeys(ROLES, 1)

    def do(self, event: Event) -> None:
        for instruction in self.state.handle(event, self.now):
            match instruction:
                case RefreshNodes():
                    continue
                case Fail():
                    self.end(instruction.request_id, "failed")
                case Prefetch():
                    now_doing = self.told[instruction.request_id]
                    if isinstance(now_doing, Dispatch):
                        assert now_doing.stage is Stage.PREFILL
                        assert ROLES[instruction.node_id].decodes
                    else:
                        assert isinstance(now_doing, Wait)
                        self.ahead[instruction.request_id] = instruction.node_id
                case Abandon():
                    assert isinstance(self.told[instruction.request_id], Dispatch)
                case Dispatch() | Wait() | Locate():
                    assert instruction.request_id not in self.ended
                    self.told[instruction.request_id] = instruction

    def end(self, request_id: RequestId, how: str) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = how
        del self.told[request_id]
        self.ahead.pop(request_id, None)

    def pick(self, data: st.DataObject, kind: type) -> RequestId | None:
        ids = sorted(k for k, v in self.told.items() if isinstance(v, kind))
        return data.draw(st.sampled_from(ids)) if ids else None

    @rule(
        locatable=st.booleans(),
        tokens=st.integers(1, 500),
        session=st.booleans(),
        priority=st.sampled_from([0, 0, -1, 1, 1 << 40]),
    )
    def arrive(self, locatable: bool, tokens: int, session: bool, priority: int) -> None:
        self.serial += 1
        request_id = RequestId(f"q{self.serial}")
        self.told[request_id] = None
        self.do(
            RequestArrived(
                request_id,
                WantedModel("tiny"),
                tokens,
                session_id="s" if session else None,
                locatable=locatable,
                priority=priority,
            )
        )

    @rule(
        states=st.dictionaries(
            st.sampled_from(sorted(ROLES)),
            st.sampled_from(["alive", "suspect", "dead", "restarted"]),
        ),
        step=st.floats(0.0, 4.0),
    )
    def see(self, states: dict[str, str], step: float) -> None:
        self.now += step
        nodes = []
        for node_id, state in states.items():
            if state == "restarted":
                self.incarnations[node_id] += 1
            info = make_info(
                node_id,
                role=ROLES[node_id],
                incarnation=Incarnation(self.incarnations[node_id]),
            )
            nodes.append(SeenNode(info, state="alive" if state == "restarted" else state))
        self.do(NodesSeen(tuple(nodes)))

    @precondition(lambda self: self.told)
    @rule(
        data=st.data(),
        near=st.dictionaries(st.sampled_from(sorted(ROLES)), st.integers(0, 31)),
        pool=st.integers(0, 31),
    )
    def locate(self, data: st.DataObject, near: dict[str, int], pool: int) -> None:
        request_id = self.pick(data, Locate)
        if request_id is not None:
            found = {NodeId(name): CachedPrefix(n, n) for name, n in near.items()}
            self.do(ChainLocated(request_id, found, CachedPrefix(l3_blocks=pool, l4_blocks=pool)))

    @precondition(lambda self: self.ahead)
    @rule(data=st.data(), blocks=st.integers(0, 31))
    def prefetched(self, data: st.DataObject, blocks: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.ahead)))
        node_id = self.ahead.pop(request_id)
        self.do(PrefetchDone(request_id, node_id, 16 * blocks))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), step=st.floats(0.0, 6.0))
    def wait_over(self, data: st.DataObject, step: float) -> None:
        self.now += step
        request_id = self.pick(data, Wait)
        if request_id is not None:
            self.do(WaitOver(request_id))

    @precondition(lambda self: self.told)
    @rule(
        data=st.data(),
        what=st.sampled_from(["first", "told", "handoff", "lost", "refused", "finished", "failed"]),
    )
    def progress(self, data: st.DataObject, what: str) -> None:
        request_id = self.pick(data, Dispatch)
        if request_id is None:
            return
        dispatch = self.told[request_id]
        assert isinstance(dispatch, Dispatch)
        if what == "first":
            self.do(FirstToken(request_id))
        elif what == "told":
            self.do(PrefillProgress(request_id, data.draw(st.integers(0, 600))))
        elif what == "handoff" and dispatch.stage is Stage.PREFILL:
            self.do(FirstToken(request_id))
            self.do(HandoffDone(request_id, 501))
        elif what == "lost":
            self.do(NodeLost(request_id, 501))
        elif what == "refused":
            self.do(NodeRefused(request_id))
        elif what in ("finished", "failed"):
            self.end(request_id, what)
            kind = RequestFinished if what == "finished" else RequestFailed
            self.do(kind(request_id))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.told)))
        self.end(request_id, "cancelled")
        self.do(RequestCancelled(request_id))

    @invariant()
    def accounts_agree(self) -> None:
        self.state.check_invariants()
        assert set(self.state.requests) == set(self.told)
        assert self.state.arrived == len(self.told) + len(self.ended)
        waiting = {call.request_id for call in self.state.queue.calls(self.now)}
        assert waiting == {k for k, told in self.told.items() if isinstance(told, Wait)}

    @invariant()
    def nobody_waits_beside_a_free_node(self) -> None:
        """A node of the right kind that works on nothing gives its place to whoever waits."""
        records = self.state.fleet.records.values()
        idle = [r for r in records if not r.in_flight and r.state == "alive" and not r.failures]
        idle = [r for r in idle if r.info.role is NodeRole.COMPUTE]
        for call in self.state.queue.calls(self.now) if idle else ():
            refused = self.state.requests[call.request_id].refused
            assert all(r.info.node_id in refused for r in idle)

    def teardown(self) -> None:
        for request_id in list(self.told):
            self.end(request_id, "cancelled")
            self.do(RequestCancelled(request_id))
        assert not self.state.requests
        assert sum(self.state.ended.values()) == self.state.arrived == len(self.ended)
        assert all(r.in_flight == 0 for r in self.state.fleet.records.values())


TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
