"""The front's inner borders: what the doors (pgwire, http, CLI) ask of the rooms behind them.

SqlSession is what a SQL client talks to (implemented by dbfront/statement/executor.py);
TextGenerator is what an AI call or a chat request talks to (implemented by
dbfront/generation/generation.py). Values are frozen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tierkv.kvcore.call_options import USUAL, CallOptions
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import ModelInfo, PreferredNode
from tierkv.kvcore.request import FinishReason, GenerateRequest, Usage

if TYPE_CHECKING:
    from tierkv.scheduler.plans.forecast import (
        Forecast,  # The command line wants Column and no scheduler.
    )


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; ``role`` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextCall:
    """One call of a model with text, from SQL or REST.

    Exactly one of ``messages`` (rendered by the model's chat template), ``prompt`` (raw completion)
    and ``prompt_token_ids`` is set. ``model`` None means the default model.

    ``documents`` stand before the text of the first user message, or of the raw prompt; with
    a ``chunk_separator`` the pieces of that text between two separators are chunks too. Chunks are
    blended where the tenant's namespace allows blending, unless ``options`` refuse.

    Instead of free text it may ask for JSON of a schema (``json_schema``, JSON text), for one of
    ``labels`` with their probabilities, or for the prompt's embedding (``embed``); at most one.
    ``origin`` names the REST route it came by, for statistics; it is empty for calls from SQL.
    JSON that ends with FinishReason.LENGTH is not whole; it takes no ``stop``. Labels and
    embeddings generate nothing: how tokens are chosen and how many does not matter to them.
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
    tenant: str = "default"
    request_id: RequestId | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A TextCall that was checked and turned into token ids; ``request`` goes to the scheduler.

    ``blend_refusal`` says why a call that asked for blending is answered exactly; else empty.
    ``preferred_node`` is where the plan of its statement wants it, if there is a plan.
    """

    call: TextCall
    model: ModelInfo
    request: GenerateRequest
    blend_refusal: str = ""
    preferred_node: PreferredNode | None = None


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of an answer. The last event has finish_reason, usage and times (seconds).

    It also has the readouts that were asked for; see TextAnswer.
    """

    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    ttft_s: float = 0.0
    total_s: float = 0.0
    node_id: str = ""
    label_probabilities: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """A whole answer.

    Attributes:
        label_probabilities: of the call's ``labels``, in their order; they add up to 1.0. Each is
            the product, token by token, of the chance among the tokens that labels go on with.
            ``text`` is the likeliest label. Labels that can't be it may share what is left evenly.
        embedding: [hidden] of unit length, where it was asked for; ``text`` is empty then.
        model: who answered; empty where nobody wrote it down.
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


@dataclass(frozen=True, slots=True)
class CallTurn:
    """A call that is to be sent now: its index in the statement, and what to stream."""

    index: int
    prepared: PreparedCall


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What an order of calls is like, for EXPLAIN.

    Attributes:
        runs: pieces the prompts' prefix tree was cut into; 0 without a plan.
        shared_tokens: prompt tokens that another call of the statement has in common.
    """

    runs: int = 0
    shared_tokens: int = 0

    def __add__(self, other: PlanSummary) -> PlanSummary:
        return PlanSummary(self.runs + other.runs, self.shared_tokens + other.shared_tokens)


class CallPlan(Protocol):
    """In which order the calls of a statement are sent, and when.

    1. ``take`` gives each call once, to whichever task asks first, and waits where a call should
       wait; it answers None when all were given.
    2. ``prefilled`` may be told a call's first token, ``ended`` must be told its end.
    3. ``close`` ends it wherever it is, and nothing is kept for its calls after that.
    """

    @property
    def summary(self) -> PlanSummary: ...

    async def take(self) -> CallTurn | None: ...

    def prefilled(self, index: int) -> None: ...

    def ended(self, index: int, *, answered: bool) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of each text, special ones not counted, and what the model's context holds."""

    counts: tuple[int, ...]
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Prospect:
    """What answering some calls would take.

    Attributes:
        forecast: up to the first token of each, and how fast answers grow.
        answer_tokens: of each, as long as such answers were; the most that is allowed where there
            was none.
        learned: no answer's length is just the most that is allowed.
    """

    forecast: Forecast
    answer_tokens: tuple[float, ...]
    learned: bool


class TextGenerator(Protocol):
    """From text to text through the scheduler.

    1. ``prepare`` raises UnknownModelError, ContextTooLongError or UdfArgumentError and never runs
       a model; it costs tokenisation and one namespace lookup (cached).
    2. ``stream`` yields text as it comes (whole characters, stop strings cut off); the last event
       has the finish_reason. Closing the iterator cancels the request.
    3. ``answer`` is ``stream`` gathered.
    4. ``plan`` takes all calls of a statement before the first one is sent, and says when to
       ``stream`` which; at most ``max_in_flight`` turns have not ended at any time. It may be
       called in another thread, for many calls take a while.
    5. ``count_tokens`` counts with the model's own tokenizer and runs nothing.
    6. ``forecast`` says what it would take to answer all calls of a statement, and runs nothing.
    """

    async def prepare(self, call: TextCall) -> PreparedCall: ...

    def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]: ...

    async def answer(self, prepared: PreparedCall) -> TextAnswer: ...

    def plan(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> CallPlan: ...

    async def count_tokens(self, texts: Sequence[str], model: str | None) -> TokenCounts: ...

    async def forecast(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> Prospect: ...

    async def models(self) -> tuple[ModelInfo, ...]: ...


@dataclass(frozen=True, slots=True)
class Column:
    """A result column.

    Attributes:
        type_name: DuckDB's, such as ``INTEGER`` or ``DECIMAL(18,3)``.
        table_oid: the table whose column this is, as in pg_class; 0 for anything else.
        attnum: the column's number in that table, as in pg_attribute; 0 for anything else.
    """

    name: str
    type_name: str
    table_oid: int = 0
    attnum: int = 0


@dataclass(frozen=True, slots=True)
class Notice:
    """A message beside the result; ``severity`` is NOTICE or WARNING."""

    severity: str
    message: str
    sqlstate: str = "00000"
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StatementResult:
    """What a statement gave.

    Attributes:
        command_tag: PostgreSQL's, such as ``SELECT 3``, ``INSERT 0 3``, ``CREATE TABLE``.
        columns: None for a statement without a result set.
        rows: all rows, as Python values; empty without a result set.
        notices: warnings and notices, in order.
    """

    command_tag: str
    columns: tuple[Column, ...] | None = None
    rows: Sequence[tuple[Any, ...]] = ()
    notices: tuple[Notice, ...] = ()


class RowStream(Protocol):
    """Rows of a statement that come while it runs.

    1. ``columns`` are known from the start.
    2. ``next_rows`` waits for the next rows; none means the end, and ``result`` is there: tag and
       notices, without rows. An error of the statement is raised there.
    3. Rows that are not taken stop the statement from making more.
    4. ``close`` stops the statement, wherever it is.
    """

    @property
    def columns(self) -> tuple[Column, ...]: ...

    @property
    def result(self) -> StatementResult | None: ...

    async def next_rows(self) -> Sequence[tuple[Any, ...]]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StatementDescription:
    """Shape of a statement, found without running it or any model.

    Attributes:
        columns: None for a statement without a result set.
        parameter_types: DuckDB type per ``$n``; ``VARCHAR`` where unknown.
    """

    columns: tuple[Column, ...] | None
    parameter_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """Who is connecting; ``user`` is also the tenant unless the server maps it.

    ``database`` is the client's name of the database; empty: the engine's name.
    """

    user: str = "default"
    database: str = ""
    application_name: str = ""
    address: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
