"""One turn of a conversation from SQL: ``ai_chat(session => s, message => m)``.

Called by dbfront/generation/generation.py. The turn is stored with the answer, or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tierkv.dbfront.contracts import SessionCall, TextAnswer, TextGenerator
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sessions.items import message, new_id, to_messages
from tierkv.dbfront.sessions.session_store import SessionItem
from tierkv.dbfront.sessions.turn_form import AskedTurn
from tierkv.kvcore.errors import SessionBusyError
from tierkv.kvcore.request import ReuseHint

MADE_IDS: Final = ("conv_", "sess_", "resp_")
"""Ids that the front gives. A conversation of such a name is found or missing, never begun."""


async def chat(
    conversations: Conversations, generator: TextGenerator, turn: SessionCall
) -> TextAnswer:
    """Answer a message in a conversation, and store message and answer.

    Args:
        conversations: has the earlier turns; an unknown name begins a conversation.
        generator: answers.
        turn: the call has the message last, behind a system prompt, which is not stored.

    Raises:
        UnknownSessionError: an id of the front's form, unknown to the tenant.
        SessionBusyError: another turn of the conversation did not end, or has taken over.
        SessionFullError: the conversation is full.
    """
    asked, tenant, store = turn.call, turn.call.tenant, conversations.store
    if asked.steering is not None:
        return await _steered(conversations, generator, turn)
    if not turn.session.startswith(MADE_IDS):
        await conversations.create(tenant, session_id=turn.session)
    async with conversations.turn_of(tenant, turn.session) as owner:
        session = await conversations.session(tenant, turn.session)
        history = await conversations.run(store.items, tenant, turn.session)
        *system, said = asked.messages or ()
        call = replace(
            asked,
            messages=(*system, *to_messages(history), said),
            model=asked.model or session.model or None,
            options=replace(
                asked.options,
                session_id=asked.options.session_id or turn.session,
                hint=asked.options.hint or ReuseHint(next_turn=True),
                answer_cache=None,
            ),
        )
        prepared = await generator.prepare(call)
        asked_turn = AskedTurn(
            tenant,
            turn.session,
            [SessionItem(new_id("msg"), message("user", said.content))],
            conversations.clock.wall(),
            prepared.model.name,
            fields={
                "conversation": {"id": turn.session},
                "instructions": system[0].content if system else None,
                "temperature": call.options.temperature,
                "max_output_tokens": call.options.max_tokens,
            },
        )
        answer = await generator.answer(prepared)
        stored = await conversations.run(
            store.put_turn,
            asked_turn.answered(answer, conversations.clock.wall()),
            asked_turn.items(answer),
            owner=owner,
        )
    if stored is None:
        raise SessionBusyError(
            f"conversation {turn.session!r} was deleted or went on elsewhere meanwhile",
            hint="The answer was not stored; send the turn again.",
        )
    return answer


async def _steered(
    conversations: Conversations, generator: TextGenerator, turn: SessionCall
) -> TextAnswer:
    """Do something with the KV of a conversation; nothing of the conversation changes.

    Raises:
        UnknownSessionError: the tenant has none of this name.
    """
    asked = turn.call
    history, model = await conversations.kept(asked.tenant, turn.session)
    *system, _ = asked.messages or ()
    call = replace(asked, messages=(*system, *history), model=asked.model or model or None)
    return await generator.answer(await generator.prepare(call))
