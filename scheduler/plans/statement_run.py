"""A running statement: carries out the plan call by call.

``Planner.open`` makes a StatementRun for the calls of a statement.
dbfront/calls/question_runner.py takes calls from the run, executes them and reports the results.
Decisions are made in scheduler/plans/plan_state.py; questions to the directory and to nodes delay
no call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar

from tierkv.kvcore import limits
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.kvcore.node import ModelInfo, PreferredNode
from tierkv.kvcore.request import GenerateRequest, ReuseHint
from tierkv.scheduler.plans.hold_keeper import HoldKeeper
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
    PlanNode,
    PlanSawNodes,
    PrefetchRun,
    SendCall,
)
from tierkv.scheduler.plans.plan_runs import Effort
from tierkv.scheduler.plans.plan_state import PlanState
from tierkv.scheduler.plans.plan_tree import build_tree

_NO_HINT = ReuseHint()

HOMES_ASKED = 1_024
"""Calls whose KV is located before the first send; later calls are distributed evenly, and each is
located when sent."""

HomeFinder = Callable[[Mapping[int, GenerateRequest]], Awaitable[Mapping[int, NodeId]]]
"""Finds the node with most of a call's KV; calls with a tie or no KV are missing."""

Prefetcher = Callable[[GenerateRequest, NodeId], Coroutine[Any, Any, None]]
"""Has a node load the beginning of a prompt, if the pool has any of it."""


class PlannedCall(Protocol):
    """A call of the statement, ready to be sent, and the model of the preparation."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def model(self) -> ModelInfo: ...

    def in_turn(self, index: int, request: GenerateRequest, node: PreferredNode | None) -> Self:
        """Return the call as it is sent now.

        Args:
            index: position of the call in the statement.
            request: the call's request, with the plan's knowledge about its future reuse.
            node: the node with its prefix; None: any node.
        """
        ...


C = TypeVar("C", bound=PlannedCall)


class StatementRun(Generic[C]):
    """One statement's calls, in the order of the plan. Must be closed at the end.

    Attributes:
        state: the plan; read-only for other modules.
    """

    def __init__(
        self,
        calls: Sequence[C],
        *,
        max_in_flight: int,
        nodes: Callable[[], tuple[PlanNode, ...]] = tuple,
        effort: Effort | None = None,
        find_homes: HomeFinder | None = None,
        keeper: HoldKeeper | None = None,
        prefetch: Prefetcher | None = None,
    ) -> None:
        """Plan a statement.

        Args:
            calls: all calls of the statement.
            max_in_flight: number of calls given out at once.
            nodes: returns the current nodes; called again whenever a call has ended.
            effort: cost of calls.
            find_homes: locates the KV of calls before the first send.
            keeper: holds KV shared by pending calls; None: nothing is held.
            prefetch: loads blocks ahead; None: nothing is loaded ahead.
        """
        self.state = PlanState(
            build_tree(
                [call.request for call in calls],
                [call.model.layout.block_tokens for call in calls],
            ),
            effort or Effort(),
            max_in_flight=max_in_flight,
        )
        self._calls = calls
        self._nodes = nodes
        self._seen: tuple[PlanNode, ...] | None = None
        self._find_homes = find_homes
        self._placed: frozenset[int] = frozenset()
        self._begun = asyncio.Lock()
        self._keeper = keeper
        self._prefetch = prefetch
        self._prefetching: set[asyncio.Task[None]] = set()
        self._turns: asyncio.Queue[C | None] = asyncio.Queue()
        self._all_sent = False

    @property
    def runs(self) -> int:
        """Number of pieces of the prefix tree; known after the first turn."""
        return len(self.state.runs)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens shared with another call of the statement."""
        return self.state.tree.shared_tokens

    async def take(self) -> C | None:
        """Wait for the next call to send; None when every call has been sent.

        Several tasks may wait; each call goes to one task, and every call must end in ``ended``.
        """
        if self._seen is None:
            await self._begin()
        turn = await self._turns.get()
        if turn is None:
            self._turns.put_nowait(None)
        return turn

    def prefilled(self, index: int) -> None:
        """Report the call's first token."""
        self._handle(CallPrefilled(index))

    def ended(self, index: int, *, answered: bool) -> None:
        """Report the call's end, with or without an answer."""
        self._look()
        self._handle(CallFinished(index) if answered else CallFailed(index))

    async def close(self) -> None:
        """End the statement in any state; everything held for the statement is let go."""
        self._handle(Cancelled())
        prefetching = tuple(self._prefetching)
        for task in prefetching:
            task.cancel()
        if prefetching:
            await asyncio.wait(prefetching)  # Unlike awaiting a task, keeps our cancellation.
        if self._keeper is not None:
            await self._keeper.close()

    async def _begin(self) -> None:
        """Place the calls, using the known locations of their KV."""
        async with self._begun:
            if self._seen is not None:
                return
            if self._find_homes is not None:
                order = self.state.tree.order[:HOMES_ASKED]
                requests = {call: self._calls[call].request for call in order}
                self._handle(CallsLocated(await self._find_homes(requests)))
                self._placed = frozenset(requests)
            self._look()

    def _look(self) -> None:
        seen = self._nodes()
        if seen != self._seen:
            self._seen = seen
            self._handle(PlanSawNodes(seen))

    def _handle(self, event: PlanEvent) -> None:
        for instruction in self.state.handle(event):
            self._perform(instruction)
        if not self.state.has_unsent and not self._all_sent:
            self._all_sent = True
            self._turns.put_nowait(None)

    def _perform(self, instruction: PlanInstruction) -> None:
        match instruction:
            case SendCall():
                self._turns.put_nowait(self._turn(instruction))
            case PrefetchRun():
                self._start_prefetch(instruction)
            case Hold() if self._keeper is not None:
                self._keeper.hold(instruction.stem, self._keys(instruction.stem))
            case LetGo() if self._keeper is not None:
                self._keeper.let_go(instruction.stem)

    def _turn(self, send: SendCall) -> C:
        call = self._calls[send.call]
        request = call.request
        if send.pending_tokens:
            known = request.hint or _NO_HINT
            hint = ReuseHint(
                known.next_turn, known.next_turn_s, send.pending_calls, send.pending_tokens
            )
            request = request.with_hint(hint)
        if send.node_id is None:
            return call.in_turn(send.call, request, None)
        # For a call that was placed by its KV, or taken over by an idle node, the scheduler knows
        # no more than the plan.
        tokens = len(request.token_ids) if send.call in self._placed else send.resident_tokens
        return call.in_turn(send.call, request, PreferredNode(send.node_id, tokens))

    def _keys(self, stem: int) -> list[BlockKey]:
        """Return the keys of all blocks from the beginning of the prompt to the end of a stem."""
        tree = self.state.tree
        found = tree.stems[stem]
        request = self._calls[tree.order[found.first]].request
        keys = block_keys(
            request.namespace_key,
            request.token_ids[: found.end_tokens],
            block_tokens=found.block_tokens,
        )
        return keys[: limits.MAX_CHAIN_BLOCKS]

    def _start_prefetch(self, wanted: PrefetchRun) -> None:
        if self._prefetch is None:
            return
        request = self._calls[wanted.call].request
        # Loading leaves out the last token, which is always computed: pass one more.
        part = replace(request, token_ids=request.token_ids[: wanted.tokens + 1])
        task = asyncio.create_task(self._prefetch(part, wanted.node_id), name="plan-prefetch")
        self._prefetching.add(task)
        task.add_done_callback(self._prefetching.discard)
