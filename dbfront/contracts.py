"""Contracts inside the front: what the servers (pgwire, http, CLI) require from other packages.

TextGenerator serves AI calls and chat requests; dbfront/generation/generation.py implements the
contract. CallPlan and RowStream are the plan of a statement's calls and the stream of a statement's
rows. All values are frozen. This module imports no other package of the front, and loads no heavy
library.
"""

from __future__ import annotations

import secrets
from asyncio import Future
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

from tierkv.dbfront.answer_token import AnswerToken
from tierkv.dbfront.tool_calls.tool import CallDelta, ToolCall, ToolUse
from tierkv.kvcore.access import RightsBook
from tierkv.kvcore.call_options import USUAL, CallOptions, Steering
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import ModelInfo, PreferredNode
from tierkv.kvcore.request import FinishReason, GenerateRequest, Usage
from tierkv.sql.settings import FieldReorder

if TYPE_CHECKING:
    from tierkv.scheduler.plans.forecast import (
        Forecast,  # The command line imports Column from here, but must not import the scheduler.
    )


_BULK_PRIORITY: Final = 1
"""Priority of calls in large batches: this many steps behind interactive calls."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; ``role`` is system, user, assistant or tool.

    ``tool_calls`` are the calls of an assistant; ``tool_call_id`` is the call that a tool answers.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class TextCall:
    """One text request to a model, from SQL or REST.

    Exactly one of ``messages`` (rendered by the model's chat template), ``prompt`` (raw completion)
    and ``prompt_token_ids`` is set. ``model`` None means the default model.

    ``documents`` are placed before the text of the first user message, or before the raw prompt.
    With a ``chunk_separator``, the pieces of this text between two separators are chunks too.
    Chunks are blended if the tenant's namespace allows blending and ``options`` do not refuse
    blending.

    Instead of free text a call may request JSON of a schema (``json_schema``, JSON text), one of
    ``labels`` with the probabilities of all labels, or the embedding of the prompt (``embed``); at
    most one of the three. JSON calls accept no ``stop``, and JSON that ends with
    FinishReason.LENGTH is incomplete. Labels and embeddings generate no tokens, so sampling options
    and ``max_tokens`` have no effect.

    ``logprobs`` is the number of alternatives to report with the log-probability of each token;
    None: no report. Such answers are never taken from the answer cache.

    With ``tools`` the answer may consist of calls of tools (dbfront/tool_calls). Such answers are
    never taken from the answer cache.

    ``origin`` is the REST route of the call, for statistics; empty for calls from SQL. ``key`` is
    the name of the REST key, for its limits; empty for keys without a name. ``session`` names the
    session whose earlier answers ``answer_cache = session`` allows; empty: the call has none.
    With ``steering`` the answer is JSON text about the prompt's KV
    (dbfront/generation/steering.py).
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    documents: tuple[str, ...] = ()
    model: str | None = None
    options: CallOptions = USUAL
    json_schema: str = ""
    labels: tuple[str, ...] = ()
    embed: bool = False
    tools: ToolUse | None = None
    logprobs: int | None = None
    steering: Steering | None = None
    tenant: str = "default"
    request_id: RequestId | None = None
    origin: str = ""
    key: str = ""
    session: str = ""

    def __hash__(self) -> int:
        """Hash what differs from row to row: a call is looked up several times on its way."""
        return hash((self.messages, self.prompt, self.prompt_token_ids, self.labels))


@dataclass(frozen=True, slots=True)
class SessionCall:
    """The next message of a conversation that the front keeps; ``call`` has the message last.

    With ``steering`` the call is about the KV of the conversation, and its message stands for that.
    """

    session: str
    call: TextCall


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """Values of the session's ``tierkv.*`` settings for AI calls without explicit options.

    Attributes:
        options: defaults for the options of each call.
        prefix_order: True to run neighbours in the prefix tree consecutively.
        plan: True to also plan which node runs which part of the prefix tree, and which blocks to
            hold.
        max_concurrency: maximum number of calls in flight.
        field_reorder: how ``context`` fields are ordered.
        bulk_calls: batches with more calls are bulk; 0 disables the bulk priority.
    """

    options: CallOptions = USUAL
    model: str | None = None
    system_prompt: str = ""
    tenant: str = "default"
    key: str = ""
    session: str = ""
    prefix_order: bool = True
    plan: bool = True
    max_concurrency: int = 64
    field_reorder: FieldReorder = FieldReorder.STATS
    bulk_calls: int = 32

    def for_batch(self, calls: int) -> CallDefaults:
        """Return the defaults for a batch of ``calls`` calls.

        Bulk calls get a lower priority, so interactive calls go first. A priority set by the
        session is kept.
        """
        if self.options.priority or not 0 < self.bulk_calls < calls:
            return self
        return replace(self, options=replace(self.options, priority=_BULK_PRIORITY))


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A checked and tokenized TextCall; ``request`` is the scheduler's request.

    ``blend_refusal`` is the reason why a call with blending is answered exactly; empty otherwise.
    ``index`` and ``preferred_node`` are set by CallPlan: the call's position among the statement's
    calls, and the node chosen by the plan; None without a plan.
    """

    call: TextCall
    model: ModelInfo
    request: GenerateRequest
    blend_refusal: str = ""
    preferred_node: PreferredNode | None = None
    index: int = 0

    def in_turn(
        self, index: int, request: GenerateRequest, node: PreferredNode | None
    ) -> PreparedCall:
        """Return the call as it is sent now; see scheduler/plans/statement_run.py."""
        # Explicit constructor: dataclasses.replace takes five times as long, for every call.
        return PreparedCall(self.call, self.model, request, self.blend_refusal, node, index)


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of an answer. The last event has finish_reason, usage and times (seconds).

    The last event also has the requested readouts; see TextAnswer. ``calls`` stand behind ``text``.
    ``tokens`` are those of the text, if the call asks for log-probabilities.
    """

    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    ttft_s: float = 0.0
    total_s: float = 0.0
    node_id: str = ""
    label_probabilities: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()
    cached: bool = False
    calls: tuple[CallDelta, ...] = ()
    stop: str = ""
    tokens: tuple[AnswerToken, ...] = ()


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """A complete answer.

    Attributes:
        label_probabilities: probabilities of the call's ``labels``, in order; the sum is 1.0. The
            probability of a label is the product, token by token, of the token's probability among
            all tokens with which labels continue. ``text`` is the most likely label. Labels ruled
            out early may share the remaining probability evenly.
        embedding: [hidden] of unit length, if requested; ``text`` is then empty.
        model: name of the answering model; empty if not recorded.
        cached: True for the answer to an equal earlier call. ``usage`` has the tokens of prompt and
            answer, none of which cost anything this time.
        tool_calls: the answer's calls of tools, in order.
        stop: the stop string that ended the answer; empty if none did, and for a cached answer.
        tokens: the tokens of the answer, if the call asks for log-probabilities.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    ttft_s: float
    total_s: float
    node_id: str = ""
    label_probabilities: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()
    model: str = ""
    cached: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    stop: str = ""
    tokens: tuple[AnswerToken, ...] = ()

    @classmethod
    def of(
        cls,
        text: str,
        last: TextEvent,
        *,
        model: str = "",
        tool_calls: tuple[ToolCall, ...] = (),
        tokens: tuple[AnswerToken, ...] = (),
    ) -> TextAnswer:
        """Complete an answer with the last event of its stream."""
        assert last.finish_reason is not None and last.usage is not None
        return cls(
            text=text,
            finish_reason=last.finish_reason,
            usage=last.usage,
            ttft_s=last.ttft_s,
            total_s=last.total_s,
            node_id=last.node_id,
            label_probabilities=last.label_probabilities,
            embedding=last.embedding,
            model=model,
            cached=last.cached,
            tool_calls=tool_calls,
            stop=last.stop,
            tokens=tokens,
        )


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Properties of a call plan, for EXPLAIN.

    Attributes:
        runs: number of pieces of the prompts' prefix tree; 0 without a plan.
        shared_tokens: prompt tokens shared with another call of the statement.
    """

    runs: int = 0
    shared_tokens: int = 0

    def __add__(self, other: PlanSummary) -> PlanSummary:
        return PlanSummary(self.runs + other.runs, self.shared_tokens + other.shared_tokens)


class CallPlan(Protocol):
    """The order in which the calls of a statement are sent, and when each call is sent.

    1. ``take`` returns each call once, with its index, to the first task that calls it, and waits
       while the next call has to wait. ``take`` returns None when no call is left.
    2. ``prefilled`` may be called at a call's first token. ``ended`` must be called at its end.
    3. ``close`` ends the plan in any state and releases all blocks held for the plan.
    """

    @property
    def runs(self) -> int:
        """Number of pieces of the prompts' prefix tree; 0 without a plan."""
        ...

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens shared with another call of the statement; 0 without a plan."""
        ...

    async def take(self) -> PreparedCall | None: ...

    def prefilled(self, index: int) -> None: ...

    def ended(self, index: int, *, answered: bool) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token count of each text, without special tokens, and the model's context length."""

    counts: tuple[int, ...]
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Prospect:
    """Forecast for a set of calls.

    Attributes:
        forecast: time to the first token of each call, and the decoding speed.
        answer_tokens: expected answer length of each call, learned from earlier answers;
            ``max_tokens`` if no answer was observed.
        learned: True if every answer length was learned from earlier answers.
    """

    forecast: Forecast
    answer_tokens: tuple[float, ...]
    learned: bool


@dataclass(frozen=True, slots=True)
class EncodedAhead:
    """A prompt that is being encoded together with others.

    Attributes:
        batch: the token ids of all prompts; empty if they could not be encoded together.
        index: the prompt's place in the batch.
    """

    batch: Future[list[tuple[int, ...]]]
    index: int

    async def token_ids(self) -> tuple[int, ...] | None:
        """Wait for the ids; None if the prompt has to be encoded alone."""
        batch = await self.batch
        return batch[self.index] if batch else None


class TextGenerator(Protocol):
    """Text in, text out, through the scheduler.

    1. ``prepare`` raises UnknownModelError, ContextTooLongError, UdfArgumentError, or
       RightMissingError if ``rights`` keep the tenant from the model, and never runs a model. The
       cost is tokenization and one namespace lookup (cached).
    2. ``stream`` yields text as it is generated (whole characters, stop strings removed); the last
       event has the finish_reason. Closing the iterator cancels the request.
    3. ``answer`` collects ``stream`` into one answer.
    4. ``plan`` receives all calls of a statement before the first call is sent, and decides when to
       ``stream`` each call. At most ``max_in_flight`` turns are open at any time. ``plan`` may be
       called in another thread, because planning many calls takes a while.
    5. ``count_tokens`` counts with the model's own tokenizer and runs no model.
    6. ``forecast`` predicts the cost of answering all calls of a statement, and runs no model.
    7. ``rights`` are those of the callers: functions are checked by whoever calls them.
    8. ``token_ids`` returns the tokens of a call's prompt, of any length; ``text_of`` the text of
       tokens. Neither runs a model. Errors as of ``prepare``.
    9. ``encode_ahead`` begins to encode the prompts of calls in another thread. ``prepare`` gets
       what it returned for the call, and gives the same result without. It raises no error.
    10. ``chat`` answers the next message of a conversation, and stores both, or raises an error and
       stores nothing. Turns of one conversation run one after the other.
    """

    @property
    def rights(self) -> RightsBook: ...

    async def encode_ahead(self, calls: Sequence[TextCall]) -> Sequence[EncodedAhead | None]: ...

    async def prepare(self, call: TextCall, ahead: EncodedAhead | None = None) -> PreparedCall: ...

    def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]: ...

    async def answer(self, prepared: PreparedCall) -> TextAnswer: ...

    async def chat(self, turn: SessionCall) -> TextAnswer: ...

    def plan(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> CallPlan: ...

    async def count_tokens(self, texts: Sequence[str], model: str | None) -> TokenCounts: ...

    async def token_ids(self, call: TextCall) -> tuple[int, ...]: ...

    async def text_of(self, token_ids: Sequence[int], model: str | None) -> str: ...

    async def forecast(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> Prospect: ...

    async def models(self) -> tuple[ModelInfo, ...]: ...


@dataclass(frozen=True, slots=True)
class TableAccess:
    """Which schemas of the embedded database a client may use, where users log in.

    Attributes:
        book: the rights to obey; None: an administrator, who may use all.
        has_schema: the client's own schema is made at login.
    """

    book: RightsBook | None
    has_schema: bool = False


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """The identity of a client; ``user`` is also the tenant unless the server maps users to
    tenants.

    ``database`` is the client's name for the database; empty means the engine's name. ``key`` is
    the name of the REST key that the client uses. ``session`` is a name that no other session has.
    """

    user: str = "default"
    database: str = ""
    application_name: str = ""
    address: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    session: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)
