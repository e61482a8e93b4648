"""The tables of kept conversations, in SQL for SQLite and PostgreSQL alike.

dbfront/sessions/session_file.py and dbfront/sessions/session_database.py derive from
``SessionTables`` and run the transactions. All names are of the schema of the connection.

Transactions of a session never overlap: the first statement of each is an UPDATE of the session's
row, which both databases lock until the end.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tierkv.dbfront.sessions.session_rows import (
    ITEM,
    LIVE,
    LIVE_TURN,
    OF,
    PATH,
    SESSION,
    STEP,
    TURN,
    Execute,
    PathStep,
    Row,
    check_size,
    drop_loose_items,
    find_turn,
    full_tenant,
    hits_text,
    insert_items,
    put_turn,
    read_items,
    read_session,
    read_turn,
)
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
from tierkv.kvcore.request import HitTokens

T = TypeVar("T")


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
        return self.transact(lambda execute: _find(execute, tenant, session_id, now_s))

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
                f"UPDATE sessions SET seen_s = ? WHERE {OF} AND {LIVE} RETURNING 1",
                (now_s, tenant, session_id, now_s),
            )
            if not found:
                return None
            if ttl_s is not None:
                execute(f"UPDATE sessions SET ttl_s = ? WHERE {OF}", (ttl_s, tenant, session_id))
            if metadata is not None:
                text = json.dumps(dict(metadata))
                execute(f"UPDATE sessions SET metadata = ? WHERE {OF}", (text, tenant, session_id))
                execute(f"DELETE FROM session_labels WHERE {OF}", (tenant, session_id))
                _label(execute, tenant, session_id, metadata)
            return _find(execute, tenant, session_id, now_s)

        return self.transact(work)

    def delete(self, tenant: str, session_id: str) -> bool:
        """Remove a session; see SessionStore."""
        return self.transact(lambda execute: _delete(execute, tenant, session_id))

    def lock(
        self, tenant: str, session_id: str, owner: str, *, now_s: float, until_s: float
    ) -> bool:
        """Take or extend the right to append turns; see SessionStore."""
        statement = (
            f"UPDATE sessions SET owner = ?, locked_until_s = ? WHERE {OF} "
            "AND (owner = '' OR owner = ? OR locked_until_s <= ?) RETURNING 1"
        )
        values = (owner, until_s, tenant, session_id, owner, now_s)
        return bool(self.transact(lambda execute: execute(statement, values)))

    def unlock(self, tenant: str, session_id: str, owner: str) -> None:
        """Give the right back; see SessionStore."""
        statement = f"UPDATE sessions SET owner = '' WHERE {OF} AND owner = ?"
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
        where = ""
        values = [tenant, session_id]
        if page.after:
            where = (
                f"AND position {beyond} (SELECT a.position FROM session_items a "
                "WHERE a.tenant = ? AND a.item_id = ?)"
            )
            values += [tenant, page.after]
        if page.only:
            where += " AND item_id = ?"
            values.append(page.only)
        limit = f"LIMIT {int(page.most)}" if page.most else ""
        statement = (
            f"SELECT {ITEM} FROM session_items WHERE {OF} AND position > 0 {where} "
            f"ORDER BY position {order} {limit}"
        )
        return read_items(self.transact(lambda execute: execute(statement, values)))

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
                f"DELETE FROM session_items WHERE {OF} AND item_id = ? AND position > 0 "
                "RETURNING length(body)",
                (tenant, session_id, item_id),
            )
            if removed:
                execute(
                    "UPDATE sessions SET items = items - 1, size_bytes = size_bytes - ? "
                    f"WHERE {OF}",
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
            return put_turn(execute, turn, items, owner=owner, opened=opened)

        return self.transact(work)

    def sign(self, tenant: str, response_id: str, now_s: float) -> bool:
        """Note a sign of life of an open turn; see SessionStore."""
        statement = (
            "UPDATE session_turns SET alive_s = ? WHERE tenant = ? AND response_id = ? "
            "AND status IN ('queued', 'in_progress') RETURNING 1"
        )
        values = (now_s, tenant, response_id)
        return bool(self.transact(lambda execute: execute(statement, values)))

    def turn(self, tenant: str, response_id: str, now_s: float) -> SessionTurn | None:
        """Find a turn; see SessionStore."""
        return self.transact(lambda execute: find_turn(execute, tenant, response_id, now_s))

    def turns(self, tenant: str | None, most: int, now_s: float) -> list[SessionTurn]:
        """List turns, the newest first; see SessionStore."""
        where, values = ("AND t.tenant = ?", (now_s, tenant)) if tenant else ("", (now_s,))
        statement = (
            f"SELECT {TURN} FROM session_turns t WHERE {LIVE_TURN} {where} "
            f"ORDER BY t.created_s DESC, t.response_id DESC LIMIT {int(most)}"
        )
        return [read_turn(row) for row in self.transact(lambda execute: execute(statement, values))]

    def turn_items(self, tenant: str, response_id: str) -> list[SessionItem]:
        """Return the items of a turn, in order; see SessionStore."""
        statement = (
            f"SELECT {ITEM} FROM session_items WHERE tenant = ? AND response_id = ? ORDER BY number"
        )
        return read_items(self.transact(lambda execute: execute(statement, (tenant, response_id))))

    def history(self, tenant: str, response_id: str, now_s: float) -> list[SessionItem] | None:
        """Return the items up to and with a response; see SessionStore."""

        def work(execute: Execute) -> list[SessionItem] | None:
            values = (now_s, tenant, response_id, now_s, tenant)
            path = execute(f"{PATH} SELECT {STEP} FROM path ORDER BY depth", values)
            if not path:
                return None
            first = PathStep(*path[0])
            # The root of a whole path names no parent, or is a turn of a conversation.
            if (first.parent and not first.is_list) or not all(row[-1] for row in path):
                return None
            listed = execute(
                f"SELECT {ITEM} FROM session_items WHERE {OF} AND position > 0 "
                "AND position <= ? ORDER BY position",
                (tenant, first.session_id, first.last_position),
            )
            told = execute(
                f"{PATH} SELECT {ITEM} FROM path JOIN session_items i ON i.tenant = ? "
                "AND i.response_id = path.turn_id WHERE path.is_list = 0 ORDER BY depth, number",
                (*values, tenant),
            )
            return read_items([*listed, *told])

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
            execute(f"UPDATE sessions SET seen_s = seen_s WHERE {OF}", of)
            found = execute(
                "DELETE FROM session_turns WHERE tenant = ? AND response_id = ? RETURNING status",
                (tenant, response_id),
            )
            count, size = drop_loose_items(execute, tenant, response_id)
            if found and TurnStatus(found[0][0]).is_answered:
                execute(
                    "UPDATE sessions SET items = items - ?, size_bytes = size_bytes - ? "
                    f"WHERE {OF}",
                    (count, size, *of),
                )
            execute(
                f"DELETE FROM sessions WHERE {OF} AND is_list = 0 AND NOT EXISTS (SELECT 1 FROM "
                "session_turns t WHERE t.tenant = ? AND t.session_id = ?)",
                (*of, *of),
            )
            return bool(found)

        return self.transact(work)


def _create(execute: Execute, session: ChatSession, items: Sequence[SessionItem]) -> bool:
    tenant, session_id, now_s = session.tenant, session.session_id, session.created_s
    known = execute(f"SELECT ttl_s, seen_s FROM sessions WHERE {OF}", (tenant, session_id))
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
        raise full_tenant()
    made = execute(
        f"INSERT INTO sessions ({SESSION}, owner, locked_until_s, next_position) "
        f"VALUES ({', '.join('?' * 16)}, '', 0, 1) ON CONFLICT DO NOTHING RETURNING 1",
        (
            *(tenant, session_id, int(session.is_list), json.dumps(dict(session.metadata))),
            *(session.model, now_s, session.seen_s, session.ttl_s),
            *(0, 0, 0, 0, 0, 0, hits_text(HitTokens()), 0),
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


def _find(execute: Execute, tenant: str, session_id: str, now_s: float) -> ChatSession | None:
    found = execute(
        f"SELECT {SESSION} FROM sessions WHERE {OF} AND {LIVE}", (tenant, session_id, now_s)
    )
    return read_session(found[0]) if found else None


def _listed(execute: Execute, query: SessionQuery, now_s: float) -> list[ChatSession]:
    where = [LIVE]
    values: list[Any] = [now_s]
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
        f"SELECT {SESSION} FROM sessions s WHERE {' AND '.join(where)} "
        f"ORDER BY s.seen_s DESC, s.session_id DESC LIMIT {int(query.most)}",
        values,
    )
    return [read_session(row) for row in found]


def _delete(execute: Execute, tenant: str, session_id: str) -> bool:
    found = execute(f"DELETE FROM sessions WHERE {OF} RETURNING 1", (tenant, session_id))
    for table in ("session_labels", "session_turns", "session_items"):
        execute(f"DELETE FROM {table} WHERE {OF}", (tenant, session_id))
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
        f"next_position = next_position + ? WHERE {OF} AND is_list = 1 AND {LIVE} "
        "RETURNING items, size_bytes, next_position",
        (now_s, len(items), sum(map(len, texts)), len(items), tenant, session_id, now_s),
    )
    if found:
        check_size(found[0][0], found[0][1])
        first = found[0][2] - len(items)
        insert_items(execute, tenant, session_id, items, texts, first=first)
    return found
