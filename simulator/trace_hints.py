"""What a trace knows of the future that a client could have said: the hints of a replay.

Each is switched on by itself, so that its worth can be measured (docs/policies.md). None of them is
needed: without them a policy is told nothing but the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from tierkv.kvcore.block import Expectation
from tierkv.simulator.trace import Request


class Hint(NamedTuple):
    """Of one request: the first two fields of Outlook."""

    expectation: Expectation = Expectation.UNKNOWN
    expected_in_s: float | None = None


NO_HINT: Final = Hint()


class Hints(Protocol):
    """Where hints come from."""

    def of(self, requests: Sequence[Request]) -> Iterator[Hint]:
        """Yield the hint of each request."""


@dataclass(frozen=True, slots=True)
class TraceHints:
    """Which hints a replay gives.

    Attributes:
        turn: an answer that ended in a tool call has another turn.
        final: the last request of a session says so; all others of a session have another turn.
        think_time: how long the next turn will take to come, where the trace knows.
    """

    turn: bool = False
    final: bool = False
    think_time: bool = False

    def of(self, requests: Sequence[Request]) -> Iterator[Hint]:
        """Yield the hint of each request; requests without a session get what they have."""
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
    """Return, per request, the next one of its session."""
    found: list[Request | None] = [None] * len(requests)
    latest: dict[str, Request] = {}
    for index in range(len(requests) - 1, -1, -1):
        session = requests[index].session_id
        if session is not None:
            found[index] = latest.get(session)
            latest[session] = requests[index]
    return found
