"""SQL fixtures: an instant deterministic TextGenerator, and sessions over in-memory engines.

InstantGenerator implements the TextGenerator contract (tests/contract/test_text_generator.py runs
it through the suite); its answers are a pure function of the prompt, so that a plain DuckDB UDF
computing the same function is the reference every query shape is compared with.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

import duckdb
import pytest
from hypothesis import strategies as st

from tierkv.dbfront.contracts import (
    CallPlan,
    ClientInfo,
    EncodedAhead,
    PreparedCall,
    Prospect,
    TextAnswer,
    TextCall,
    TextEvent,
    TokenCounts,
)
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.generation.forecast_inputs import most_tokens
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.access import RightsBook
from tierkv.kvcore.call_options import KvAction
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import (
    ContextTooLongError,
    RowLevelError,
    TierKVError,
    UdfArgumentError,
    UnknownModelError,
)
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import FinishReason, GenerateRequest, HitTokens, SamplingParams, Usage
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.plans.forecast import Forecaster
from tierkv.scheduler.plans.statement_run import StatementRun
from tierkv.scheduler.routing_stats import RoutingStats

CONTEXT_TOKENS = 20_000
T = TypeVar("T")


def make_model(
    name: str = "tiny", *, block_tokens: int = 16, context_tokens: int = CONTEXT_TOKENS
) -> ModelInfo:
    layout = BlockLayout(
        layers=2, kv_heads=1, head_dim=8, dtype=KvDtype.FLOAT32, block_tokens=block_tokens
    )
    return ModelInfo(
        name=name,
        folder="",
        revision="0" * 64,
        layout=layout,
        context_tokens=context_tokens,
        eos_token_ids=(0,),
        architecture="LlamaForCausalLM",
        parameters=1,
    )


def answer_text(prompt: str | None, model: str = "tiny", system: str = "") -> str | None:
    """The function the instant model computes; the reference UDF is this one."""
    if prompt is None:
        return None
    digest = blake2b(f"{model}|{system}|{prompt}".encode(), digest_size=2).digest()
    return ("yes", "no", "maybe", "red", "blue")[digest[0] % 5] + (
        f"-{digest[1] % 4}" if digest[0] % 3 == 0 else ""
    )


def label_odds(
    prompt: str, labels: Sequence[str], model: str = "tiny", system: str = ""
) -> tuple[float, ...]:
    """How likely the instant model finds each label; they add up to 1.0."""
    weights = [
        1 + blake2b(f"{model}|{system}|{prompt}|{label}".encode(), digest_size=1).digest()[0]
        for label in labels
    ]
    return tuple(weight / sum(weights) for weight in weights)


def embedding(prompt: str, model: str = "tiny") -> tuple[float, ...]:
    """The instant model's embedding, of unit length."""
    numbers = [
        byte - 127.5 for byte in blake2b(f"{model}|{prompt}".encode(), digest_size=8).digest()
    ]
    length = math.sqrt(sum(number * number for number in numbers))
    return tuple(number / length for number in numbers)


def json_value(schema: Any, prompt: str) -> Any:
    """A value of a simple schema, for the instant model to answer with."""
    if not isinstance(schema, dict):
        return None
    if "enum" in schema:
        return schema["enum"][len(prompt) % len(schema["enum"])]
    if schema.get("type") == "object":
        return {
            name: json_value(inner, f"{prompt}|{name}")
            for name, inner in schema.get("properties", {}).items()
        }
    if schema.get("type") == "array":
        return [json_value(schema.get("items"), prompt)]
    by_type = {"integer": len(prompt), "number": len(prompt) / 2, "boolean": len(prompt) % 2 == 0}
    return by_type.get(schema.get("type", ""), answer_text(prompt))


def readout(prepared: PreparedCall) -> TextEvent:
    """What the instant model answers, without usage and times."""
    call, model = prepared.call, prepared.model.name
    prompt = user_prompt(call)
    if call.embed:
        return TextEvent(embedding=embedding(prompt, model))
    if call.labels:
        odds = label_odds(prompt, call.labels, model, system_prompt(call))
        return TextEvent(call.labels[odds.index(max(odds))], label_probabilities=odds)
    if call.json_schema:
        value = json_value(json.loads(call.json_schema), prompt)
        return TextEvent(json.dumps(value, ensure_ascii=False))
    return TextEvent(answer_text(prompt, model, system_prompt(call)) or "")


