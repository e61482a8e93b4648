"""The tables of kept conversations, in SQL that SQLite and PostgreSQL share.

dbfront/sessions/session_file.py and dbfront/sessions/session_database.py derive from
``SessionTables`` and run its transactions. All names are of the schema of the connection. JSON is
ASCII text, so characters that a database refuses (NUL, half a surrogate pair) are stored as well.

Transactions of one session run one after the other: each begins with an UPDATE of the session's
row, which both databases lock until the end.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tierkv.dbfront.sessions.session_store import (
    HISTORY,
    ChatSession,
    ItemPage,
    SessionItem,
    SessionQuery,
    SessionTurn,
    TurnStatus,
)
from tierkv.kvcore import limits
from tierkv.kvcore.errors import SessionFullError
from tierkv.kvcore.request import HitTokens

T = TypeVar("T")
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

_OF: Final = "tenant = ? AND session_id = ?"
_SESSION: Final = (
    "tenant, session_id, is_list, metadata, model, created_s, seen_s, ttl_s, turns, items, "
    "size_bytes, input_tokens, cached_tokens, output_tokens, hits, prompt_tokens"
)
_LIVE: Final = "(ttl_s = 0 OR seen_s + ttl_s > ?)"
_TURN: Final = (
    "tenant, response_id, session_id, parent, number, status, body, model, created_s, ended_s, "
    "alive_s, input_tokens, output_tokens, hits"
)
_LIVE_TURN: Final = (
    f"EXISTS (SELECT 1 FROM sessions s WHERE s.tenant = t.tenant AND "
    f"s.session_id = t.session_id AND {_LIVE})"
)
_ITEM: Final = "item_id, body, response_id, is_output"
_STEP: Final = "turn_id, parent, turns_session, depth, is_list, last_position, live"
_TURN_STEP: Final = (
    "SELECT t.response_id, t.parent, t.session_id, t.depth, s.is_list, t.last_position, "
    "CASE WHEN t.status IN ('completed', 'incomplete') AND (s.ttl_s = 0 OR s.seen_s + s.ttl_s > ?) "
    "THEN 1 ELSE 0 END FROM"
)
_PATH: Final = (
    f"WITH RECURSIVE path ({_STEP}) AS ({_TURN_STEP} session_turns t "
    "JOIN sessions s ON s.tenant = t.tenant AND s.session_id = t.session_id "
    "WHERE t.tenant = ? AND t.response_id = ? "
    f"UNION ALL {_TURN_STEP} path p "
    "JOIN session_turns t ON t.tenant = ? AND t.response_id = p.parent "
    "JOIN sessions s ON s.tenant = t.tenant AND s.session_id = t.session_id "
    "WHERE p.is_list = 0)"
)
"""The turns from a response to its root. A turn of a conversation is a root as well."""


@dataclass(frozen=True, slots=True)
class _PathStep:
    """One turn on the path from a response to its root."""

    turn_id: str
    parent: str
    session_id: str
    depth: int
    is_list: int
    last_position: int
    live: int


class SessionTables(ABC):
    """Implements SessionStore over a database; a subclass runs transactions."""

    @abstractmethod
    def transact(self, work: Callable[[Execute], T]) -> T:
        """Run ``work`` in one transaction; roll back if it raises.

        Raises:
            SessionStoreError: the database can't be used.
        """

    # -- sessions

    def create(self, session: ChatSession, items: Sequence[SessionItem] = ()) -> bool:
        """Make a session; see SessionStore."""

        def work(execute: Execute) -> bool:
            return _create(execute, session, items)

        return self.transact(work)

    def session(self, tenant: str, session_id: str, now_s: float) -> ChatSession | None:
        """Find a session; see SessionStore."""
        return self.transact(lambda execute: _session(execute, tenant, session_id, now_s))

    def sessions(self, query: SessionQuery, now_s: float) -> list[ChatSession]:
        """List sessions; see SessionStore."""
        return self.transact(lambda execute: _listed(execute, query, now_s))

    def change(
        self,
        tenant: str,
        session_id: str,
        now_s: float,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
    ) -> ChatSession | None:
        """Replace the metadata, or the time to live; see SessionStore."""

        def work(execute: Execute) -> ChatSession | None:
            found = execute(
                f"UPDATE sessions SET seen_s = ? WHERE {_OF} AND {_LIVE} RETURNING 1",
                (now_s, tenant, session_id, now_s),
            )
            if not found:
                return None
            if ttl_s is not None:
                execute(f"UPDATE sessions SET ttl_s = ? WHERE {_OF}", (ttl_s, tenant, session_id))
            if metadata is not None:
                text = json.dumps(dict(metadata))
                execute(f"UPDATE sessions SET metadata = ? WHERE {_OF}", (text, tenant, session_id))
                execute(f"DELETE FROM session_labels WHERE {_OF}", (tenant, session_id))
                _label(execute, tenant, session_id, metadata)
            return _session(execute, tenant, session_id, now_s)

        return self.transact(work)

    def delete(self, tenant: str, session_id: str) -> bool:
        """Remove a session; see SessionStore."""
        return self.transact(lambda execute: _delete(execute, tenant, session_id))

    def lock(
        self, tenant: str, session_id: str, owner: str, *, now_s: float, until_s: float
    ) -> bool:
        """Take or extend the right to append turns; see SessionStore."""
        statement = (
            f"UPDATE sessions SET owner = ?, locked_until_s = ? WHERE {_OF} "
            "AND (owner = '' OR owner = ? OR locked_until_s <= ?) RETURNING 1"
        )
        values = (owner, until_s, tenant, session_id, owner, now_s)
        return bool(self.transact(lambda execute: execute(statement, values)))

    def unlock(self, tenant: str, session_id: str, owner: str) -> None:
        """Give the right back; see SessionStore."""
        statement = f"UPDATE sessions SET owner = '' WHERE {_OF} AND owner = ?"
        self.transact(lambda execute: execute(statement, (tenant, session_id, owner)))

    def prune(self, now_s: float) -> int:
        """Delete expired sessions; return their number."""

        def work(execute: Execute) -> int:
            expired = execute(
                "SELECT tenant, session_id FROM sessions WHERE ttl_s > 0 AND seen_s + ttl_s <= ?",
                (now_s,),
            )
            return sum(_delete(execute, *each) for each in expired)

        return self.transact(work)

    # -- items

    def items(self, tenant: str, session_id: str, page: ItemPage = HISTORY) -> list[SessionItem]:
        """List items of a conversation; see SessionStore."""
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        where, values = "", [tenant, session_id]
        if page.after:
            where = (
                f"AND position {beyond} (SELECT a.position FROM session_items a "
                "WHERE a.tenant = ? AND a.item_id = ?)"
            )
            values += [tenant, page.after]
        limit = f"LIMIT {int(page.most)}" if page.most else ""
        statement = (
            f"SELECT {_ITEM} FROM session_items WHERE {_OF} AND position > 0 {where} "
            f"ORDER BY position {order} {limit}"
        )
        return _items(self.transact(lambda execute: execute(statement, values)))

    def item(self, tenant: str, session_id: str, item_id: str) -> SessionItem | None:
        """Find an item of a conversation; see SessionStore."""
        statement = (
            f"SELECT {_ITEM} FROM session_items WHERE {_OF} AND item_id = ? AND position > 0"
        )
        found = self.transact(lambda execute: execute(statement, (tenant, session_id, item_id)))
        return next(iter(_items(found)), None)

    def add_items(
        self, tenant: str, session_id: str, items: Sequence[SessionItem], now_s: float
    ) -> bool:
        """Append items to a conversation; see SessionStore."""

        def work(execute: Execute) -> bool:
            known = "SELECT 1 FROM session_items WHERE tenant = ? AND item_id = ?"
            if items and execute(known, (tenant, items[0].item_id)):
                return True  # An earlier try arrived, but its reply did not.
            return bool(_append(execute, tenant, session_id, items, now_s))

        return self.transact(work)

    def delete_item(self, tenant: str, session_id: str, item_id: str) -> bool:
        """Remove an item from a conversation; see SessionStore."""

        def work(execute: Execute) -> bool:
            removed = execute(
                f"DELETE FROM session_items WHERE {_OF} AND item_id = ? AND position > 0 "
                "RETURNING length(body)",
                (tenant, session_id, item_id),
            )
            if removed:
                execute(
                    "UPDATE sessions SET items = items - 1, size_bytes = size_bytes - ? "
                    f"WHERE {_OF}",
                    (removed[0][0], tenant, session_id),
                )
            return bool(removed)

        return self.transact(work)

    # -- turns

    def put_turn(
        self,
        turn: SessionTurn,
        items: Sequence[SessionItem],
        *,
        owner: str = "",
        opened: bool = False,
    ) -> SessionTurn | None:
        """Make a turn or replace an open one; see SessionStore."""

        def work(execute: Execute) -> SessionTurn | None:
            return _put_turn(execute, turn, items, owner=owner, opened=opened)

        return self.transact(work)

    def turn(self, tenant: str, response_id: str, now_s: float) -> SessionTurn | None:
        """Find a turn; see SessionStore."""
        return self.transact(lambda execute: _turn(execute, tenant, response_id, now_s))

    def turns(self, tenant: str | None, most: int, now_s: float) -> list[SessionTurn]:
        """List turns, the newest first; see SessionStore."""
        where, values = ("AND t.tenant = ?", [now_s, tenant]) if tenant else ("", [now_s])
        statement = (
            f"SELECT {_TURN} FROM session_turns t WHERE {_LIVE_TURN} {where} "
            f"ORDER BY t.created_s DESC, t.response_id DESC LIMIT {int(most)}"
        )
        return [
            _read_turn(row) for row in self.transact(lambda execute: execute(statement, values))
        ]

    def turn_items(self, tenant: str, response_id: str) -> list[SessionItem]:
        """Return the items of a turn, in order; see SessionStore."""
        statement = (
            f"SELECT {_ITEM} FROM session_items WHERE tenant = ? AND response_id = ? "
            "ORDER BY number"
        )
        return _items(self.transact(lambda execute: execute(statement, (tenant, response_id))))

    def history(self, tenant: str, response_id: str, now_s: float) -> list[SessionItem] | None:
        """Return the items up to and with a response; see SessionStore."""

        def work(execute: Execute) -> list[SessionItem] | None:
            values = (now_s, tenant, response_id, now_s, tenant)
            path = execute(f"{_PATH} SELECT {_STEP} FROM path ORDER BY depth", values)
            if not path:
                return None
            first = _PathStep(*path[0])
            # The root of a whole path names no parent, or is a turn of a conversation.
            if (first.parent and not first.is_list) or not all(row[-1] for row in path):
                return None
            listed = execute(
                f"SELECT {_ITEM} FROM session_items WHERE {_OF} AND position > 0 "
                "AND position <= ? ORDER BY position",
                (tenant, first.session_id, first.last_position),
            )
            told = execute(
                f"{_PATH} SELECT {_ITEM} FROM path JOIN session_items i ON i.tenant = ? "
                "AND i.response_id = path.turn_id WHERE path.is_list = 0 ORDER BY depth, number",
                (*values, tenant),
            )
            return _items([*listed, *told])

        return self.transact(work)

    def delete_turn(self, tenant: str, response_id: str) -> bool:
        """Remove a turn; see SessionStore."""

        def work(execute: Execute) -> bool:
            known = execute(
                "SELECT session_id FROM session_turns WHERE tenant = ? AND response_id = ?",
                (tenant, response_id),
            )
            if not known:
                return False
            of = (tenant, known[0][0])
            execute(f"UPDATE sessions SET seen_s = seen_s WHERE {_OF}", of)
            found = execute(
                "DELETE FROM session_turns WHERE tenant = ? AND response_id = ? RETURNING status",
                (tenant, response_id),
            )
            count, size = _drop_loose_items(execute, tenant, response_id)
            if found and TurnStatus(found[0][0]).is_answered:
                execute(
                    "UPDATE sessions SET items = items - ?, size_bytes = size_bytes - ? "
                    f"WHERE {_OF}",
                    (count, size, *of),
                )
            execute(
                f"DELETE FROM sessions WHERE {_OF} AND is_list = 0 AND NOT EXISTS (SELECT 1 FROM "
                "session_turns t WHERE t.tenant = ? AND t.session_id = ?)",
                (*of, *of),
            )
            return bool(found)

        return self.transact(work)


def _create(execute: Execute, session: ChatSession, items: Sequence[SessionItem]) -> bool:
    tenant, session_id, now_s = session.tenant, session.session_id, session.created_s
    known = execute(f"SELECT ttl_s, seen_s FROM sessions WHERE {_OF}", (tenant, session_id))
    if known and (not known[0][0] or known[0][0] + known[0][1] > now_s):
        return False
    if known:
        _delete(execute, tenant, session_id)
    most = limits.MAX_SESSIONS_OF_TENANT
    ((count,),) = execute(
        f"SELECT count(*) FROM (SELECT 1 FROM sessions WHERE tenant = ? LIMIT {most}) AS counted",
        (tenant,),
    )
    if count >= most:
        raise SessionFullError(
            f"the tenant has {most} conversations, and no more are kept",
            hint="Delete some, or let them expire sooner (ttl_s, front.session_days).",
        )
    made = execute(
        f"INSERT INTO sessions ({_SESSION}, owner, locked_until_s, next_position) "
        f"VALUES ({', '.join('?' * 16)}, '', 0, 1) ON CONFLICT DO NOTHING RETURNING 1",
        (
            *(tenant, session_id, int(session.is_list), json.dumps(dict(session.metadata))),
            *(session.model, now_s, session.seen_s, session.ttl_s),
            *(0, 0, 0, 0, 0, 0, _hits_text(HitTokens()), 0),
        ),
    )
    if made:
        _label(execute, tenant, session_id, session.metadata)
        if items:
            _append(execute, tenant, session_id, items, now_s)
    return bool(made)


def _label(execute: Execute, tenant: str, session_id: str, metadata: Mapping[str, str]) -> None:
    for name, value in metadata.items():
        execute(
            "INSERT INTO session_labels VALUES (?, ?, ?, ?)",
            (tenant, session_id, json.dumps(name), json.dumps(value)),
        )


def _session(execute: Execute, tenant: str, session_id: str, now_s: float) -> ChatSession | None:
    found = execute(
        f"SELECT {_SESSION} FROM sessions WHERE {_OF} AND {_LIVE}", (tenant, session_id, now_s)
    )
    return _read_session(found[0]) if found else None


def _listed(execute: Execute, query: SessionQuery, now_s: float) -> list[ChatSession]:
    where, values = [_LIVE], [now_s]
    if query.tenant is not None:
        where.append("s.tenant = ?")
        values.append(query.tenant)
    if query.lists_only:
        where.append("s.is_list = 1")
    for name, value in query.metadata.items():
        where.append(
            "EXISTS (SELECT 1 FROM session_labels l WHERE l.tenant = s.tenant AND "
            "l.session_id = s.session_id AND l.name = ? AND l.value = ?)"
        )
        values += [json.dumps(name), json.dumps(value)]
    if query.after:
        where.append(
            "(s.seen_s, s.session_id) < (SELECT a.seen_s, a.session_id FROM sessions a "
            "WHERE a.tenant = ? AND a.session_id = ?)"
        )
        values += [query.tenant, query.after]
    found = execute(
        f"SELECT {_SESSION} FROM sessions s WHERE {' AND '.join(where)} "
        f"ORDER BY s.seen_s DESC, s.session_id DESC LIMIT {int(query.most)}",
        values,
    )
    return [_read_session(row) for row in found]


def _delete(execute: Execute, tenant: str, session_id: str) -> bool:
    found = execute(f"DELETE FROM sessions WHERE {_OF} RETURNING 1", (tenant, session_id))
    for table in ("session_labels", "session_turns", "session_items"):
        execute(f"DELETE FROM {table} WHERE {_OF}", (tenant, session_id))
    return bool(found)


def _append(
    execute: Execute,
    tenant: str,
    session_id: str,
    items: Sequence[SessionItem],
    now_s: float,
) -> list[Row]:
    """Append items to a live conversation; return nothing if there is none."""
    texts = [item.to_json() for item in items]
    found = execute(
        "UPDATE sessions SET seen_s = ?, items = items + ?, size_bytes = size_bytes + ?, "
        f"next_position = next_position + ? WHERE {_OF} AND is_list = 1 AND {_LIVE} "
        "RETURNING items, size_bytes, next_position",
        (now_s, len(items), sum(map(len, texts)), len(items), tenant, session_id, now_s),
    )
    if found:
        _check_size(found[0][0], found[0][1])
        first = found[0][2] - len(items)
        _insert_items(execute, tenant, session_id, items, texts, first=first)
    return found


def _check_size(items: int, size_bytes: int) -> None:
    if items > limits.MAX_SESSION_ITEMS or size_bytes > limits.MAX_SESSION_BYTES:
        raise SessionFullError(
            f"a conversation has at most {limits.MAX_SESSION_ITEMS:,} items of "
            f"{limits.MAX_SESSION_BYTES >> 20} MiB",
            hint="Begin another conversation, with what matters of this one in its first message.",
        )


def _insert_items(
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


def _put_turn(
    execute: Execute,
    turn: SessionTurn,
    items: Sequence[SessionItem],
    *,
    owner: str,
    opened: bool,
) -> SessionTurn | None:
    tenant, session_id = turn.tenant, turn.session_id
    now_s = turn.ended_s or turn.created_s
    session = execute(
        f"UPDATE sessions SET seen_s = ? WHERE {_OF} AND {_LIVE} "
        "RETURNING is_list, owner, turns, items, size_bytes",
        (now_s, tenant, session_id, now_s),
    )
    known = execute(
        f"SELECT {_TURN} FROM session_turns WHERE tenant = ? AND response_id = ?",
        (tenant, turn.response_id),
    )
    if known and not _read_turn(known[0]).status.is_open:
        return _read_turn(known[0])
    answered = turn.status.is_answered
    if not session or (opened and not known) or (answered and owner and session[0][1] != owner):
        return None
    is_list, _, turns, kept_items, kept_bytes = session[0]
    path = _path_of(execute, turn)
    if path is None:
        return None
    _drop_loose_items(execute, tenant, turn.response_id)
    texts = [item.to_json() for item in items]
    size = sum(map(len, texts))
    last_position = first = 0
    before = (kept_items, kept_bytes) if is_list else path[1:]
    _check_size(before[0] + len(items), before[1] + size)
    if answered:
        at = execute(
            "UPDATE sessions SET turns = turns + 1, model = ?, input_tokens = input_tokens + ?, "
            "cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?, hits = ?, "
            "prompt_tokens = ?, items = items + ?, size_bytes = size_bytes + ?, "
            "next_position = next_position + ?, "
            "owner = CASE WHEN owner = ? THEN '' ELSE owner END "
            f"WHERE {_OF} RETURNING next_position",
            (
                *(turn.model, turn.input_tokens, turn.hits.total, turn.output_tokens),
                *(_hits_text(turn.hits), turn.input_tokens, len(items), size, len(items)),
                *(owner, tenant, session_id),
            ),
        )
        if is_list:
            last_position = at[0][0] - 1
            first = at[0][0] - len(items)
    _insert_items(execute, tenant, session_id, items, texts, first=first)
    number = turns + 1
    values = (
        *(tenant, turn.response_id, session_id, turn.parent, number, turn.status.value),
        *(json.dumps(dict(turn.body)), turn.model, turn.created_s, turn.ended_s, turn.alive_s),
        *(turn.input_tokens, turn.output_tokens, _hits_text(turn.hits)),
        *(path[0], path[1] + len(items), path[2] + size, last_position),
    )
    execute(
        "DELETE FROM session_turns WHERE tenant = ? AND response_id = ?",
        (tenant, turn.response_id),
    )
    stored = execute(
        f"INSERT INTO session_turns VALUES ({', '.join('?' * 18)}) RETURNING {_TURN}", values
    )
    return _read_turn(stored[0])


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


def _drop_loose_items(execute: Execute, tenant: str, response_id: str) -> tuple[int, int]:
    """Remove a turn's items, unless a conversation has them; return their number and bytes."""
    removed = execute(
        "DELETE FROM session_items WHERE tenant = ? AND response_id = ? AND position = 0 "
        "RETURNING length(body)",
        (tenant, response_id),
    )
    return len(removed), sum(row[0] for row in removed)


