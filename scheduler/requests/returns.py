"""Conversations that come back: their KV is loaded before the next turn is due.

An agent's conversation pauses while a tool runs, and other work takes the pages meanwhile. Before
the next turn is due, ``ReturnKeeper`` has the answering node load the KV from the pool again.
``ReturnBook`` knows when a conversation is due:

1. The client's own word (``ReuseHint.next_turn_s``) comes first.
2. Otherwise the time is learned from earlier pauses of the conversation, at least two, smoothed
   like the round-trip times of TCP (RFC 6298): due is the mean less two deviations.
3. After ``next_turn = False``, and beyond MAX_PAUSE_S, no turn is expected.

Loading early or in vain costs time of the loader, and pages of other conversations, but never an
answer. Only conversations of a small share of a node's pages (``MOST_SHARE``) are therefore loaded.
A conversation that comes back early loads for itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import TierKVError
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.request import GenerateRequest, ReuseHint, SamplingParams

MAX_PAUSE_S: Final = 600.0
MOST_SHARE: Final = 1 / 16
_MOST_SESSIONS: Final = 10_000
_MOST_EXPECTED: Final = 1_000
"""Conversations with a timer at a time."""

_LEAST_PAUSE_S: Final = 0.2
"""Nothing takes the pages of a conversation that is back at once."""

_LEAD_S: Final = 0.1
_LEAD_LOADS: Final = 2.0
_LEAD_SHARE: Final = 0.5
"""Loading begins so long before the turn is due: a constant, and twice the time of a load from a
slow disk. It does not begin before half of the pause is over. Pages loaded earlier would be taken
from other conversations, or by them.
"""

_MEAN_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4

log = logging.getLogger("tierkv.scheduler")

Load = Callable[[GenerateRequest, BlockLayout, NodeId], Awaitable[None]]


@dataclass(slots=True)
class _Pauses:
    """The pauses of one conversation.

    Attributes:
        left_s: when the last answer ended; None while a turn is running.
        count: pauses seen.
        mean_s: smoothed pause.
        deviation_s: smoothed deviation.
    """

    left_s: float | None = None
    count: int = 0
    mean_s: float = 0.0
    deviation_s: float = 0.0

    def add(self, pause_s: float) -> None:
        """Learn from a pause."""
        if not self.count:
            self.mean_s, self.deviation_s = pause_s, pause_s / 2
        else:
            off = abs(pause_s - self.mean_s)
            self.deviation_s += _DEVIATION_GAIN * (off - self.deviation_s)
            self.mean_s += _MEAN_GAIN * (pause_s - self.mean_s)
        self.count += 1


class ReturnBook:
    """When conversations come back; pure, with ``now`` as an argument."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[Hashable, _Pauses] = OrderedDict()

    def came(self, session: Hashable, now: float) -> None:
        """Note that a turn begins."""
        pauses = self._sessions.get(session)
        if pauses is None or pauses.left_s is None:
            return
        pause_s, pauses.left_s = max(0.0, now - pauses.left_s), None
        if pause_s <= MAX_PAUSE_S:
            pauses.add(pause_s)

    def left(self, session: Hashable, now: float, hint: ReuseHint | None) -> float | None:
        """Note that an answer ended; return the seconds until the next turn, None if unknown."""
        pauses = self._sessions.setdefault(session, _Pauses())
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        pauses.left_s = now
        if hint is not None and hint.next_turn is False:
            return None
        told = hint.next_turn_s if hint is not None else None
        due_s = told
        if told is None and pauses.count >= 2:
            due_s = max(0.0, pauses.mean_s - 2 * pauses.deviation_s)
        return due_s if due_s is not None and _LEAST_PAUSE_S <= due_s <= MAX_PAUSE_S else None


class ReturnKeeper:
    """Has nodes load the KV of conversations that are due.

    Attributes:
        loads: loads begun.
    """

    def __init__(self, load: Load, clock: Clock, *, bytes_per_s: float) -> None:
        """Begin without conversations.

        Args:
            load: has a node load the blocks of a prompt that it has no more.
            clock: measures pauses.
            bytes_per_s: rate of loading from a slow disk.
        """
        self.loads = 0
        self._bytes_per_s = bytes_per_s
        self._load = load
        self._clock = clock
        self._book = ReturnBook()
        self._expected: dict[Hashable, asyncio.Task[None]] = {}

    def came(self, request: GenerateRequest) -> None:
        """Note that a turn begins; a load that has begun goes on."""
        if request.session_id is not None:
            self._book.came(_session(request), self._clock.now())
            waiting = self._expected.pop(_session(request), None)
            if waiting is not None:
                waiting.cancel()

    def left(
        self, request: GenerateRequest, answer: tuple[int, ...], layout: BlockLayout, node: NodeId
    ) -> None:
        """Note that a turn was answered.

        Args:
            request: the turn.
            answer: the generated tokens.
            layout: layout of the model's blocks.
            node: the node that answered.
        """
        if request.session_id is None or request.blend is not None:
            return
        session = _session(request)
        due_s = self._book.left(session, self._clock.now(), request.hint)
        if due_s is None or not request.use_cache or len(self._expected) >= _MOST_EXPECTED:
            return
        tokens = (*request.token_ids, *answer)
        size_bytes = len(tokens) * layout.stored_bytes / layout.block_tokens
        lead_s = _LEAD_S + _LEAD_LOADS * size_bytes / self._bytes_per_s
        wait_s = max(due_s - lead_s, due_s * _LEAD_SHARE)
        ahead = replace(
            request,
            request_id=RequestId(f"{request.request_id}:back"),
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=1),
            resumed_tokens=1,
            guide="",
            score_token_ids=(),
            embed=False,
        )
        task = asyncio.create_task(self._bring(ahead, layout, node, wait_s), name="return")
        self._expected[session] = task
        task.add_done_callback(lambda done: self._forget(session, done))

    async def _bring(
        self, request: GenerateRequest, layout: BlockLayout, node: NodeId, wait_s: float
    ) -> None:
        await asyncio.sleep(wait_s)
        self.loads += 1
        try:
            await asyncio.shield(asyncio.ensure_future(self._load(request, layout, node)))
        except TierKVError as error:
            log.debug("a conversation is not loaded ahead: %s", error.message)

    def _forget(self, session: Hashable, done: asyncio.Task[None]) -> None:
        if self._expected.get(session) is done:
            del self._expected[session]

    async def stop(self) -> None:
        """Expect no one any more."""
        waiting = list(self._expected.values())
        for task in waiting:
            task.cancel()
        for task in waiting:
            with suppress(asyncio.CancelledError):
                await task


def _session(request: GenerateRequest) -> Hashable:
    return request.namespace_key, request.session_id
