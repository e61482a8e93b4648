"""Rows of kept conversations: their tables, columns, and values.

The SQL of dbfront/sessions/session_tables.py and dbfront/sessions/turn_rows.py is made of these
pieces. SQLite and PostgreSQL both understand them. JSON is ASCII text, so characters that a
database refuses (NUL, half a surrogate pair) are stored as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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
