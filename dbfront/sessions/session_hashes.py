"""The hashes of kept conversations in Valkey or Redis: keys, fields, and the writes of a turn.

dbfront/sessions/session_valkey.py describes the fields, and runs the functions in transactions.
Functions with a client read at once; those that write queue into a transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from tierkv.dbfront.sessions.session_rows import check_size
from tierkv.dbfront.sessions.session_store import ChatSession, SessionItem, SessionTurn, TurnStatus
from tierkv.kvcore.request import HitTokens

Json = dict[str, Any]
Client = Any
"""A client of the server, or a transaction; the library is optional, and its types are loose."""

FREE: Final = b'["", 0]'
"""The owner of a conversation that nobody has locked, and the end of the lock."""


class SessionKeys:
    """Keys of a tenant; the braces keep all of them in one slot of a Valkey cluster."""

    def __init__(self, tenant: str) -> None:
        """Name the keys that list sessions and turns."""
        self._of = b"{tierkv:sessions:" + to_key(tenant) + b"}:"
        self.seen = self._of + b"seen"
        self.until = self._of + b"until"
        self.made = self._of + b"made"
        self.turns = self._of + b"turns"

    def session(self, session_id: str) -> bytes:
        """Return the key of a session's hash."""
        return self._of + b"s:" + to_key(session_id)


def to_key(name: str) -> bytes:
    """Return a name as bytes of a key, field or member."""
    return name.encode("utf-8", "surrogatepass")


def of_key(name: bytes) -> str:
    """Return the name of bytes; see ``to_key``."""
    return name.decode("utf-8", "surrogatepass")


def read_json(told: bytes | None) -> Json | None:
    """Return the object of a field; None if the field does not exist."""
    found: Json | None = None if told is None else json.loads(told)
    return found


def is_live(about: Json, now_s: float) -> bool:
    """Return False after the time to live of a session."""
    return not about["ttl_s"] or bool(about["seen_s"] + about["ttl_s"] > now_s)


def read_session(about: Json) -> ChatSession:
    """Return the session of a field ``about``."""
    known = {name: value for name, value in about.items() if name not in ("next", "kept_turns")}
    return ChatSession(**known | {"hits": HitTokens(*about["hits"])})


def read_turn(row: Json) -> SessionTurn:
    """Return the turn of a field ``t:RESPONSE``."""
    known = {name: value for name, value in row.items() if name not in _OF_PATHS}
    typed = {"hits": HitTokens(*row["hits"]), "status": TurnStatus(row["status"])}
    return SessionTurn(**known | typed)


_OF_PATHS: Final = ("depth", "path_items", "path_bytes", "first", "last")


def _packed(item: SessionItem) -> list[Any]:
    return [item.item_id, item.response_id, item.is_output, item.to_json()]


def read_item(told: Sequence[Any]) -> SessionItem:
    """Return an item of a field ``p:POSITION``, or of the list of a field ``o:RESPONSE``."""
    return SessionItem(told[0], json.loads(told[3]), told[1], told[2])


def _tiers(hits: HitTokens) -> list[int]:
    return [hits.l1, hits.l2, hits.l3, hits.l4]


def read_step(
    valkey: Client, key: bytes, response_id: str
) -> tuple[Json | None, Json | None, list[SessionItem]]:
    """Return a session, one of its turns, and the turn's items outside conversations."""
    name = to_key(response_id)
    about, row, loose = valkey.hmget(key, "about", b"t:" + name, b"o:" + name)
    return read_json(about), read_json(row), [read_item(one) for one in json.loads(loose or b"[]")]


def turn_ids(valkey: Client, places: SessionKeys, session_id: str) -> list[str]:
    """Return the ids of the turns of a session."""
    names = [of_key(name) for name in valkey.hkeys(places.session(session_id))]
    return [name[2:] for name in names if name.startswith("t:")]


def appended(about: Json, items: Sequence[SessionItem]) -> dict[bytes, str]:
    """Count items into a conversation; return the fields of the items.

    Raises:
        SessionFullError: too many items, or bytes.
    """
    fields: dict[bytes, str] = {}
    for place, item in enumerate(items, start=about["next"]):
        fields[f"p:{place}".encode()] = json.dumps(_packed(item))
        fields[b"i:" + to_key(item.item_id)] = str(place)
    about["next"] += len(items)
    about["items"] += len(items)
    about["size_bytes"] += sum(len(item.to_json()) for item in items)
    check_size(about["items"], about["size_bytes"])
    return fields


