"""What a store does with turns: their writes, and the path from a response to its root.

dbfront/sessions/session_tables.py runs these functions in its transactions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.sessions.session_rows import (
    LIVE,
    LIVE_TURN,
    OF,
    TURN,
    Execute,
    check_size,
    hits_text,
    insert_items,
    read_turn,
)
from tierkv.dbfront.sessions.session_store import SessionItem, SessionTurn

STEP: Final = "turn_id, parent, turns_session, depth, is_list, last_position, live"
_TURN_STEP: Final = (
    "SELECT t.response_id, t.parent, t.session_id, t.depth, s.is_list, t.last_position, "
    "CASE WHEN t.status IN ('completed', 'incomplete') AND (s.ttl_s = 0 OR s.seen_s + s.ttl_s > ?) "
    "THEN 1 ELSE 0 END FROM"
)
PATH: Final = (
    f"WITH RECURSIVE path ({STEP}) AS ({_TURN_STEP} session_turns t "
    "JOIN sessions s ON s.tenant = t.tenant AND s.session_id = t.session_id "
    "WHERE t.tenant = ? AND t.response_id = ? "
    f"UNION ALL {_TURN_STEP} path p "
    "JOIN session_turns t ON t.tenant = ? AND t.response_id = p.parent "
    "JOIN sessions s ON s.tenant = t.tenant AND s.session_id = t.session_id "
    "WHERE p.is_list = 0)"
)
"""The turns from a response to its root. A turn of a conversation is a root as well."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One turn on the path from a response to its root."""

    turn_id: str
    parent: str
    session_id: str
    depth: int
    is_list: int
    last_position: int
    live: int


def put_turn(
    execute: Execute,
    turn: SessionTurn,
    items: Sequence[SessionItem],
    *,
    owner: str,
    opened: bool,
) -> SessionTurn | None:
    """Make a turn or replace an open one; see SessionStore."""
    tenant, session_id = turn.tenant, turn.session_id
    now_s = turn.ended_s or turn.created_s
    session = execute(
        f"UPDATE sessions SET seen_s = ? WHERE {OF} AND {LIVE} "
        "RETURNING is_list, owner, turns, items, size_bytes",
        (now_s, tenant, session_id, now_s),
    )
    known = execute(
        f"SELECT {TURN} FROM session_turns WHERE tenant = ? AND response_id = ?",
        (tenant, turn.response_id),
    )
    if known and not read_turn(known[0]).status.is_open:
        return read_turn(known[0])
    answered = turn.status.is_answered
    if not session or (opened and not known) or (answered and owner and session[0][1] != owner):
        return None
    is_list, _, turns, kept_items, kept_bytes = session[0]
    path = _path_of(execute, turn)
    if path is None:
        return None
    drop_loose_items(execute, tenant, turn.response_id)
    texts = [item.to_json() for item in items]
    size = sum(map(len, texts))
    last_position = first = 0
    before = (kept_items, kept_bytes) if is_list else path[1:]
    check_size(before[0] + len(items), before[1] + size)
    if answered:
        at = execute(
            "UPDATE sessions SET turns = turns + 1, model = ?, input_tokens = input_tokens + ?, "
            "cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?, hits = ?, "
            "prompt_tokens = ?, items = items + ?, size_bytes = size_bytes + ?, "
            "next_position = next_position + ?, "
            "owner = CASE WHEN owner = ? THEN '' ELSE owner END "
            f"WHERE {OF} RETURNING next_position",
            (
                *(turn.model, turn.input_tokens, turn.hits.total, turn.output_tokens),
                *(hits_text(turn.hits), turn.input_tokens, len(items), size, len(items)),
                *(owner, tenant, session_id),
            ),
        )
        if is_list:
            last_position = at[0][0] - 1
            first = at[0][0] - len(items)
    insert_items(execute, tenant, session_id, items, texts, first=first)
    number = turns + 1
    values = (
        *(tenant, turn.response_id, session_id, turn.parent, number, turn.status.value),
        *(json.dumps(dict(turn.body)), turn.model, turn.created_s, turn.ended_s, turn.alive_s),
        *(turn.input_tokens, turn.output_tokens, hits_text(turn.hits)),
        *(path[0], path[1] + len(items), path[2] + size, last_position),
    )
    execute(
        "DELETE FROM session_turns WHERE tenant = ? AND response_id = ?",
        (tenant, turn.response_id),
    )
    stored = execute(
        f"INSERT INTO session_turns VALUES ({', '.join('?' * 18)}) RETURNING {TURN}", values
    )
    return read_turn(stored[0])


def _path_of(execute: Execute, turn: SessionTurn) -> tuple[int, int, int] | None:
    """Return the depth of a turn, and the items and bytes before it; None: its parent is gone."""
    if not turn.parent:
        return 0, 0, 0
    parent = execute(
        "SELECT depth, path_items, path_bytes FROM session_turns "
        "WHERE tenant = ? AND response_id = ?",
        (turn.tenant, turn.parent),
    )
    return (parent[0][0] + 1, parent[0][1], parent[0][2]) if parent else None


def drop_loose_items(execute: Execute, tenant: str, response_id: str) -> tuple[int, int]:
    """Remove a turn's items, unless a conversation has them; return their number and bytes."""
    removed = execute(
        "DELETE FROM session_items WHERE tenant = ? AND response_id = ? AND position = 0 "
        "RETURNING length(body)",
        (tenant, response_id),
    )
    return len(removed), sum(row[0] for row in removed)


def find_turn(execute: Execute, tenant: str, response_id: str, now_s: float) -> SessionTurn | None:
    """Find a turn of a live session."""
    found = execute(
        f"SELECT {TURN} FROM session_turns t WHERE t.tenant = ? AND t.response_id = ? "
        f"AND {LIVE_TURN}",
        (tenant, response_id, now_s),
    )
    return read_turn(found[0]) if found else None
