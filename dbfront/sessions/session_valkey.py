"""Conversations in Valkey or Redis, for several fronts; implements SessionStore.

tierkv/parts/front_part.py makes a store per front process when ``front.sessions`` is a URL of such
a server. A session is one hash, which expires as a whole:

    about         the session as JSON       p:POSITION   an item of a conversation
    owner         who may append turns      i:ITEM       the item's position
    t:RESPONSE    a turn                    o:RESPONSE   items of a turn outside conversations

Sorted sets and a hash of each tenant list sessions and turns; ``prune`` and readers drop entries
whose session is gone. Changes are optimistic transactions over the session's hash. All keys of a
tenant are in one slot of a Valkey cluster, but for the set of tenants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from heapq import merge
from itertools import islice
from typing import Any, Final, TypeVar

from tierkv.dbfront.sessions.session_hashes import (
    FREE,
    Client,
    Json,
    SessionKeys,
    appended,
    drop_turn,
    erase_session,
    is_live,
    of_key,
    put_turn,
    read_item,
    read_json,
    read_session,
    read_step,
    read_turn,
    to_key,
    turn_ids,
    write_session,
)
from tierkv.dbfront.sessions.session_rows import full_tenant
from tierkv.dbfront.sessions.session_store import (
    HISTORY,
    ChatSession,
    ItemPage,
    SessionItem,
    SessionQuery,
    SessionTurn,
    TurnStatus,
    store_lost,
)
from tierkv.kvcore import limits
from tierkv.scheduler.shared_state.contract import SharedStateLostError
from tierkv.scheduler.shared_state.valkey import ValkeyTransactions

T = TypeVar("T")

_TENANTS: Final = "tierkv:sessions"
_TIMEOUT_S: Final = 5.0
_AT_ONCE: Final = 200
"""Items or sessions of one round trip."""
_LOCK_KEPT_S: Final = 60.0
"""Seconds after its end when a lock's field expires, on servers with expiry of fields."""


