"""A front of the simulation: the real scheduler core, told what happens, doing what it says.

What scheduler/dispatcher.py does with asyncio, this does with simulated time. It counts how each
request ended and compares each answer with the oracle's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.sim.compute_server import News
from tests.sim.directory import Directory, Lease, Located
from tests.sim.network import All, Ask, Network, Process, Sleep, Steps, Stream
from tests.sim.prompts import BLOCK_TOKENS, Prompt, expected_answer
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.metaserver.block_owners import joined_nodes
from tierkv.metaserver.client import LocateReply
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    Abandon,
    Dispatch,
    Event,
    Fail,
    FirstToken,
    HandoffDone,
    Instruction,
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
    RequestFinished,
    SeenNode,
    Wait,
    WaitOver,
    WantedModel,
)
from tierkv.scheduler.requests.job import located
from tierkv.scheduler.requests.state import SchedulerState

LEASE_S = 3.0
CONFIG = SchedulerConfig(
    node_wait_s=4.0,
    backoff_max_s=2.0,
    max_requests=24,
    max_waiting=12,
    max_in_flight_per_node=3,
    prefetches_per_node=1,
    lease_s=LEASE_S,
)


@dataclass(eq=False)
class Job:
    """One request on its way."""

    prompt: Prompt
    leases: tuple[Lease, ...] = ()
    stream: Stream | None = None
    generated: int = 0


class Front(Process):
    """One front; it lives as long as the simulation.

    Attributes:
        state: the real core.
        jobs: requests that have not ended.
        ended: how each of the others ended.
    """

    def __init__(self, name: str, net: Network, metas: Sequence[str]) -> None:
        super().__init__(name, net)
        self.directory = Directory(self, metas)
        self.state = SchedulerState(CONFIG)
        self.jobs: dict[RequestId, Job] = {}
        self.ended: dict[RequestId, str] = {}
        self._serial = 0
        self.every(0.5, self._refresh)

    # -- requests

    def submit(self, prompt: Prompt, *, session: str | None, priority: int) -> RequestId:
        self._serial += 1
        request_id = RequestId(f"{self.name}-{self._serial}")
        self.jobs[request_id] = Job(prompt)
        self._handle(
            RequestArrived(
                request_id,
                WantedModel("tiny"),
                prompt.tokens,
                session_id=session,
                locatable=True,
                priority=priority,
            )
        )
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        """The caller goes away, at whatever moment."""
        if request_id in self.jobs:
            self._end(request_id, "cancelled")
            self._handle(RequestCancelled(request_id))

    def _end(self, request_id: RequestId, how: str) -> None:
        job = self.jobs.pop(request_id)
        assert request_id not in self.ended, f"{request_id} ended twice"
        self.ended[request_id] = how
        self.net.tell(f"{request_id} {how}")
        if job.stream is not None:
            job.stream.close()
        self._end_lease(job, used=False)

    def _end_lease(self, job: Job, *, used: bool) -> None:
        leases, job.leases = job.leases, ()
        for name, lease in leases:
            self.net.send(name, lambda meta, lease=lease: meta.end_lease(lease, used=used))

    # -- the core and what it says

    def _handle(self, event: Event, at_least_s: float = 0.0) -> None:
        self._perform(self.state.handle(event, max(self.now, at_least_s)))

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, RefreshNodes):
                self._refresh()
                continue
            request_id = instruction.request_id
            job = self.jobs.get(request_id)
            assert job is not None, f"{instruction} about a request that has ended"
            match instruction:
                case Locate():
                    self.spawn(self._locate(request_id, job))
                case Dispatch():
                    self._dispatch(job, instruction)
                case Prefetch():
                    self.spawn(self._prefetch(job, instruction))
                case Wait():
                    until_s = instruction.until_s
                    # Rounding may make a timer early; the state must see the time it asked for.
                    self.net.after(
                        max(0.0, until_s - self.now),
                        lambda q=request_id, at=until_s: self._handle(WaitOver(q), at),
                    )
                case Abandon():
                    self.net.after(0.0, lambda q=request_id, j=job: self._abandon(q, j))
                case Fail():
                    self._end(request_id, f"failed: {instruction.failure}, {instruction.reason}")

    def _refresh(self) -> None:
        self.spawn(self._look())

    def _look(self) -> Steps:
        listings = yield from self.directory.ask_all(
            lambda name: lambda meta: meta.state.list_nodes(meta.now)
        )
        if listings:
            nodes = [state for state in joined_nodes(listings.values()) if state.info.models]
            self._handle(NodesSeen(tuple(SeenNode(s.info, s.report.load, s.state) for s in nodes)))

    def _locate(self, request_id: RequestId, job: Job) -> Steps:
        found = yield from self.directory.locate(job.prompt.keys, reserve_s=LEASE_S)
        found = found or Located(LocateReply())
        job.leases = found.leases
        if request_id not in self.jobs:
            self._end_lease(job, used=False)
            return
        self.spawn(self._prolong(request_id, job))
        self._handle(located(request_id, found.reply))

    def _prolong(self, request_id: RequestId, job: Job) -> Steps:
        while job.leases and request_id in self.jobs:
            yield Sleep(LEASE_S / 3)
            yield All(
                tuple(
                    Ask(name, lambda meta, lease=lease: meta.extend_lease(lease, LEASE_S))  # type: ignore[misc]
                    for name, lease in job.leases
                )
            )

    def _prefetch(self, job: Job, order: Prefetch) -> Steps:
        blocks = order.tokens // BLOCK_TOKENS
        done = yield Ask(order.node_id, lambda node: node.prefetch(job.prompt, blocks), 2.0)
        tokens = (done or 0) * BLOCK_TOKENS
        self._handle(PrefetchDone(order.request_id, NodeId(order.node_id), tokens))

    # -- one stage at a node

    def _dispatch(self, job: Job, order: Dispatch) -> None:
        request_id = order.request_id
        assert job.stream is None or job.stream.over, f"{request_id} is at two nodes"
        stream = Stream(self, order.node_id, lambda: self._lost(request_id, job))
        job.stream = stream
        news = News(
            refused=lambda: self._leave(job, NodeRefused(request_id)),
            progress=lambda tokens: self._handle(PrefillProgress(request_id, tokens)),
            first_token=lambda: self._first_token(request_id, job),
            handed_over=lambda: self._leave(job, HandoffDone(request_id, job.prompt.tokens + 1)),
            finished=lambda answer: self._finished(request_id, job, answer),
        )

        def request(node: object) -> None:
            if node.info.incarnation != order.incarnation:  # type: ignore[attr-defined]
                stream.break_off()
            else:
                node.accept(stream, job.prompt, order.stage, news)  # type: ignore[attr-defined]

        stream.open(request)

    def _first_token(self, request_id: RequestId, job: Job) -> None:
        job.generated = 1
        self._end_lease(job, used=True)
        self._handle(FirstToken(request_id))

    def _finished(self, request_id: RequestId, job: Job, answer: bytes) -> None:
        assert answer == expected_answer(job.prompt), f"{request_id} got a wrong answer"
        self._end(request_id, "finished")
        self._handle(RequestFinished(request_id))

    def _leave(self, job: Job, event: Event) -> None:
        assert job.stream is not None
        job.stream.close()
        self._handle(event)

    def _lost(self, request_id: RequestId, job: Job) -> None:
        if request_id in self.jobs:
            self._handle(NodeLost(request_id, job.prompt.tokens + job.generated))

    def _abandon(self, request_id: RequestId, job: Job) -> None:
        if request_id in self.jobs and job.stream is not None and not job.stream.over:
            job.stream.close()
            self._lost(request_id, job)

    def check_at_rest(self) -> None:
        """Every request ended once, and the accounts are zero."""
        state = self.state
        assert not self.jobs, f"stuck: {[state.requests[q].story for q in self.jobs]}"
        assert not state.requests and not len(state.queue) and not state.ahead.loading
        assert state.arrived == sum(state.ended.values()) == len(self.ended)
        for record in state.fleet.records.values():
            assert record.in_flight == 0 and record.waiting_tokens == 0, record