@dataclass
class InstantGenerator:
    """A model that answers at once and remembers what it was asked.

    ``failing`` maps text in a prompt to the error its call raises, or to a list of errors, one per
    try; ``texts`` maps a prompt to the text it gives instead; ``uncountable`` is a text that is
    too long to count; ``blend_refusal`` is told to calls that ask for blending. With ``gate`` set,
    answers wait for it; ``started`` is set when the first one does.
    """

    served: tuple[ModelInfo, ...] = (make_model(), make_model("other"))
    failing: dict[str, TierKVError | list[TierKVError]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    finish_reason: FinishReason = FinishReason.STOP
    gate: asyncio.Event | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    prompts: list[str] = field(default_factory=list)
    calls: list[TextCall] = field(default_factory=list)
    blend_refusal: str = ""
    uncountable: str = ""
    cancelled: int = 0
    most_running: int = 0
    rights: RightsBook = field(default_factory=RightsBook)
    _running: int = 0
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    async def encode_ahead(self, calls: Sequence[TextCall]) -> list[EncodedAhead | None]:
        return [None] * len(calls)

    async def prepare(self, call: TextCall, ahead: EncodedAhead | None = None) -> PreparedCall:
        model = self._model(call.model)
        if not 0 <= (call.options.temperature or 0) <= 2:
            raise UdfArgumentError("temperature must be in [0, 2]")
        if len(set(call.labels)) < len(call.labels) or "" in call.labels:
            raise UdfArgumentError("labels must be distinct and not empty")
        if bool(call.labels) + bool(call.json_schema) + call.embed > 1:
            raise UdfArgumentError("ask for one of labels, json_schema and embed")
        if '"unsupported"' in call.json_schema:
            raise UdfArgumentError("the schema can't be compiled: unsupported")
        token_ids = tuple(_text(call).encode("utf-8", "replace"))
        if len(token_ids) >= model.context_tokens:
            raise ContextTooLongError(
                f"the prompt has {len(token_ids)} tokens; {model.name} takes {model.context_tokens}"
            )
        request = GenerateRequest(
            request_id=RequestId(f"r{next(self._ids)}"),
            model=model.name,
            token_ids=token_ids,
            namespace_key=NamespaceKey(bytes(32)),
            tenant=call.tenant,
            sampling=SamplingParams(max_tokens=call.options.max_tokens or 1),
        )
        refusal = self.blend_refusal if call.options.blend else ""
        return PreparedCall(call, model, request, refusal)

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        prompt = user_prompt(prepared.call)
        self.prompts.append(prompt)
        self.calls.append(prepared.call)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            self.started.set()
            if self.gate is not None:
                await self.gate.wait()
            self._fail(prompt)
            said = self._read_out(prepared)
            text = self.texts.get(prompt, said.text)
            if prepared.call.steering is not None and prompt not in self.texts:
                places = {"l1_bytes": 0, "memory_bytes": 10 * len(prompt), "disk_bytes": 1}
                locates = prepared.call.steering.action is KvAction.LOCATE
                tokens = {"tokens": len(prepared.request.token_ids)}
                text = json.dumps(tokens | (places if locates else {}))
            if text:
                yield TextEvent(text)
            generated = int(not said.label_probabilities and not said.embedding)
            yield TextEvent(
                label_probabilities=said.label_probabilities,
                embedding=said.embedding,
                finish_reason=self.finish_reason,
                usage=Usage(len(prepared.request.token_ids), generated, HitTokens(l1=1, l2=2)),
                ttft_s=0.5,
                total_s=1.0,
                node_id="n1",
            )
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self._running -= 1

    def _read_out(self, prepared: PreparedCall) -> TextEvent:
        return readout(prepared)

    def _fail(self, prompt: str) -> None:
        for text, errors in self.failing.items():
            if text in prompt:
                if not isinstance(errors, list):
                    raise copy(errors)  # What catches an error notes in it where it happened.
                if errors:
                    raise errors.pop(0)

    async def answer(self, prepared: PreparedCall) -> TextAnswer:
        pieces: list[str] = []
        async for event in self.stream(prepared):
            pieces.append(event.text)
            last = event
        if last.finish_reason is None or last.usage is None:
            raise RowLevelError("no finish reason")
        return TextAnswer(
            "".join(pieces),
            last.finish_reason,
            last.usage,
            last.ttft_s,
            last.total_s,
            "n1",
            last.label_probabilities,
            last.embedding,
        )

    def plan(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> CallPlan:
        return StatementRun(calls, max_in_flight=max_in_flight)

    async def count_tokens(self, texts: Sequence[str], model: str | None) -> TokenCounts:
        served = self._model(model)
        if self.uncountable and self.uncountable in texts:
            raise ContextTooLongError("a text is too long")
        return TokenCounts(tuple(len(text.encode()) for text in texts), served.context_tokens)

    async def token_ids(self, call: TextCall) -> tuple[int, ...]:
        self._model(call.model)
        return tuple(_text(call).encode())

    async def text_of(self, token_ids: Sequence[int], model: str | None) -> str:
        self._model(model)
        return bytes(token_ids).decode()

    async def forecast(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> Prospect:
        clock, config = SystemClock(), SchedulerConfig()
        directory = DirectoryClient(None, config=config, stats=RoutingStats(1), clock=clock)
        forecaster = Forecaster(Fleet(config), directory, clock)
        forecast = await forecaster.forecast(calls, max_in_flight=max_in_flight)
        return Prospect(forecast, tuple(float(most_tokens(c)) for c in calls), learned=False)

    def _model(self, name: str | None) -> ModelInfo:
        name = name or "tiny"
        model = next((model for model in self.served if model.name == name), None)
        if model is None:
            raise UnknownModelError(f'no model "{name}"', hint="Served: tiny, other.")
        return model

    async def models(self) -> tuple[ModelInfo, ...]:
        return self.served


def _text(call: TextCall) -> str:
    if call.messages is None:
        return call.prompt or ""
    return "\n".join(f"{message.role}: {message.content}" for message in call.messages)


def user_prompt(call: TextCall) -> str:
    """The documents and the last message of a call."""
    prompt = call.messages[-1].content if call.messages else call.prompt or ""
    return "\n".join((*call.documents, prompt))


def system_prompt(call: TextCall) -> str:
    """The system message of a call, or nothing."""
    first = call.messages[0] if call.messages else None
    return first.content if first and first.role == "system" else ""


def short_texts(most: int) -> st.SearchStrategy[str]:
    """Texts that SQL can hold: no NUL, which both doors refuse, and no half of a pair."""
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=most)


TABLES = """
CREATE TABLE docs (id INTEGER PRIMARY KEY, topic INTEGER, body VARCHAR);
INSERT INTO docs SELECT i, i % 4, CASE WHEN i % 10 = 7 THEN NULL ELSE 'body ' || (i % 30) END
  FROM range(60) r(i);
CREATE TABLE topics (id INTEGER PRIMARY KEY, name VARCHAR);
INSERT INTO topics VALUES (0, 'sport'), (1, 'music'), (2, NULL), (5, 'food');
"""


@pytest.fixture
def generator() -> InstantGenerator:
    return InstantGenerator()


@pytest.fixture
async def server(generator: InstantGenerator) -> AsyncIterator[DuckDbSqlServer]:
    server = DuckDbSqlServer(DuckDbConfig(threads=2), generator)
    yield server
    await server.close()


@pytest.fixture
async def session(server: DuckDbSqlServer) -> DuckDbSession:
    session = await server.open_session(ClientInfo(user="ann"))
    for statement in session.split(TABLES):
        await session.execute(statement)
    return session


class SqlExamples:
    """A database for all examples of a property test: opening one takes longer than an example."""

    def __init__(self) -> None:
        self.generator = InstantGenerator()
        self._server = DuckDbSqlServer(DuckDbConfig(threads=1), self.generator)
        self._plain = duckdb.connect(config={"threads": 1})
        self._made: set[Callable[[duckdb.DuckDBPyConnection], None]] = set()
        self._runner = asyncio.Runner()

    def play(self, example: Callable[[DuckDbSession], Coroutine[Any, Any, T]]) -> T:
        """Run an example in a session of its own, without the table t of earlier examples."""
        return self._runner.run(self._play(example))

    async def _play(self, example: Callable[[DuckDbSession], Coroutine[Any, Any, T]]) -> T:
        self.generator.calls.clear()
        session = await self._server.open_session(ClientInfo(user="ann"))
        try:
            await session.execute("DROP TABLE IF EXISTS t")
            return await example(session)
        finally:
            await session.close()

    def plain(self, make: Callable[[duckdb.DuckDBPyConnection], None]) -> duckdb.DuckDBPyConnection:
        """Return a database without TierKV; the first example calls ``make`` for its functions."""
        if make not in self._made:
            make(self._plain)
            self._made.add(make)
        self._plain.execute("DROP TABLE IF EXISTS t")
        return self._plain

    def close(self) -> None:
        self._runner.run(self._server.close())
        self._runner.close()
        self._plain.close()


@pytest.fixture(scope="module")
def examples() -> Iterator[SqlExamples]:
    opened = SqlExamples()
    yield opened
    opened.close()