class SessionValkey:
    """A connection pool, and what each method does with the hashes.

    Attributes:
        place: host and database number, without the password.
        close: closes the connections.
    """

    def __init__(self, url: str) -> None:
        """Prepare; the first use connects.

        Raises:
            ConfigError: the URL is none of a Valkey or Redis server.
        """
        self._server = ValkeyTransactions(url, "front.sessions", timeout_s=_TIMEOUT_S)
        self.place = self._server.place
        self.close = self._server.close

    # -- sessions

    def create(self, session: ChatSession, items: Sequence[SessionItem] = ()) -> bool:
        """Make a session; see SessionStore."""
        tenant, session_id = session.tenant, session.session_id
        places = SessionKeys(tenant)

        def work(pipe: Client) -> bool:
            found = read_json(pipe.hget(places.session(session_id), "about"))
            if found is not None and is_live(found, session.created_s):
                return False
            old = turn_ids(pipe, places, session_id) if found is not None else []
            if found is None and pipe.zcard(places.seen) >= limits.MAX_SESSIONS_OF_TENANT:
                raise full_tenant()
            about = asdict(session) | {"hits": [0, 0, 0, 0], "next": 1, "kept_turns": 0}
            fields = appended(about, items)
            pipe.multi()
            erase_session(pipe, places, session_id, old)
            write_session(pipe, places, about, fields)
            return True

        self._ask("sadd", _TENANTS, to_key(tenant))
        return self._change(places, session_id, work)

    def session(self, tenant: str, session_id: str, now_s: float) -> ChatSession | None:
        """Find a session; see SessionStore."""
        key = SessionKeys(tenant).session(session_id)
        about = read_json(self._ask("hget", key, "about"))
        return read_session(about) if about is not None and is_live(about, now_s) else None

    def sessions(self, query: SessionQuery, now_s: float) -> list[ChatSession]:
        """List sessions; see SessionStore."""
        listed = [self._sessions_of(tenant, query, now_s) for tenant in self._tenants(query.tenant)]
        found = merge(*listed, key=lambda one: (one.seen_s, one.session_id), reverse=True)
        return list(islice(found, query.most))

    def _sessions_of(self, tenant: str, query: SessionQuery, now_s: float) -> Iterator[ChatSession]:
        places = SessionKeys(tenant)
        first = 0
        if query.after:
            rank = self._ask("zrevrank", places.seen, to_key(query.after))
            if rank is None:
                return
            first = rank + 1
        for names in self._pages(places.seen, first):
            keys = [places.session(of_key(name)) for name in names]
            for about in self._abouts(keys):
                if about is None or not is_live(about, now_s):
                    continue
                if query.lists_only and not about["is_list"]:
                    continue
                if query.metadata.items() <= about["metadata"].items():
                    yield read_session(about)

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
        places = SessionKeys(tenant)

        def work(pipe: Client) -> ChatSession | None:
            about = read_json(pipe.hget(places.session(session_id), "about"))
            if about is None or not is_live(about, now_s):
                return None
            about["seen_s"] = now_s
            if ttl_s is not None:
                about["ttl_s"] = ttl_s
            if metadata is not None:
                about["metadata"] = dict(metadata)
            pipe.multi()
            write_session(pipe, places, about, {})
            return read_session(about)

        return self._change(places, session_id, work)

    def delete(self, tenant: str, session_id: str) -> bool:
        """Remove a session; see SessionStore."""
        return self._remove(SessionKeys(tenant), session_id)

    def _remove(
        self, places: SessionKeys, session_id: str, *, unless_live_s: float | None = None
    ) -> bool:
        def work(pipe: Client) -> bool:
            about = read_json(pipe.hget(places.session(session_id), "about"))
            if about is not None and unless_live_s is not None and is_live(about, unless_live_s):
                return True
            turns = turn_ids(pipe, places, session_id)
            pipe.multi()
            erase_session(pipe, places, session_id, turns)
            return about is not None

        return self._change(places, session_id, work)

    def lock(
        self, tenant: str, session_id: str, owner: str, *, now_s: float, until_s: float
    ) -> bool:
        """Take or extend the right to append turns; see SessionStore."""
        places = SessionKeys(tenant)
        key = places.session(session_id)
        expires = self._run(lambda _: self._server.expires_fields())

        def work(pipe: Client) -> bool:
            about, held = pipe.hmget(key, "about", "owner")
            if about is None:
                return False
            name, end_s = json.loads(held or FREE)
            if name not in ("", owner) and end_s > now_s:
                return False
            pipe.multi()
            pipe.hset(key, "owner", json.dumps([owner, until_s]))
            if expires:
                kept_ms = max(1, round(1_000 * (until_s - now_s + _LOCK_KEPT_S)))
                pipe.execute_command("HPEXPIRE", key, kept_ms, "FIELDS", 1, "owner")
            return True

        return self._change(places, session_id, work)

    def unlock(self, tenant: str, session_id: str, owner: str) -> None:
        """Give the right back; see SessionStore."""
        places = SessionKeys(tenant)

        def work(pipe: Client) -> None:
            holder, _ = json.loads(pipe.hget(places.session(session_id), "owner") or FREE)
            if holder == owner:
                pipe.multi()
                pipe.hdel(places.session(session_id), "owner")

        self._change(places, session_id, work)

    def prune(self, now_s: float) -> int:
        """Delete expired sessions, and entries of sessions already expired by the server."""
        count = 0
        for tenant in self._tenants(None):
            places = SessionKeys(tenant)
            over = self._ask("zrangebyscore", places.until, 0, now_s)
            names = [of_key(name) for name in over]
            gone = [n for n in names if not self._remove(places, n, unless_live_s=now_s)]
            count += len(names)
            if gone:
                self._drop_turns(places, frozenset(gone))
        return count

    def _drop_turns(self, places: SessionKeys, gone: frozenset[str]) -> None:
        """Drop entries of turns of sessions that expired unlisted."""
        for member, _ in self._run(lambda valkey: [*valkey.zscan_iter(places.made)]):
            response_id, _, session_id = of_key(member).partition(" ")
            if session_id in gone:
                self._ask("zrem", places.made, member)
                self._ask("hdel", places.turns, to_key(response_id))

    # -- items

    def items(self, tenant: str, session_id: str, page: ItemPage = HISTORY) -> list[SessionItem]:
        """List items of a conversation; see SessionStore."""
        key = SessionKeys(tenant).session(session_id)
        about = read_json(self._ask("hget", key, "about"))
        if about is None:
            return []
        first, last = 1, about["next"] - 1
        for name in filter(None, (page.only, page.after)):
            place = self._ask("hget", key, b"i:" + to_key(name))
            if place is None:
                return []
            if name == page.only:
                first = last = int(place)
            elif page.newest_first:
                last = int(place) - 1
            else:
                first = int(place) + 1
        positions = range(first, last + 1)
        found = self._items_at(key, positions[::-1] if page.newest_first else positions)
        return list(islice(found, page.most or None))

    def _items_at(self, key: bytes, positions: Sequence[int]) -> Iterator[SessionItem]:
        for at in range(0, len(positions), _AT_ONCE):
            fields = [f"p:{position}" for position in positions[at : at + _AT_ONCE]]
            for told in self._ask("hmget", key, fields):
                if told is not None:
                    yield read_item(json.loads(told))

    def add_items(
        self, tenant: str, session_id: str, items: Sequence[SessionItem], now_s: float
    ) -> bool:
        """Append items to a conversation; see SessionStore."""
        places = SessionKeys(tenant)
        key = places.session(session_id)

        def work(pipe: Client) -> bool:
            about = read_json(pipe.hget(key, "about"))
            if about is None or not about["is_list"] or not is_live(about, now_s):
                return False
            if items and pipe.hexists(key, b"i:" + to_key(items[0].item_id)):
                return True  # An earlier try arrived, but its reply did not.
            about["seen_s"] = now_s
            fields = appended(about, items)
            pipe.multi()
            write_session(pipe, places, about, fields)
            return True

        return self._change(places, session_id, work)

    def delete_item(self, tenant: str, session_id: str, item_id: str) -> bool:
        """Remove an item from a conversation; see SessionStore."""
        places = SessionKeys(tenant)
        key = places.session(session_id)

        def work(pipe: Client) -> bool:
            about = read_json(pipe.hget(key, "about"))
            place = pipe.hget(key, b"i:" + to_key(item_id))
            if about is None or place is None:
                return False
            told = pipe.hget(key, b"p:" + place)
            about["items"] -= 1
            about["size_bytes"] -= len(json.loads(told)[3])
            pipe.multi()
            pipe.hdel(key, b"i:" + to_key(item_id), b"p:" + place)
            pipe.hset(key, "about", json.dumps(about))
            return True

        return self._change(places, session_id, work)

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
        places = SessionKeys(turn.tenant)

        def work(pipe: Client) -> SessionTurn | None:
            return put_turn(pipe, places, turn, items, owner=owner, opened=opened)

        return self._change(places, turn.session_id, work)

    def sign(self, tenant: str, response_id: str, now_s: float) -> bool:
        """Note a sign of life of an open turn; see SessionStore."""
        places = SessionKeys(tenant)
        session_id = self._session_of(places, response_id)
        key, field = places.session(session_id), b"t:" + to_key(response_id)

        def work(pipe: Client) -> bool:
            row = read_json(pipe.hget(key, field))
            if row is None or not TurnStatus(row["status"]).is_open:
                return False
            row["alive_s"] = now_s
            pipe.multi()
            pipe.hset(key, field, json.dumps(row))
            return True

        return self._change(places, session_id, work)

    def turn(self, tenant: str, response_id: str, now_s: float) -> SessionTurn | None:
        """Find a turn; see SessionStore."""
        places = SessionKeys(tenant)
        _, about, row, _ = self._step(places, self._session_of(places, response_id), response_id)
        live = about is not None and row is not None and is_live(about, now_s)
        return read_turn(row) if live and row is not None else None

    def turns(self, tenant: str | None, most: int, now_s: float) -> list[SessionTurn]:
        """List turns, the newest first; see SessionStore."""
        listed = [self._turns_of(SessionKeys(each), now_s) for each in self._tenants(tenant)]
        found = merge(*listed, key=lambda one: (one.created_s, one.response_id), reverse=True)
        return list(islice(found, most))

    def _turns_of(self, places: SessionKeys, now_s: float) -> Iterator[SessionTurn]:
        for members in self._pages(places.made, 0):
            for member in members:
                response_id, _, session_id = of_key(member).partition(" ")
                _, about, row, _ = self._step(places, session_id, response_id)
                if about is not None and row is not None and is_live(about, now_s):
                    yield read_turn(row)

    def turn_items(self, tenant: str, response_id: str) -> list[SessionItem]:
        """Return the items of a turn, in order; see SessionStore."""
        places = SessionKeys(tenant)
        step = self._step(places, self._session_of(places, response_id), response_id)
        session_id, _, row, loose = step
        if row is None:
            return []
        if not row["first"]:
            return loose
        positions = range(row["first"], row["last"] + 1)
        return list(self._items_at(places.session(session_id), positions))

    def history(self, tenant: str, response_id: str, now_s: float) -> list[SessionItem] | None:
        """Return the items up to and with a response; see SessionStore."""
        places = SessionKeys(tenant)
        told: list[list[SessionItem]] = []
        session_id, wanted = self._session_of(places, response_id), response_id
        while wanted:
            session_id, about, row, loose = self._step(places, session_id, wanted)
            if about is None or row is None or not is_live(about, now_s):
                return None
            if not TurnStatus(row["status"]).is_answered:
                return None
            if about["is_list"]:
                positions = range(1, row["last"] + 1)
                told.append(list(self._items_at(places.session(session_id), positions)))
                break
            told.append(loose)
            wanted = row["parent"]
        return [item for items in reversed(told) for item in items]

    def delete_turn(self, tenant: str, response_id: str) -> bool:
        """Remove a turn; see SessionStore."""
        places = SessionKeys(tenant)
        session_id = self._session_of(places, response_id)
        key = places.session(session_id)

        def work(pipe: Client) -> bool:
            about, row, loose = read_step(pipe, key, response_id)
            if about is None or row is None:
                return False
            if TurnStatus(row["status"]).is_answered:
                about["items"] -= len(loose)
                about["size_bytes"] -= sum(len(one.to_json()) for one in loose)
            about["kept_turns"] -= 1
            pipe.multi()
            if not about["is_list"] and not about["kept_turns"]:
                erase_session(pipe, places, session_id, [response_id])
                return True
            pipe.hdel(key, b"t:" + to_key(response_id), b"o:" + to_key(response_id))
            pipe.hset(key, "about", json.dumps(about))
            drop_turn(pipe, places, session_id, response_id)
            return True

        return self._change(places, session_id, work)

    # -- the server

    def _session_of(self, places: SessionKeys, response_id: str) -> str:
        return of_key(self._ask("hget", places.turns, to_key(response_id)) or b"")

    def _step(
        self, places: SessionKeys, session_id: str, response_id: str
    ) -> tuple[str, Json | None, Json | None, list[SessionItem]]:
        """Return session, turn and loose items of a response, probably of ``session_id``."""
        key = places.session(session_id)
        about, row, loose = self._run(lambda valkey: read_step(valkey, key, response_id))
        if row is None and (other := self._session_of(places, response_id)) not in ("", session_id):
            key, session_id = places.session(other), other
            about, row, loose = self._run(lambda valkey: read_step(valkey, key, response_id))
        return session_id, about, row, loose

    def _tenants(self, only: str | None) -> list[str]:
        if only is not None:
            return [only]
        return sorted(of_key(name) for name in self._ask("smembers", _TENANTS))

    def _pages(self, key: bytes, first: int) -> Iterator[list[bytes]]:
        """Yield the members of a sorted set, the last ones first."""
        while True:
            last = first + _AT_ONCE - 1
            page = self._ask("zrevrange", key, first, last)
            if not page:
                return
            yield page
            first += len(page)

    def _abouts(self, keys: Iterable[bytes]) -> list[Json | None]:
        def read(valkey: Client) -> list[Json | None]:
            with valkey.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hget(key, "about")
                return [read_json(told) for told in pipe.execute()]

        return self._run(read)

    def _ask(self, command: str, *given: Any) -> Any:
        """Return the answer to one command."""
        return self._run(lambda valkey: getattr(valkey, command)(*given))

    def _change(self, places: SessionKeys, session_id: str, work: Callable[[Client], T]) -> T:
        key = places.session(session_id)
        return self._run(lambda _: self._server.change(key, work))

    def _run(self, work: Callable[[Client], T]) -> T:
        """Run ``work``; a lost connection is opened again, once.

        A change may have arrived although the reply was lost. Repeating is harmless, as in
        SessionDatabase.
        """
        try:
            return self._server.run(work)
        except SharedStateLostError as error:
            cure = "Start the server that front.sessions names; turns go on then."
            raise store_lost(self.place, error.message[:200], cure) from error
