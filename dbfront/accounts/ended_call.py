"""The events of the accounts: one value for each request to a model, and one for each AI call.

A LiveCall (dbfront/generation/live_call.py) makes the EndedRequest of a request, AiStatement
(dbfront/statement/ai_statement.py) the EndedCall of a call in SQL; each is published once, to
reducers that add it up. A request that is tried again, or that several calls share, is one event of
its own, so requests and calls are counted apart. Rows that are answered from a statement's memo
make no event, because a row may cost no more than a dictionary lookup; their number is settled at
the end of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from tierkv.dbfront.contracts import TextAnswer, TextCall
from tierkv.kvcore.errors import TierKVError
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.request import FinishReason, Usage

_NOTHING: Final = Usage(0, 0)


class CallEnd(StrEnum):
    """How a call, or a request, ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CallCost:
    """What models did for a call: the sums over the answers that the call is charged for.

    A failed call is charged for the answers that it had before it failed. A call is charged for
    nothing when other calls are charged for the answers that it shares with them.

    Attributes:
        usage: tokens by source; only counters are added up.
        first_tokens_s: time to first token of each answer; 0.0 where there was no token.
        total_s: seconds of all answers, added up.
        nodes: which node gave each answer.
    """

    usage: Usage = _NOTHING
    first_tokens_s: tuple[float, ...] = ()
    total_s: float = 0.0
    nodes: tuple[str, ...] = ()

    @staticmethod
    def of(answers: Sequence[TextAnswer]) -> CallCost:
        """Add up answers."""
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
    """Return how an answered call ended: cut, if any of its answers was."""
    cut = any(answer.finish_reason is FinishReason.LENGTH for answer in answers)
    return CallEnd.LENGTH if cut else CallEnd.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCall:
    """An AI call that was answered or failed: one of a statement, or one that came by REST.

    Attributes:
        statement: id of the run of the statement, or of the request by REST.
        function: SQL name of the function, or the REST route.
        model: which model was asked.
        end: how the call ended.
        cost: what it is charged for.
        form: key of its form in the statement; -1 by REST.
        error: what a call of a statement failed with.
        is_null: the call gives NULL, answered or not.
        is_local: the function asks no model.
        retries: requests that were sent again for it.
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
    retries: int = 0
    ended_s: float = 0.0

    @property
    def failed(self) -> bool:
        """True when there is no answer."""
        return self.end is CallEnd.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request to a model that was answered, failed or was cancelled.

    Attributes:
        request_id: of the request.
        model: which model was asked.
        tenant: whose namespace the request used.
        kind: what was asked for, see ``kind_of``.
        origin: the REST route; empty for a request of a statement.
        end: how the request ended.
        usage: tokens by source; None where no node told any.
        ttft_s: time to first token; 0.0 where there was no token.
        total_s: seconds from the call to the end.
        node_id: which node answered.
        error_code: of the error that ended it.
    """

    request_id: RequestId
    model: str
    tenant: str
    end: CallEnd
    usage: Usage | None
    ttft_s: float
    total_s: float
    kind: str = "text"
    origin: str = ""
    node_id: str = ""
    error_code: str = ""

    def as_call(self) -> EndedCall:
        """Return the call by REST that the request is."""
        cost = CallCost(self.usage or _NOTHING, (self.ttft_s,), self.total_s, (self.node_id,))
        return EndedCall(
            statement=self.request_id,
            function=self.origin,
            model=self.model,
            end=self.end,
            cost=cost,
        )


def kind_of(call: TextCall) -> str:
    """Return what a request asks for: ``embedding``, ``label``, ``json`` or ``text``."""
    if call.embed:
        return "embedding"
    if call.labels:
        return "label"
    return "json" if call.json_schema else "text"


class CallReducer(Protocol):
    """Adds up the calls of a statement.

    1. ``take`` is told each call once, when the call ended; it neither raises nor waits.
    """

    def take(self, call: EndedCall) -> None: ...