def write_session(
    pipe: Client, places: SessionKeys, about: Json, fields: Mapping[bytes, str]
) -> None:
    """Queue the writes of a session that was seen now."""
    name, key = to_key(about["session_id"]), places.session(about["session_id"])
    pipe.hset(key, mapping={b"about": json.dumps(about), **fields})
    pipe.zadd(places.seen, {name: about["seen_s"]})
    if about["ttl_s"]:
        pipe.pexpire(key, max(1, round(1_000 * about["ttl_s"])))
        pipe.zadd(places.until, {name: about["seen_s"] + about["ttl_s"]})
    else:
        pipe.persist(key)
        pipe.zrem(places.until, name)


def erase_session(pipe: Client, places: SessionKeys, session_id: str, turns: Iterable[str]) -> None:
    """Queue the removal of a session."""
    pipe.delete(places.session(session_id))
    pipe.zrem(places.seen, to_key(session_id))
    pipe.zrem(places.until, to_key(session_id))
    for response_id in turns:
        drop_turn(pipe, places, session_id, response_id)


def drop_turn(pipe: Client, places: SessionKeys, session_id: str, response_id: str) -> None:
    """Queue the removal of a turn from the lists of the tenant."""
    pipe.hdel(places.turns, to_key(response_id))
    pipe.zrem(places.made, to_key(f"{response_id} {session_id}"))


def put_turn(
    pipe: Client,
    places: SessionKeys,
    turn: SessionTurn,
    items: Sequence[SessionItem],
    *,
    owner: str,
    opened: bool,
) -> SessionTurn | None:
    """Make a turn or replace an open one; see SessionStore."""
    key, name = places.session(turn.session_id), to_key(turn.response_id)
    about, known, _ = read_step(pipe, key, turn.response_id)
    holder, _ = json.loads(pipe.hget(key, "owner") or FREE)
    if known is not None and not TurnStatus(known["status"]).is_open:
        return read_turn(known)
    answered, now_s = turn.status.is_answered, turn.ended_s or turn.created_s
    if about is None or not is_live(about, now_s) or (opened and known is None):
        return None
    path = _path_of(pipe, places, turn)
    if path is None or (answered and owner and holder != owner):
        return None
    size, fields = sum(len(item.to_json()) for item in items), {}
    stored = replace(turn, number=about["turns"] + 1)
    row = asdict(stored) | {"hits": _tiers(turn.hits), "first": 0, "last": 0} | path
    row |= {"path_items": path["path_items"] + len(items), "path_bytes": path["path_bytes"] + size}
    if about["is_list"] and answered:
        row["first"] = about["next"]
        fields = appended(about, items)
        row["last"] = about["next"] - 1
    else:
        before = (about["items"], about["size_bytes"])
        if not about["is_list"]:
            before = (path["path_items"], path["path_bytes"])
            about["items"] += len(items) if answered else 0
            about["size_bytes"] += size if answered else 0
        check_size(before[0] + len(items), before[1] + size)
        fields = {b"o:" + name: json.dumps([_packed(item) for item in items])}
    if answered:
        _count_in(about, turn)
    about["kept_turns"] += known is None
    about["seen_s"] = now_s
    pipe.multi()
    pipe.hdel(key, b"o:" + name)
    if answered and holder == owner:
        pipe.hdel(key, "owner")
    write_session(pipe, places, about, {**fields, b"t:" + name: json.dumps(row)})
    pipe.hset(places.turns, name, to_key(turn.session_id))
    pipe.zadd(places.made, {to_key(f"{turn.response_id} {turn.session_id}"): turn.created_s})
    return stored


def _count_in(about: Json, turn: SessionTurn) -> None:
    about["turns"] += 1
    about["model"] = turn.model
    about["input_tokens"] += turn.input_tokens
    about["cached_tokens"] += turn.hits.total
    about["output_tokens"] += turn.output_tokens
    about["hits"] = _tiers(turn.hits)
    about["prompt_tokens"] = turn.input_tokens


def _path_of(pipe: Client, places: SessionKeys, turn: SessionTurn) -> Json | None:
    """Return the depth of a turn, and the items and bytes before; None: the parent is gone."""
    if not turn.parent:
        return {"depth": 0, "path_items": 0, "path_bytes": 0}
    session_id = pipe.hget(places.turns, to_key(turn.parent))
    if session_id is None:
        return None
    key = places.session(of_key(session_id))
    pipe.watch(key)
    _, row, _ = read_step(pipe, key, turn.parent)
    if row is None:
        return None
    return {
        "depth": row["depth"] + 1,
        "path_items": row["path_items"],
        "path_bytes": row["path_bytes"],
    }
