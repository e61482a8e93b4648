"""The events of a streamed response, for clients whose connection broke."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import Any

from tierkv.dbfront.contracts import TextEvent
from tierkv.dbfront.http.endpoints.openai import chat_logprobs
from tierkv.dbfront.http.responses.response_run import ResponseRun
from tierkv.dbfront.sessions.turn_events import EventWriter


class KeptEvents:
    """The events of one streamed response; ``events[n]`` has sequence number n.

    Attributes:
        writer: numbers the events.
        events: so far.
        ended: True behind the last event.
    """

    def __init__(self) -> None:
        self.writer = EventWriter()
        self.events: list[Mapping[str, Any]] = []
        self.ended = False
        self._news = asyncio.Event()

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Append events, and wake those that follow."""
        self.events += events
        self._wake()

    def end(self) -> None:
        """Nothing comes any more."""
        self.ended = True
        self._wake()

    async def after(self, number: int) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield all events behind a number, until the end of the response."""
        at = max(0, number + 1)
        while True:
            news = self._news
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if self.ended:
                return
            await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def told_events(
    run: ResponseRun, writer: EventWriter, event: TextEvent
) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a piece of an answer."""
    if event.text:
        logprobs = chat_logprobs(event.tokens)["content"]
        yield from writer.text(run.asked, event.text, logprobs)
    for delta in event.calls:
        yield from writer.call(run.asked, delta)
