"""Text in, text out: the path of every AI call of SQL and REST to the scheduler.

``Generation`` implements ``TextGenerator`` (dbfront/contracts.py): it checks a call, tokenizes the
prompt, submits the request to scheduler/dispatcher.py and converts tokens back to text. Prompts are
never truncated, and this module never touches the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from tierkv.dbfront.accounts.ended_call import CallEnd, ModelRequest
from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.answer_cache.answer_key import AnswerKey, answer_key, check_scope
from tierkv.dbfront.answer_cache.kept_answer import KeptAnswer
from tierkv.dbfront.answer_token import AnswerToken
from tierkv.dbfront.contracts import (
    CallPlan,
    EncodedAhead,
    PreparedCall,
    Prospect,
    SessionCall,
    TextAnswer,
    TextCall,
    TextEvent,
    TokenCounts,
)
from tierkv.dbfront.generation.answering import TextAnswering
from tierkv.dbfront.generation.call_checks import (
    blend_of,
    blend_refusal,
    chat_text,
    check_form,
    check_names,
    check_ratio,
    check_sampling,
    check_stops,
    checked_ids,
    checked_schema,
    encode,
    naming,
    readout_params,
    salted_tenant,
    sampling_params,
    tools_guide,
    with_logprobs,
)
from tierkv.dbfront.generation.forecast_inputs import (
    AnswerLengths,
    FrontPace,
    most_tokens,
)
from tierkv.dbfront.generation.labels import Labels, check_labels
from tierkv.dbfront.generation.readouts import (
    label_schema,
    most_label_tokens,
)
from tierkv.dbfront.generation.steering import PromptSteering
from tierkv.dbfront.sessions.chat import chat
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sessions.session_file import SessionFile
from tierkv.dbfront.tokens.chunked_prompt import EncodedPrompt
from tierkv.dbfront.tokens.tokenizer import TextTokenizer, TokenizerCache
from tierkv.dbfront.tool_calls.tool import CallDelta, joined_calls
from tierkv.kvcore.access import RightsBook
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import (
    FeatureNotSupportedError,
    NodeLostError,
    NoNodeError,
    TierKVError,
    UnknownModelError,
)
from tierkv.kvcore.ids import RequestId, new_request_id, scope_of_version
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
)
from tierkv.metaserver.client import MetaClient
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.limits.embedded_meter import EmbeddedMeter
from tierkv.scheduler.limits.gate import Caller, CallGate

_LEAST_TOGETHER = 8
"""Fewer prompts are encoded one by one: a thread would take longer."""
ANSWERS_KEPT_S = 30 * 86_400.0
"""Age of the oldest answer that a cache in memory gives."""


class Generation:
    """The front's TextGenerator.

    Attributes:
        rights: who may call which functions, and use which models.
        live: calls in progress, by request id.
        answers: answers of earlier calls.
        conversations: those that this front keeps.
        steering: calls about KV instead of answers.
        reducers: called with each ended request; a reducer must not block, raise or keep it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        tokenizers: TokenizerCache | None = None,
        default_model: str | None = None,
        clock: Clock | None = None,
        gate: CallGate | None = None,
        answers: AnswerCache | None = None,
        meta: MetaClient | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        """Create a generator over a started dispatcher.

        Args:
            dispatcher: receives the requests.
            tokenizers: shared cache; a new cache by default.
            default_model: the model for ``model=None``. Without a default the only served model is
                used; with several served models, the model that was last the only one.
            clock: source of times.
            gate: admits calls within their callers' limits; by default there are none.
            answers: the answer cache; by default one in memory.
            meta: keeps pins and knows the blocks after a prompt; None: pins end with this process.
            conversations: where conversations are kept; by default in memory.
        """
        self.gate = gate or CallGate(EmbeddedMeter(clock or SystemClock()))
        self.rights = RightsBook()
        self.live: dict[RequestId, ModelRequest] = {}
        self._dispatcher = dispatcher
        self._clock = clock or SystemClock()
        self.answers = answers or AnswerCache(self._clock, keep_s=ANSWERS_KEPT_S)
        self.conversations = conversations or Conversations(SessionFile(), self._clock)
        self._tokenizers = tokenizers or TokenizerCache(clock=self._clock)
        self._default_model = default_model
        self._labels = Labels()
        self._answering = TextAnswering(dispatcher, self._clock, self._labels)
        self.steering = PromptSteering(dispatcher, meta, self._clock, self.token_ids, self.answers)
        self._lengths = AnswerLengths()
        self._pace = FrontPace()
        self._served: tuple[ModelInfo, ...] = ()
        self._models_seen: dict[str, ModelInfo] = {}
        self.reducers: list[Callable[[ModelRequest], None]] = [self._lengths.take]

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the models served by nodes, by name; start nodes if they start on demand."""
        models = self._dispatcher.models()
        if not models:
            await self._dispatcher.wake()
            models = self._dispatcher.models()
        if models is not self._served:  # Same tuple until the scheduler's next refresh.
            self._served = models
            self._models_seen.update((model.name, model) for model in models)
        return models

    # -- checking

    async def encode_ahead(self, calls: Sequence[TextCall]) -> list[EncodedAhead | None]:
        """Encode chat prompts of one model in another thread; see TextGenerator."""
        found: list[EncodedAhead | None] = [None] * len(calls)
        name = calls[0].model if calls else None
        try:
            tokenizer = await self._tokenizers.get(await self._model(name))
        except TierKVError:
            return found  # ``prepare`` reports the error.
        texts: list[str] = []
        places: list[int] = []
        for place, call in enumerate(calls):
            text = chat_text(call, tokenizer) if call.model == name else None
            if text is not None:
                texts.append(text)
                places.append(place)
        if len(texts) >= _LEAST_TOGETHER:
            batch = asyncio.get_running_loop().run_in_executor(None, tokenizer.encode_texts, texts)
            for index, place in enumerate(places):
                found[place] = EncodedAhead(batch, index)
        return found

    async def prepare(self, call: TextCall, ahead: EncodedAhead | None = None) -> PreparedCall:
        """Check and tokenize a call; see TextGenerator."""
        self._pace.working(others=bool(self.live))
        model = await self._model(call.model)
        options = call.options
        check_names(call)
        self.rights.check_model(call.tenant, model.name)
        with naming("stop"):
            check_stops(options.stop or ())
        check_ratio(options.recompute_ratio)
        check_form(call)
        check_scope(options.answer_cache, call.session)
        with naming("json_schema"):
            guide = await checked_schema(call.json_schema)
        tokenizer = await self._tokenizers.get(model)
        if call.tools is not None:
            with naming("tools"):
                guide = await tools_guide(call.tools, guide, model, tokenizer)
        ids = None if ahead is None else await ahead.token_ids()
        prompt = EncodedPrompt(ids) if ids else await encode(call, tokenizer)
        guide = guide or _guide_of_labels(call, model)
        sampling, scored = await self._form(call, model, tokenizer, len(prompt.token_ids))
        check_sampling(sampling, guide, model, tokenizer)
        # A salt changes only the namespace key, and thus the blocks; the policy is the tenant's.
        directory = self._dispatcher.directory
        grant = await directory.namespace(call.tenant, model)
        scope = salted_tenant(call.tenant, options.cache_salt)
        own = grant if scope == call.tenant else await directory.namespace(scope, model)
        request = GenerateRequest(
            request_id=call.request_id or new_request_id(),
            model=model.name,
            token_ids=prompt.token_ids,
            namespace_key=own.namespace_key,
            tenant=scope_of_version(scope, own.version),
            sampling=sampling,
            session_id=options.session_id,
            priority=self.gate.priority(_caller(call, model), options.priority or 0),
            use_cache=options.cache is not False and grant.cache_enabled,
            blend=blend_of(call, prompt.chunks, grant, model),
            kv_codec=grant.policy.kv_codec,
            prepared_for=model.identity,
            hint=options.hint,
            guide=guide,
            score_token_ids=scored,
            embed=call.embed,
        )
        return PreparedCall(call, model, request, blend_refusal(call, grant, model))

    async def _form(
        self, call: TextCall, model: ModelInfo, tokenizer: TextTokenizer, prompt_tokens: int
    ) -> tuple[SamplingParams, tuple[int, ...]]:
        """Return the sampling parameters of a call, and the tokens of its first label question.

        Raises:
            FeatureNotSupportedError: the model cannot compute embeddings.
        """
        if call.embed:
            if model.embed_refusal:
                raise FeatureNotSupportedError(
                    f"model {model.name} provides no embeddings: {model.embed_refusal}",
                    hint="Name a model that TierKV's own engine serves.",
                )
            return readout_params(model, prompt_tokens), ()
        if call.labels and model.score_refusal:
            check_labels(call.labels)
            one = replace(call.options.greedy(), max_tokens=most_label_tokens(call))
            return sampling_params(one, model, prompt_tokens), ()
        if not call.labels:
            sampling = sampling_params(call.options, model, prompt_tokens)
            return with_logprobs(sampling, call.logprobs), ()
        spellings = await self._labels.spellings(call, model, tokenizer)
        longest = max(map(len, spellings))
        walk = await self._labels.walk(call, model, tokenizer)
        scored = walk.question.token_ids if walk.question is not None else ()
        return readout_params(model, prompt_tokens, longest - 1), scored

    async def _model(self, name: str | None) -> ModelInfo:
        """Find a model by name; a model seen earlier stays valid while its node restarts."""
        models = await self.models()
        name = name or self._default_model
        if name is None and len(models) == 1:
            return models[0]
        served = {model.name: model for model in models}
        known = served or self._models_seen
        if not known:
            raise NoNodeError("no compute node is up", hint="See tierkv status; try again later.")
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        names = ", ".join(sorted(known))
        if name is None and self._dispatcher.view.default_model in known:
            return known[self._dispatcher.view.default_model]
        if name is None:
            raise UnknownModelError(
                "several models are served and none was named",
                hint=f"Name one of {names}, or set front.default_model.",
            )
        model = served.get(name) or self._models_seen.get(name)
        if model is None:
            raise UnknownModelError(
                f"no model {name!r} is served here", hint=f"The served models are {names}."
            )
        return model

    async def count_tokens(self, texts: Sequence[str], model: str | None) -> TokenCounts:
        """Count with the model's own tokenizer; see TextGenerator."""
        info = await self._model(model)
        tokenizer = await self._tokenizers.get(info)
        return TokenCounts(await tokenizer.count(texts), info.context_tokens)

    async def token_ids(self, call: TextCall) -> tuple[int, ...]:
        """Tokenize a prompt; see TextGenerator."""
        model = await self._model(call.model)
        self.rights.check_model(call.tenant, model.name)
        return (await encode(call, await self._tokenizers.get(model))).token_ids

    async def text_of(self, token_ids: Sequence[int], model: str | None) -> str:
        """Return the text of tokens; see TextGenerator."""
        tokenizer = await self._tokenizers.get(await self._model(model))
        checked_ids(token_ids, tokenizer)
        return tokenizer.decode(token_ids)

    def plan(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> CallPlan:
        """Plan when to stream each call of a statement; see TextGenerator."""
        return self._dispatcher.planner.open(calls, max_in_flight=max_in_flight)

    async def forecast(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> Prospect:
        """Predict the cost of answering; see TextGenerator."""
        forecast = await self._dispatcher.forecast(calls, max_in_flight=max_in_flight)
        learned = [self._lengths.expected(call) for call in calls]
        tokens = (
            float(most_tokens(call)) if known is None else known
            for call, known in zip(calls, learned, strict=True)
        )
        forecast = replace(forecast, front_s=self._pace.call_s)
        return Prospect(forecast, tuple(tokens), learned=None not in learned)

    # -- answering

    def stream(self, prepared: PreparedCall) -> AsyncGenerator[TextEvent, None]:
        """Answer with text as it is generated; see TextGenerator."""
        # A REST client may read slowly, and nobody should wait for it. Statements never do.
        return self._stream(prepared, is_prompt=not prepared.call.origin)

    def _stream(
        self, prepared: PreparedCall, *, is_prompt: bool
    ) -> AsyncGenerator[TextEvent, None]:
        if prepared.call.steering is not None:
            return self.steering.events(prepared, self._generated)
        key = answer_key(prepared)
        if key is None:
            return self._generated(prepared)
        return self._cached_or_generated(prepared, key, is_prompt=is_prompt)

    async def _cached_or_generated(
        self, prepared: PreparedCall, key: AnswerKey, *, is_prompt: bool
    ) -> AsyncGenerator[TextEvent, None]:
        started_s = self._clock.now()
        async with self.answers.turn(key, leads=is_prompt) as turn:
            if turn.found is not None:
                live = ModelRequest(prepared, started_s, cached=True)
                last = self._last_of(turn.found, live)
                self._publish(live)
                yield TextEvent(turn.found.text)
                yield last
                return
            parts: list[str] = []
            async with aclosing(self._generated(prepared)) as events:
                async for event in events:
                    parts.append(event.text)
                    if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                        turn.given = TextAnswer.of("".join(parts), event)
                    yield event

    def _last_of(self, found: KeptAnswer, live: ModelRequest) -> TextEvent:
        live.end, live.usage = CallEnd(found.finish_reason.value), found.usage
        live.ttft_s = self._clock.now() - live.started_s
        return TextEvent(
            finish_reason=found.finish_reason,
            usage=found.usage,
            ttft_s=live.ttft_s,
            total_s=live.ttft_s,
            label_probabilities=found.label_probabilities,
            embedding=found.embedding,
            cached=True,
        )

    async def _generated(self, prepared: PreparedCall) -> AsyncGenerator[TextEvent, None]:
        live = ModelRequest(prepared, self._clock.now())
        request_id = prepared.request.request_id
        self.live[request_id] = live
        try:
            tokenizer = await self._tokenizers.get(prepared.model)
            admitted = self.gate.admitted(
                _caller(prepared.call, prepared.model),
                prompt_tokens=len(prepared.request.token_ids),
                most_tokens=0 if prepared.request.reads_out else most_tokens(prepared),
            )
            answered = self._answering.events(live, tokenizer)
            async with admitted as admission, aclosing(answered) as events:
                async for event in events:
                    admission.began = True
                    admission.completion_tokens = live.completion_tokens
                    yield event
        except TierKVError as error:
            live.end, live.error_code = CallEnd.FAILED, error.code
            raise
        except Exception:
            live.end, live.error_code = CallEnd.FAILED, TierKVError.code
            raise
        finally:
            if self.live.get(request_id) is live:
                del self.live[request_id]
            self._publish(live)

    def _publish(self, live: ModelRequest) -> None:
        self._pace.ended(others=bool(self.live))
        live.total_s = self._clock.now() - live.started_s
        for take in self.reducers:
            take(live)

    async def answer(self, prepared: PreparedCall) -> TextAnswer:
        """Return the complete answer; see TextGenerator."""
        parts: list[str] = []
        calls: list[CallDelta] = []
        tokens: list[AnswerToken] = []
        async with aclosing(self._stream(prepared, is_prompt=True)) as events:
            async for event in events:
                parts.append(event.text)
                calls += event.calls
                tokens += event.tokens
                if event.finish_reason is not None and event.usage is not None:
                    return TextAnswer.of(
                        "".join(parts),
                        event,
                        model=prepared.model.name,
                        tool_calls=joined_calls(calls),
                        tokens=tuple(tokens),
                    )
        raise NodeLostError("the answer ended without an end")

    async def chat(self, turn: SessionCall) -> TextAnswer:
        """Answer the next message of a conversation; see TextGenerator."""
        return await chat(self.conversations, self, turn)


def _caller(call: TextCall, model: ModelInfo) -> Caller:
    """Return who makes a call; calls of SQL statements wait for their turn."""
    return Caller(call.tenant, call.key, waits=not call.origin, model=model.name)


def _guide_of_labels(call: TextCall, model: ModelInfo) -> str:
    return label_schema(call.labels) if call.labels and model.score_refusal else ""
