"""Rows of the views of kept conversations: ``tierkv.sessions`` and ``tierkv.session_turns``.

dbfront/views/admin.py calls ``session_rows``; column names and types are in sql/view_columns.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sessions.session_store import ChatSession, SessionQuery, SessionTurn
from tierkv.kvcore import limits
from tierkv.sql.views import Row, timestamp

SESSION_VIEWS: Final = frozenset({"sessions", "session_turns"})


async def session_rows(
    view: str, conversations: Conversations, tenant: str | None, now_s: float
) -> list[Row]:
    """Return the rows of a view, the last used first.

    Args:
        view: one of ``SESSION_VIEWS``.
        conversations: the front's.
        tenant: whose conversations; None: everybody's.
        now_s: Unix time.
    """
    store, most = conversations.store, limits.MAX_SESSIONS_SHOWN
    if view == "sessions":
        query = SessionQuery(tenant, most=most)
        return [_session(each) for each in await conversations.run(store.sessions, query, now_s)]
    return [_turn(each) for each in await conversations.run(store.turns, tenant, most, now_s)]


def _session(session: ChatSession) -> Row:
    expires_s = session.expires_s
    hits = {f"{tier}_tokens": tokens for tier, tokens in asdict(session.hits).items()}
    return {
        "session_id": session.session_id,
        "tenant": session.tenant,
        "kind": "conversation" if session.is_list else "responses",
        "metadata": json.dumps(dict(session.metadata), ensure_ascii=False),
        "model_name": session.model or None,
        "turns": session.turns,
        "items": session.items,
        "size_bytes": session.size_bytes,
        "input_tokens": session.input_tokens,
        "cached_tokens": session.cached_tokens,
        "output_tokens": session.output_tokens,
        "prompt_tokens": session.prompt_tokens,
        **hits,
        "created_at": timestamp(session.created_s),
        "last_seen": timestamp(session.seen_s),
        "ttl_s": session.ttl_s or None,
        "expires_at": None if expires_s is None else timestamp(expires_s),
    }


def _turn(turn: SessionTurn) -> Row:
    return {
        "session_id": turn.session_id,
        "tenant": turn.tenant,
        "turn": turn.number,
        "response_id": turn.response_id,
        "previous_response_id": turn.parent or None,
        "status": turn.status.value,
        "model_name": turn.model,
        "input_tokens": turn.input_tokens,
        "cached_tokens": turn.hits.total,
        "output_tokens": turn.output_tokens,
        "created_at": timestamp(turn.created_s),
        "ended_at": timestamp(turn.ended_s) if turn.ended_s else None,
    }
