"""The events of a streamed response: pure, from pieces of text to OpenAI's objects.

One message with one text part. Every event has a ``sequence_number``, which counts from 0.

    created  in_progress  output_item.added  content_part.added
    output_text.delta ...
    output_text.done  content_part.done  output_item.done  completed | incomplete | failed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tierkv.dbfront.sessions.session_store import SessionItem

_AT: Final[Mapping[str, int]] = {"output_index": 0, "content_index": 0}
_EMPTY: Final[Mapping[str, Any]] = {
    "type": "output_text", "text": "", "annotations": [], "logprobs": [],
}  # fmt: skip


class EventWriter:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._item_id = ""
        self._number = 0

    def begun(self, response: Mapping[str, Any], item_id: str) -> Iterator[dict[str, Any]]:
        """Yield the events before the first text; ``item_id`` is that of the answer."""
        self._item_id = item_id
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        item = {
            "id": self._item_id, "type": "message", "role": "assistant", "status": "in_progress",
            "content": [],
        }  # fmt: skip
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._of_part("response.content_part.added", part=_EMPTY)

    def delta(self, text: str) -> dict[str, Any]:
        """Return the event of a piece of text."""
        return self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def ended(self, answer: SessionItem, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events after the last text; ``response`` has its final status."""
        (part,) = answer.body["content"]
        yield self._of_part("response.output_text.done", text=part["text"], logprobs=[])
        yield self._of_part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=answer.to_wire())
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """Return the event of a response that broke."""
        return self._event("response.failed", response=response)

    def broken(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """Return the event of a stream that has to end; ``error`` is OpenAI's error object."""
        told = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **told)

    def _of_part(self, kind: str, **told: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, **_AT, **told)

    def _event(self, kind: str, **told: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **told}
