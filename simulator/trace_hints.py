"""Hints of a replay: facts about the future in a trace that a client could have given.

Each kind of hint is switched on separately, to measure its worth (docs/policies.md). All hints are
optional: without hints a policy sees only the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from tierkv.kvcore.block import Expectation
from tierkv.simulator.trace import Request


class Hint(NamedTuple):
    """Hint of one request: the first two fields of Outlook."""

    expectation: Expectation = Expectation.UNKNOWN
    expected_in_s: float | None = None


NO_HINT: Final = Hint()


class Hints(Protocol):
    """Source of hints."""

    def of(self, requests: Sequence[Request]) -> Iterator[Hint]:
        """Yield the hint of each request."""


@dataclass(frozen=True, slots=True)
class TraceHints:
    """The hints of a replay.

    Attributes:
        turn: an answer that ended in a tool call has another turn.
        final: the last request of a session is marked as last, all earlier requests as followed.
        think_time: time until the next turn, if the trace has this time.
    """

    turn: bool = False
    final: bool = False
    think_time: bool = False

    def of(self, requests: Sequence[Request]) -> Iterator[Hint]:
        """Yield the hint of each request; hints that need a session are unknown without one."""
        if not (self.turn or self.final or self.think_time):
            for _ in requests:
                yield NO_HINT
            return
        for request, following in zip(requests, _next_turns(requests), strict=True):
            yield self._hint(request, following)

    def _hint(self, request: Request, following: Request | None) -> Hint:
        expectation, expected_in_s = Expectation.UNKNOWN, None
        if self.turn and request.tool_use:
            expectation = Expectation.TURN
        if self.final and request.session_id is not None:
            expectation = Expectation.NONE if following is None else Expectation.TURN
        if self.think_time and following is not None:
            expected_in_s = following.think_time_s
        return Hint(expectation, expected_in_s)


NO_HINTS: Final = TraceHints()


def _next_turns(requests: Sequence[Request]) -> list[Request | None]:
    """Return the next request of the session for each request."""
    found: list[Request | None] = [None] * len(requests)
    latest: dict[str, Request] = {}
    for index in range(len(requests) - 1, -1, -1):
        session = requests[index].session_id
        if session is not None:
            found[index] = latest.get(session)
            latest[session] = requests[index]
    return found
