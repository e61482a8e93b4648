"""An unanswered turn, and the response object for clients. Pure.

Used by dbfront/sessions/chat.py, and by dbfront/http/responses: REST can return
a turn from SQL as a response. No other module knows the fields of OpenAI's response object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tierkv.dbfront.contracts import TextAnswer
from tierkv.dbfront.sessions.items import function_call, message, new_id
from tierkv.dbfront.sessions.session_store import SessionItem, SessionTurn, TurnStatus
from tierkv.dbfront.tool_calls.tool import ToolCall
from tierkv.kvcore.request import FinishReason, Usage

_STATES: Final = ("incomplete", "completed")
_FIELDS: Final[Mapping[str, Any]] = {
    "background": False,
    "completed_at": None,
    "conversation": None,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
}
"""Fields of a response that its request leaves open."""


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A turn before its answer.

    Attributes:
        tenant: on whose behalf.
        session_id: the turn's session; empty: nothing is stored.
        asked: the items of the request.
        created_s: Unix time.
        model: name of the answering model.
        parent: the response that the turn follows.
        fields: fields of the response that the request determines.
        response_id: id of the response.
        answer_id: id of the item with the answer.
    """

    tenant: str
    session_id: str
    asked: Sequence[SessionItem]
    created_s: float
    model: str
    parent: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    response_id: str = field(default_factory=lambda: new_id("resp"))
    answer_id: str = field(default_factory=lambda: new_id("msg"))

    def open(self, status: TurnStatus, now_s: float) -> SessionTurn:
        """Return the turn while it has no answer."""
        return SessionTurn(
            self.tenant,
            self.response_id,
            self.session_id,
            status,
            self._body(),
            self.created_s,
            parent=self.parent,
            model=self.model,
            alive_s=now_s,
        )

    def answered(self, answer: TextAnswer, now_s: float) -> SessionTurn:
        """Return the turn with its answer."""
        cut = answer.finish_reason is FinishReason.LENGTH
        return SessionTurn(
            self.tenant,
            self.response_id,
            self.session_id,
            TurnStatus.INCOMPLETE if cut else TurnStatus.COMPLETED,
            self._body(
                completed_at=None if cut else int(now_s),
                incomplete_details={"reason": "max_output_tokens"} if cut else None,
                usage=usage_json(answer.usage),
            ),
            self.created_s,
            parent=self.parent,
            model=self.model,
            ended_s=now_s,
            input_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            hits=answer.usage.hit_tokens,
        )

    def items(
        self, answer: TextAnswer, logprobs: Sequence[Mapping[str, Any]] = ()
    ) -> list[SessionItem]:
        """Return the items of the request and of the answer."""
        asked = [replace(item, response_id=self.response_id) for item in self.asked]
        text, calls, reason = answer.text, answer.tool_calls, answer.finish_reason
        return [*asked, *self.output(text, calls, reason, logprobs=logprobs)]

    def output(
        self,
        text: str,
        calls: Sequence[ToolCall],
        reason: FinishReason | None,
        *,
        logprobs: Sequence[Mapping[str, Any]] = (),
    ) -> list[SessionItem]:
        """Return the items of an answer: a message, unless calls alone, and each call."""
        items = []
        if text or not calls:
            complete = bool(calls) or reason is FinishReason.STOP
            body = message("assistant", text, status=_STATES[complete], logprobs=logprobs)
            items.append(SessionItem(self.answer_id, body, self.response_id, is_output=True))
        last = len(calls) - 1
        return items + [
            self.call(index, call, FinishReason.STOP if index < last else reason)
            for index, call in enumerate(calls)
        ]

    def call(self, index: int, call: ToolCall, reason: FinishReason | None) -> SessionItem:
        """Return the item of a call; ``reason`` tells whether the call is complete."""
        item_id = f"fc_{self.response_id.removeprefix('resp_')}_{index}"
        body = function_call(call, status=_STATES[reason is FinishReason.STOP])
        return SessionItem(item_id, body, self.response_id, is_output=True)

    def _body(self, **told: Any) -> dict[str, Any]:
        known = {"object": "response", "created_at": int(self.created_s), "model": self.model}
        return {**known, **_FIELDS, **self.fields, **told}


def response_json(turn: SessionTurn, items: Iterable[SessionItem]) -> dict[str, Any]:
    """Return a response as clients see it.

    Args:
        turn: the turn.
        items: its items; those of the request are left out.
    """
    output = [item.to_wire() for item in items if item.is_output]
    return {"id": turn.response_id, **turn.body, "status": turn.status.value, "output": output}


def unanswered(
    turn: SessionTurn, now_s: float, error: Mapping[str, Any] | None = None
) -> SessionTurn:
    """Return an open turn that gets no answer: failed with an error, or cancelled without."""
    return replace(
        turn,
        status=TurnStatus.FAILED if error else TurnStatus.CANCELLED,
        body={**turn.body, "error": error},
        ended_s=now_s,
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage of a response, with the same details of the cache as for chat."""
    details: dict[str, Any] = {
        "cached_tokens": usage.hit_tokens.total,
        "cache_write_tokens": usage.written_tokens,
        "blended_tokens": usage.blended_tokens,
        "recomputed_tokens": usage.recomputed_tokens,
    }
    if usage.selector is not None:
        details["selector"] = str(usage.selector)
    if usage.kv_codec.is_lossy:
        details["kv_codec"] = str(usage.kv_codec)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
