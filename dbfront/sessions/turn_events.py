"""The events of a streamed response: pure, from pieces of an answer to OpenAI's objects.

An answer is a message with a text part, or a message and calls of tools, or calls alone. Every
event has a ``sequence_number``, which counts from 0.

    created  in_progress
    message: output_item.added  content_part.added  output_text.delta ...
             output_text.done  content_part.done  output_item.done
    call:    output_item.added  function_call_arguments.delta ...
             function_call_arguments.done  output_item.done
    completed | incomplete | failed | cancelled
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tierkv.dbfront.sessions.session_store import SessionItem
from tierkv.dbfront.sessions.turn_form import AskedTurn
from tierkv.dbfront.tool_calls.tool import CallDelta, joined_calls
from tierkv.kvcore.request import FinishReason

Event = dict[str, Any]
_EMPTY: Final[Mapping[str, Any]] = {
    "type": "output_text", "text": "", "annotations": [], "logprobs": [],
}  # fmt: skip


class EventWriter:
    """Numbers the events of a stream; items of the output begin and end in order.

    Attributes:
        _items: number of items that have begun.
        _text: pieces of the message's text.
        _logprobs: log-probabilities of the text's tokens, if the client asked for them.
        _calls: pieces of the calls.
        _open: id of the item in progress; empty between items.
    """

    def __init__(self) -> None:
        self._number = 0
        self._items = 0
        self._text: list[str] = []
        self._logprobs: list[Mapping[str, Any]] = []
        self._calls: list[CallDelta] = []
        self._open = ""

    def begun(self, response: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events before the answer."""
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def text(
        self, asked: AskedTurn, text: str, logprobs: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[Event]:
        """Yield the events of a piece of text."""
        if not self._text:
            yield from self._message_begins(asked)
        self._text.append(text)
        self._logprobs += logprobs
        yield self._of_part("response.output_text.delta", delta=text, logprobs=list(logprobs))

    def call(self, asked: AskedTurn, delta: CallDelta) -> Iterator[Event]:
        """Yield the events of a piece of a call."""
        if delta.name:
            if self._open:
                yield from self._ends(self._item_so_far(asked))
            item = asked.call(delta.index, joined_calls([delta])[0], None).to_wire()
            yield from self._begins({**item, "arguments": "", "status": "in_progress"})
        self._calls.append(delta)
        if delta.arguments:
            yield self._of_item("response.function_call_arguments.delta", delta=delta.arguments)

    def ended(
        self, asked: AskedTurn, output: Sequence[SessionItem], response: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Yield the events after the answer.

        Args:
            asked: the turn.
            output: all items of the answer.
            response: the response with the final status.
        """
        if not self._open:  # An empty answer.
            yield from self._message_begins(asked)
        yield from self._ends(output[-1])
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, response: Mapping[str, Any]) -> Event:
        """Return the event of a response that broke."""
        return self._event("response.failed", response=response)

    def cancelled(self, response: Mapping[str, Any]) -> Event:
        """Return the event of a response that was cancelled or deleted."""
        return self._event("response.cancelled", response=response)

    def broken(self, error: Mapping[str, Any]) -> Event:
        """Return the event of a stream that has to end; ``error`` is OpenAI's error object."""
        told = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **told)

    def _message_begins(self, asked: AskedTurn) -> Iterator[Event]:
        item = {
            "id": asked.answer_id, "type": "message", "role": "assistant",
            "status": "in_progress", "content": [],
        }  # fmt: skip
        yield from self._begins(item)
        yield self._of_part("response.content_part.added", part=_EMPTY)

    def _begins(self, item: Mapping[str, Any]) -> Iterator[Event]:
        self._open = item["id"]
        self._items += 1
        yield self._event("response.output_item.added", output_index=self._items - 1, item=item)

    def _ends(self, item: SessionItem) -> Iterator[Event]:
        if item.body["type"] == "message":
            (part,) = item.body["content"]
            told = {name: part[name] for name in ("text", "logprobs")}
            yield self._of_part("response.output_text.done", **told)
            yield self._of_part("response.content_part.done", part=part)
        else:
            told = {name: item.body[name] for name in ("arguments", "name")}
            yield self._of_item("response.function_call_arguments.done", **told)
        self._open = ""
        done, at = "response.output_item.done", self._items - 1
        yield self._event(done, output_index=at, item=item.to_wire())

    def _item_so_far(self, asked: AskedTurn) -> SessionItem:
        """Return the open item, which is complete because another one begins."""
        calls = joined_calls(self._calls)
        text, logprobs = "".join(self._text), self._logprobs
        return asked.output(text, calls, FinishReason.STOP, logprobs=logprobs)[-1]

    def _of_part(self, kind: str, **told: Any) -> Event:
        return self._of_item(kind, content_index=0, **told)

    def _of_item(self, kind: str, **told: Any) -> Event:
        return self._event(kind, item_id=self._open, output_index=self._items - 1, **told)

    def _event(self, kind: str, **told: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **told}
