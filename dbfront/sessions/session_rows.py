"""Tables and rows of kept conversations, and the writes of turns.

dbfront/sessions/session_tables.py runs the functions in transactions. SQLite and PostgreSQL
understand the same SQL. JSON is ASCII text, with NUL and half a surrogate pair in escaped form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.sessions.session_store import (
    ChatSession,
    SessionItem,
    SessionTurn,
    TurnStatus,
)
from tierkv.kvcore import limits
from tierkv.kvcore.errors import SessionFullError
from tierkv.kvcore.request import HitTokens

Row = tuple[Any, ...]
Execute = Callable[[str, Sequence[Any]], list[Row]]
"""Runs one statement with ``?`` for values; returns its rows."""

TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS sessions (
        tenant TEXT NOT NULL, session_id TEXT NOT NULL, is_list INTEGER NOT NULL,
        metadata TEXT NOT NULL, model TEXT NOT NULL, created_s DOUBLE PRECISION NOT NULL,
        seen_s DOUBLE PRECISION NOT NULL, ttl_s DOUBLE PRECISION NOT NULL, turns BIGINT NOT NULL,
        items BIGINT NOT NULL, size_bytes BIGINT NOT NULL, input_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, hits TEXT NOT NULL,
        prompt_tokens BIGINT NOT NULL, owner TEXT NOT NULL, locked_until_s DOUBLE PRECISION
        NOT NULL, next_position BIGINT NOT NULL, PRIMARY KEY (tenant, session_id))""",
    "CREATE INDEX IF NOT EXISTS sessions_seen ON sessions (tenant, seen_s)",
    """CREATE TABLE IF NOT EXISTS session_labels (
        tenant TEXT NOT NULL, session_id TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
        PRIMARY KEY (tenant, session_id, name))""",
    "CREATE INDEX IF NOT EXISTS session_labels_value ON session_labels (tenant, name, value)",
    """CREATE TABLE IF NOT EXISTS session_turns (
        tenant TEXT NOT NULL, response_id TEXT NOT NULL, session_id TEXT NOT NULL,
        parent TEXT NOT NULL, number BIGINT NOT NULL, status TEXT NOT NULL, body TEXT NOT NULL,
        model TEXT NOT NULL, created_s DOUBLE PRECISION NOT NULL,
        ended_s DOUBLE PRECISION NOT NULL, alive_s DOUBLE PRECISION NOT NULL,
        input_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, hits TEXT NOT NULL,
        depth BIGINT NOT NULL, path_items BIGINT NOT NULL, path_bytes BIGINT NOT NULL,
        last_position BIGINT NOT NULL, PRIMARY KEY (tenant, response_id))""",
    "CREATE INDEX IF NOT EXISTS session_turns_of ON session_turns (tenant, session_id, number)",
    "CREATE INDEX IF NOT EXISTS session_turns_made ON session_turns (created_s)",
    """CREATE TABLE IF NOT EXISTS session_items (
        tenant TEXT NOT NULL, item_id TEXT NOT NULL, session_id TEXT NOT NULL,
        response_id TEXT NOT NULL, is_output INTEGER NOT NULL, number BIGINT NOT NULL,
        position BIGINT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (tenant, item_id))""",
    "CREATE INDEX IF NOT EXISTS session_items_at ON session_items (tenant, session_id, position)",
    "CREATE INDEX IF NOT EXISTS session_items_of ON session_items (tenant, response_id, number)",
)
"""``position``: place in a conversation from 1; 0: in a turn only. ``number``: place in a turn."""

OF: Final = "tenant = ? AND session_id = ?"
SESSION: Final = (
    "tenant, session_id, is_list, metadata, model, created_s, seen_s, ttl_s, turns, items, "
    "size_bytes, input_tokens, cached_tokens, output_tokens, hits, prompt_tokens"
)
LIVE: Final = "(ttl_s = 0 OR seen_s + ttl_s > ?)"
TURN: Final = (
    "tenant, response_id, session_id, parent, number, status, body, model, created_s, ended_s, "
    "alive_s, input_tokens, output_tokens, hits"
)
LIVE_TURN: Final = (
    f"EXISTS (SELECT 1 FROM sessions s WHERE s.tenant = t.tenant AND "
    f"s.session_id = t.session_id AND {LIVE})"
)
ITEM: Final = "item_id, body, response_id, is_output"