def _turn(execute: Execute, tenant: str, response_id: str, now_s: float) -> SessionTurn | None:
    found = execute(
        f"SELECT {_TURN} FROM session_turns t WHERE t.tenant = ? AND t.response_id = ? "
        f"AND {_LIVE_TURN}",
        (tenant, response_id, now_s),
    )
    return _read_turn(found[0]) if found else None


def _read_session(row: Row) -> ChatSession:
    return ChatSession(
        *row[:2],
        is_list=bool(row[2]),
        metadata=json.loads(row[3]),
        **dict(
            zip(
                (
                    "model", "created_s", "seen_s", "ttl_s", "turns", "items", "size_bytes",
                    "input_tokens", "cached_tokens", "output_tokens",
                ),
                row[4:14],
                strict=True,
            )
        ),
        hits=_read_hits(row[14]),
        prompt_tokens=row[15],
    )  # fmt: skip


def _read_turn(row: Row) -> SessionTurn:
    return SessionTurn(
        *row[:3],
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


def _items(rows: Iterable[Row]) -> list[SessionItem]:
    return [SessionItem(row[0], json.loads(row[1]), row[2], bool(row[3])) for row in rows]


def _hits_text(hits: HitTokens) -> str:
    return json.dumps([hits.l1, hits.l2, hits.l3, hits.l4])


def _read_hits(text: str) -> HitTokens:
    return HitTokens(*json.loads(text))
