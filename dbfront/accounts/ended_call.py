"""The events of the accounts: one value for each request to a model, and for each AI call.

dbfront/generation/generation.py updates a ModelRequest with each event of a request; no other code
creates a ModelRequest. AiStatement (dbfront/statement/ai_statement.py) creates the EndedCall of a
call in SQL. Both are published once, at their end, to reducers that sum up events and keep neither.
A retried request, or a request shared by several calls, is a single event, so requests and calls
are counted separately. Rows answered from a statement's memo
create no event, because a row may cost no more than a dictionary lookup; their number is counted at
the end of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from tierkv.dbfront.contracts import PreparedCall, TextAnswer, TextCall
from tierkv.kvcore.errors import TierKVError
from tierkv.kvcore.request import FinishReason, Usage

_NOTHING: Final = Usage(0, 0)


class CallEnd(StrEnum):
    """The way a call or a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CallCost:
    """The models' work for a call: sums over the answers charged to the call.

    A failed call is charged for its answers before the failure. An answer shared by several calls
    is charged to only one call, so a call may be charged for nothing.

    Attributes:
        usage: tokens by source; only counters are summed up.
        first_tokens_s: time to first token of each answer; 0.0 without a token.
        total_s: sum of the durations of all answers.
        nodes: answering node of each answer.
        cached_answers: answers from the answer cache; they cost nothing and are in no other sum.
    """

    usage: Usage = _NOTHING
    first_tokens_s: tuple[float, ...] = ()
    total_s: float = 0.0
    nodes: tuple[str, ...] = ()
    cached_answers: int = 0

    @staticmethod
    def of(answers: Sequence[TextAnswer]) -> CallCost:
        """Sum up answers."""
        cached = sum(answer.cached for answer in answers)
        if cached:
            asked = CallCost.of([answer for answer in answers if not answer.cached])
            return replace(asked, cached_answers=cached)
        if len(answers) == 1:
            (only,) = answers
            return CallCost(only.usage, (only.ttft_s,), only.total_s, (only.node_id,))
        usage = _NOTHING
        for answer in answers:
            usage = _sum(usage, answer.usage)
        return CallCost(
            usage,
            tuple(answer.ttft_s for answer in answers),
            sum(answer.total_s for answer in answers),
            tuple(answer.node_id for answer in answers),
        )


def _sum(one: Usage, other: Usage) -> Usage:
    return replace(
        one,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        hit_tokens=one.hit_tokens + other.hit_tokens,
        written_tokens=one.written_tokens + other.written_tokens,
        blended_tokens=one.blended_tokens + other.blended_tokens,
        recomputed_tokens=one.recomputed_tokens + other.recomputed_tokens,
    )


def end_of(answers: Sequence[TextAnswer]) -> CallEnd:
    """Return the end of an answered call: LENGTH if any of its answers was cut off."""
    cut = any(answer.finish_reason is FinishReason.LENGTH for answer in answers)
    return CallEnd.LENGTH if cut else CallEnd.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCall:
    """An AI call that was answered or failed: a call of a statement, or a call by REST.

    Attributes:
        statement: id of the statement's run, or of the REST request.
        function: SQL name of the function, or the REST route.
        model: name of the model.
        end: the way the call ended.
        cost: cost charged to the call.
        form: key of the call's form in the statement; -1 for REST.
        error: error of a failed call of a statement.
        is_null: True if the call gives NULL, answered or not.
        is_local: True if the function asks no model.
        is_vector: True for the vector of a row, computed for a cascade; the row's own call is
            another event.
        is_classified: True if a classifier answered instead of the model.
        retries: requests sent again for the call.
        ended_s: monotonic time.
    """

    statement: str
    function: str
    model: str
    end: CallEnd
    cost: CallCost = CallCost()
    form: int = -1
    error: TierKVError | None = None
    is_null: bool = False
    is_local: bool = False
    is_vector: bool = False
    is_classified: bool = False
    retries: int = 0
    ended_s: float = 0.0

    @property
    def failed(self) -> bool:
        """True if there is no answer."""
        return self.end is CallEnd.FAILED


def kind_of(call: TextCall) -> str:
    """Return the kind of answer requested: ``embedding``, ``label``, ``json`` or ``text``."""
    if call.embed:
        return "embedding"
    if call.labels:
        return "label"
    return "json" if call.json_schema else "text"


class CallReducer(Protocol):
    """Sums up the calls of a statement.

    1. ``take`` is called once for each call, at the end of the call, and neither raises nor waits.
    """

    def take(self, call: EndedCall) -> None: ...


@dataclass(slots=True)
class ModelRequest:
    """A request to a model: updated while in progress, published once at its end.

    Attributes:
        prepared: the prepared call.
        started_s: monotonic start time.
        completion_tokens: tokens so far.
        ttft_s: 0.0 until the first token. At the end, calls of a statement have the node's
            measurement.
        total_s: seconds from the call to the end; 0.0 until the end.
        node_id: the answering node; empty until the first token.
        usage: tokens by source, set at the end; None if no node reported usage.
        end: the way the request ended; CANCELLED until known.
        error_code: code of the error that ended the request.
        cached: True if the answer came from the answer cache, so no model was asked.
    """

    prepared: PreparedCall
    started_s: float
    completion_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    node_id: str = ""
    usage: Usage | None = None
    end: CallEnd = CallEnd.CANCELLED
    error_code: str = ""
    cached: bool = False

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.prepared.request.model

    def as_call(self) -> EndedCall:
        """Return the ended request as an EndedCall, for a call by REST."""
        cost = CallCost(cached_answers=1)
        if not self.cached:
            cost = CallCost(self.usage or _NOTHING, (self.ttft_s,), self.total_s, (self.node_id,))
        return EndedCall(
            statement=self.prepared.request.request_id,
            function=self.prepared.call.origin,
            model=self.model,
            end=self.end,
            cost=cost,
        )