def check_size(items: int, size_bytes: int) -> None:
    """Check the size of a conversation, or of the path to a response.

    Raises:
        SessionFullError: the size is above the bounds of kvcore/limits.py.
    """
    if items > limits.MAX_SESSION_ITEMS or size_bytes > limits.MAX_SESSION_BYTES:
        raise SessionFullError(
            f"a conversation has at most {limits.MAX_SESSION_ITEMS:,} items of "
            f"{limits.MAX_SESSION_BYTES >> 20} MiB",
            hint="Begin another conversation, with what matters of this one in its first message.",
        )


def full_tenant() -> SessionFullError:
    """Return the error of a tenant with the maximum number of sessions."""
    return SessionFullError(
        f"the tenant has {limits.MAX_SESSIONS_OF_TENANT} conversations, and no more are kept",
        hint="Delete some, or let them expire sooner (ttl_s, front.session_days).",
    )


def insert_items(
    execute: Execute,
    tenant: str,
    session_id: str,
    items: Sequence[SessionItem],
    texts: Iterable[str],
    *,
    first: int,
) -> None:
    """Insert items; ``first`` is the position of the first, 0 for items of a turn only."""
    for number, (item, text) in enumerate(zip(items, texts, strict=True)):
        execute(
            "INSERT INTO session_items VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(tenant, item.item_id, session_id, item.response_id, int(item.is_output)),
                *(number, first + number if first else 0, text),
            ),
        )


def read_session(row: Row) -> ChatSession:
    """Return the session of a row of ``SESSION``."""
    return ChatSession(
        tenant=row[0],
        session_id=row[1],
        is_list=bool(row[2]),
        metadata=json.loads(row[3]),
        model=row[4],
        created_s=row[5],
        seen_s=row[6],
        ttl_s=row[7],
        turns=row[8],
        items=row[9],
        size_bytes=row[10],
        input_tokens=row[11],
        cached_tokens=row[12],
        output_tokens=row[13],
        hits=_read_hits(row[14]),
        prompt_tokens=row[15],
    )


def read_turn(row: Row) -> SessionTurn:
    """Return the turn of a row of ``TURN``."""
    return SessionTurn(
        tenant=row[0],
        response_id=row[1],
        session_id=row[2],
        parent=row[3],
        number=row[4],
        status=TurnStatus(row[5]),
        body=json.loads(row[6]),
        model=row[7],
        created_s=row[8],
        ended_s=row[9],
        alive_s=row[10],
        input_tokens=row[11],
        output_tokens=row[12],
        hits=_read_hits(row[13]),
    )


def read_items(rows: Iterable[Row]) -> list[SessionItem]:
    """Return the items of rows of ``ITEM``."""
    return [SessionItem(row[0], json.loads(row[1]), row[2], bool(row[3])) for row in rows]


def hits_text(hits: HitTokens) -> str:
    """Write cached tokens by tier, from L1 on."""
    return json.dumps([hits.l1, hits.l2, hits.l3, hits.l4])


def _read_hits(text: str) -> HitTokens:
    return HitTokens(*json.loads(text))


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
    """A turn on the path from a response to the root."""

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
    """Return the depth of a turn, and the items and bytes before; None: the parent is gone."""
    if not turn.parent:
        return 0, 0, 0
    parent = execute(
        "SELECT depth, path_items, path_bytes FROM session_turns "
        "WHERE tenant = ? AND response_id = ?",
        (turn.tenant, turn.parent),
    )
    return (parent[0][0] + 1, parent[0][1], parent[0][2]) if parent else None


def drop_loose_items(execute: Execute, tenant: str, response_id: str) -> tuple[int, int]:
    """Remove a turn's items outside conversations; return the number of items and bytes."""
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
