"""One response: history, prompt, answer, and the stored turn.

The endpoints (dbfront/http/responses/responses_router.py) answer directly, stream, or run in the
background. A run asks the generator exactly as chat does. A turn is stored when the answer is
complete: a client that disconnects earlier leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from tierkv.dbfront.answer_token import AnswerToken
from tierkv.dbfront.contracts import PreparedCall, TextAnswer, TextCall, TextEvent
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.endpoints.openai import chat_logprobs
from tierkv.dbfront.http.responses.response_body import ResponseBody
from tierkv.dbfront.http.services import FieldError, Services
from tierkv.dbfront.sessions.conversations import Conversations, unknown
from tierkv.dbfront.sessions.items import new_id, to_messages, turns_of
from tierkv.dbfront.sessions.session_store import SessionItem, SessionTurn
from tierkv.dbfront.sessions.turn_form import AskedTurn
from tierkv.dbfront.tool_calls.tool import CallDelta, joined_calls
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    ContextTooLongError,
    NodeLostError,
    SessionBusyError,
    UnknownSessionError,
    UserError,
)
from tierkv.kvcore.request import ReuseHint


@dataclass(slots=True)
class _Before:
    """What a response follows.

    Attributes:
        items: the history, oldest first.
        session_id: session of the new turn; empty: a new one.
        model: the model that answered last.
    """

    items: Sequence[SessionItem] = ()
    session_id: str = ""
    model: str = ""


@dataclass(slots=True)
class ResponseRun:
    """A response from the body to the stored turn: ``opened``, then ``events``, then ``store``.

    Attributes:
        asked: the turn; set by ``opened``.
        prepared: the call; set by ``opened``.
        answer: set when ``events`` has ended.
        tokens: tokens of the answer's text, if the client asked for log-probabilities.
        opened_before: True if the turn is stored already, as a background response.
    """

    services: Services
    conversations: Conversations
    body: ResponseBody
    caller: RestCaller
    items: Sequence[SessionItem]
    call: TextCall
    response_id: str = field(default_factory=lambda: new_id("resp"))
    asked: AskedTurn = field(init=False)
    prepared: PreparedCall = field(init=False)
    answer: TextAnswer | None = None
    tokens: list[AnswerToken] = field(default_factory=list)
    opened_before: bool = False
    _created_s: float = 0.0
    _owner: str = ""
    _new_session: str = ""

    @classmethod
    def of(
        cls,
        services: Services,
        conversations: Conversations,
        body: ResponseBody,
        caller: RestCaller,
    ) -> ResponseRun:
        """Check a body.

        Raises:
            FieldError: a field that can't be served.
        """
        body.check()
        call = body.to_call(caller, services.config.default_temperature)
        return cls(services, conversations, body, caller, body.items(), call)

    def go_on(self, turn: SessionTurn) -> None:
        """Answer a turn that is stored already."""
        self.response_id, self.opened_before = turn.response_id, True
        self._created_s, self._new_session = turn.created_s, turn.session_id

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Wait for the turn's place in the conversation, and prepare the call.

        Raises:
            TierKVError: the call can't be asked, or the conversation is busy.
            FieldError: the response follows something unknown.
        """
        async with AsyncExitStack() as stack:
            if self.body.conversation_id:
                turn = self.conversations.turn_of(self.caller.tenant, self.body.conversation_id)
                try:
                    self._owner = await stack.enter_async_context(turn)
                except UnknownSessionError as error:
                    raise FieldError("conversation", error) from None
            await self.prepare()
            yield

    async def prepare(self) -> None:
        """Read the history and prepare the call."""
        before = await self._before()
        _check_outputs(before.items, self.items)
        session_id = before.session_id or self._new_session
        if not session_id and self.body.stores:
            session_id = self._new_session = new_id("sess")
        self._created_s = self._created_s or self.conversations.clock.wall()
        self.prepared = await self._fitting(before, session_id)
        self.asked = AskedTurn(
            self.caller.tenant,
            session_id,
            [replace(item, response_id=self.response_id) for item in self.items],
            self._created_s,
            self.prepared.model.name,
            parent=self.body.previous_response_id or "",
            fields=self.body.fields(self.prepared.call),
            response_id=self.response_id,
        )

    async def input_tokens(self) -> int:
        """Return the number of tokens to ask with, the history included."""
        await self.prepare()
        return len(self.prepared.request.token_ids)

    async def events(self) -> AsyncGenerator[TextEvent, None]:
        """Yield the answer while the model generates, and keep the text.

        Tokens come with the text that they begin in; those of calls are left out.
        """
        parts: list[str] = []
        calls: list[CallDelta] = []
        waiting: list[AnswerToken] = []
        stream = self.services.generator.stream(self.prepared)
        async with aclosing(stream) as events:  # type: ignore[type-var]
            async for event in events:
                parts.append(event.text)
                calls += event.calls
                if waiting or event.tokens:
                    waiting += event.tokens
                    shown = sum(map(len, parts))
                    tokens = tuple(token for token in waiting if token.start < shown)
                    waiting = waiting[len(tokens) :]
                    self.tokens += tokens
                    event = replace(event, tokens=tokens)
                if event.finish_reason is not None:
                    made = joined_calls(calls)
                    self.answer = TextAnswer.of("".join(parts), event, tool_calls=made)
                yield event
        if self.answer is None:
            raise NodeLostError("the answer ended without an end")

    async def store(self) -> tuple[SessionTurn, list[SessionItem]]:
        """Store the answered turn, unless the client forbids storing; return the turn.

        Raises:
            SessionBusyError: the conversation or parent is gone, or went on elsewhere.
            SessionFullError: the conversation is full.
        """
        assert self.answer is not None
        turn = self.asked.answered(self.answer, self.conversations.clock.wall())
        items = self.asked.items(self.answer, chat_logprobs(self.tokens)["content"])
        if not self.body.stores:
            return turn, items
        return await self.put(turn, items), items

    async def put(self, turn: SessionTurn, items: Sequence[SessionItem]) -> SessionTurn:
        """Store the turn in some state; see ``store``."""
        if self._new_session and not self.opened_before:
            await self.conversations.create(
                self.caller.tenant, session_id=self._new_session, is_list=False,
                metadata=self.body.metadata,
            )  # fmt: skip
        stored = await self.conversations.run(
            self.conversations.store.put_turn,
            turn,
            items,
            owner=self._owner,
            opened=self.opened_before,
        )
        if stored is None:
            raise SessionBusyError(
                "what this response follows was deleted or went on elsewhere meanwhile",
                hint="The answer was not stored; send the request again.",
            )
        return stored

    async def _before(self) -> _Before:
        tenant, store = self.caller.tenant, self.conversations.store
        run, now_s = self.conversations.run, self.conversations.clock.wall()
        if name := self.body.conversation_id:
            try:
                session = await self.conversations.session(tenant, name)
            except UnknownSessionError as error:
                raise FieldError("conversation", error) from None
            if not session.is_list:
                raise FieldError("conversation", unknown("Conversation", name))
            return _Before(await run(store.items, tenant, name), name, session.model)
        previous = self.body.previous_response_id
        if not previous:
            return _Before()
        turn = await run(store.turn, tenant, previous, now_s)
        if turn is None:
            raise FieldError("previous_response_id", unknown("Previous response", previous))
        if not turn.status.is_answered:
            early = UserError(
                f"previous response {previous!r} has status {turn.status.value} and no answer",
                hint="Wait until it is completed, or follow another one.",
            )
            raise FieldError("previous_response_id", early)
        items = await run(store.history, tenant, previous, now_s)
        if items is None:
            broken = UnknownSessionError(
                f"a response that {previous!r} follows was deleted, so its history is not whole",
                hint="Follow another response, or send the messages yourself.",
            )
            raise FieldError("previous_response_id", broken)
        session = await self.conversations.session(tenant, turn.session_id)
        return _Before(items, "" if session.is_list else turn.session_id, turn.model)

    async def _fitting(self, before: _Before, session_id: str) -> PreparedCall:
        """Prepare the call; with ``truncation = auto`` behind as much history as fits."""
        turns = turns_of(before.items)
        try:
            return await self._attempt(before, session_id, before.items)
        except ContextTooLongError:
            answers = self.items[0].body["type"] == "function_call_output"
            if self.body.truncation != "auto" or not turns or (answers and len(turns) == 1):
                raise
        # What answers a call needs the turn of the call. Errors here are cured by no history.
        fits, too_many = int(answers), len(turns)
        found = await self._attempt(before, session_id, turns[-1] if answers else ())
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            kept = [item for turn in turns[len(turns) - middle :] for item in turn]
            try:
                found = await self._attempt(before, session_id, kept)
                fits = middle
            except ContextTooLongError:
                too_many = middle
        return found

    async def _attempt(
        self, before: _Before, session_id: str, history: Sequence[SessionItem]
    ) -> PreparedCall:
        options = self.call.options
        follows = self.body.conversation_id or self.body.previous_response_id
        messages = (*(self.call.messages or ()), *to_messages([*history, *self.items]))
        if len(messages) > limits.MAX_CHAT_MESSAGES:
            raise ContextTooLongError(
                f"{len(messages)} messages, at most {limits.MAX_CHAT_MESSAGES} are read",
                hint="Set truncation to auto, which leaves the oldest turns out.",
            )
        named = options.session_id or session_id or None
        call = replace(
            self.call,
            messages=messages,
            model=self.call.model or before.model or None,
            options=replace(
                options,
                session_id=named,
                hint=options.hint or (ReuseHint(next_turn=True) if follows else None),
            ),
            session=named or "",
        )
        return await self.services.generator.prepare(call)


def _check_outputs(history: Sequence[SessionItem], items: Sequence[SessionItem]) -> None:
    """Refuse results of calls that stand nowhere before, as OpenAI's API does.

    Raises:
        FieldError: names the call.
    """
    called = {item.body["call_id"] for item in history if item.body["type"] == "function_call"}
    for item in items:
        if item.body["type"] == "function_call":
            called.add(item.body["call_id"])
        elif item.body["type"] == "function_call_output" and item.body["call_id"] not in called:
            message = f"input has an output of call {item.body['call_id'][:80]!r}, but no such call"
            hint = "Send the function_call before it, or the previous_response_id that made it."
            raise FieldError("input", UserError(message, hint=hint))
