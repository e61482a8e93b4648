"""Kept conversations with items and turns, and the contract of stores.

A *session* is shared by several turns: a conversation, or a first response with all responses after
the first. Items (messages, function calls, results of functions) are JSON objects of OpenAI's form.
A *turn* is a response, with the items of the question and of the answer.

    conversation    items have positions: one list, to which turns and clients append
    responses       a tree: a turn names a parent, and the history is the path to the root

dbfront/sessions/session_file.py keeps sessions in SQLite; for several fronts there are
dbfront/sessions/session_database.py in PostgreSQL and session_valkey.py in Valkey.
dbfront/sessions/conversations.py is the only caller.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from tierkv.kvcore.errors import SessionStoreError
from tierkv.kvcore.request import HitTokens

log = logging.getLogger("tierkv.sessions")
NO_HITS: Final = HitTokens()


class TurnStatus(StrEnum):
    """Progress of a turn; the first two are open, the rest is final."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Return True if the turn may still be answered."""
        return self in (TurnStatus.QUEUED, TurnStatus.IN_PROGRESS)

    @property
    def is_answered(self) -> bool:
        """Return True if the turn's items belong to the conversation."""
        return self in (TurnStatus.COMPLETED, TurnStatus.INCOMPLETE)


@dataclass(frozen=True, slots=True)
class SessionItem:
    """An item of a conversation.

    Attributes:
        item_id: unique; begins with the kind, for example ``msg_``.
        body: the item in OpenAI's form, without the id.
        response_id: the turn that the item came with; empty: a client added the item.
        is_output: True for what the model answered.
    """

    item_id: str
    body: Mapping[str, Any]
    response_id: str = ""
    is_output: bool = False

    def to_json(self) -> str:
        """Return the body as ASCII text, which any database can store."""
        return json.dumps(self.body, separators=(",", ":"))

    def to_wire(self) -> dict[str, Any]:
        """Return the item as clients see it."""
        return {"id": self.item_id, **self.body}


@dataclass(frozen=True, slots=True)
class ChatSession:
    """A conversation, without its items.

    Attributes:
        tenant: owner of the session; a name means nothing to a different tenant.
        session_id: unique among the tenant's sessions.
        is_list: True for a conversation, False for a tree of responses.
        metadata: the client's own names and values.
        model: model of the last turn; empty before.
        created_s: Unix time.
        seen_s: Unix time of the last turn or change.
        ttl_s: seconds after ``seen_s`` when the session expires; 0.0: never.
        turns: number of answered turns.
        items: number of items.
        size_bytes: JSON of the items.
        input_tokens: tokens of all prompts.
        cached_tokens: those found in the cache.
        output_tokens: tokens of all answers.
        hits: where the cache had the last prompt, in tokens by tier.
        prompt_tokens: tokens of the last prompt.
    """

    tenant: str
    session_id: str
    is_list: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    created_s: float = 0.0
    seen_s: float = 0.0
    ttl_s: float = 0.0
    turns: int = 0
    items: int = 0
    size_bytes: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    hits: HitTokens = NO_HITS
    prompt_tokens: int = 0

    @property
    def expires_s(self) -> float | None:
        """Return the Unix time when the session expires; None: never."""
        return self.seen_s + self.ttl_s if self.ttl_s else None


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One response.

    Attributes:
        response_id: unique among the tenant's responses.
        parent: the response that this one follows; empty: the first, or a turn of a conversation.
        number: position among the session's turns, from 1.
        status: progress.
        body: the response in OpenAI's form, without ``id``, ``status`` and ``output``.
        created_s: Unix time, like all times here.
        ended_s: when the status became final; 0.0 before.
        alive_s: last sign of life of the answering front, for an open turn.
        hits: cached tokens by tier.
    """

    tenant: str
    response_id: str
    session_id: str
    status: TurnStatus
    body: Mapping[str, Any]
    created_s: float
    parent: str = ""
    number: int = 0
    model: str = ""
    ended_s: float = 0.0
    alive_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    hits: HitTokens = NO_HITS


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Which sessions to list, the last used first.

    Attributes:
        tenant: whose; None: of all tenants.
        metadata: names and values that a session must have.
        after: id of the last session of the page before; empty: the first page. Needs a tenant.
        most: number of sessions.
        lists_only: leave trees of responses out.
    """

    tenant: str | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    after: str = ""
    most: int = 20
    lists_only: bool = False


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Which items of a conversation to list.

    Attributes:
        most: number of items; 0: all.
        after: id of the last item of the page before; empty: the first page.
        newest_first: order of the page.
        only: id of the only item to list; empty: any.
    """

    most: int = 0
    after: str = ""
    newest_first: bool = False
    only: str = ""


HISTORY: Final = ItemPage()


class SessionStore(Protocol):
    """Lasting sessions.

    1. A session or turn is found by tenant and id only. After ``seen_s + ttl_s`` neither a session
       nor a turn of the session is found, and ``prune`` deletes the session.
    2. Changes are durable on return, and each method is atomic. Several stores may have the same
       place open, in different processes too.
    3. ``create`` returns False if the tenant has a live session of the id.
    4. ``lock`` takes or extends the right to append turns to a conversation, until ``until_s``. It
       returns False while another owner has it. ``unlock`` gives it back.
    5. ``put_turn`` makes a turn, or replaces an open one (``opened``: only that). With an answered
       status the items join the session, all or none, and the lock is given back. A turn with a
       final status does not change. Returns the stored turn; None: the session is gone, ``owner``
       lost the lock, the parent is gone, or the opened turn was deleted.
       ``sign`` notes a sign of life of an open turn; False: the turn is not open any more.
    6. ``history`` returns the items up to and with a response, oldest first; None: a response on
       the path is unknown, deleted, expired or not answered.
    7. ``delete`` removes a session with items and turns; ``delete_turn`` a turn, and the
       turn's items outside conversations.
    8. SessionFullError: more items or bytes than kcvore/limits.py allows, or too many sessions.
       SessionStoreError: the place can't be used at present.
    9. Methods may be called from any thread, and wait for the disk or the network.
    """

    @property
    def place(self) -> str:
        """Return the name of the place for people, without a password."""
        ...

    def create(self, session: ChatSession, items: Sequence[SessionItem] = ()) -> bool: ...

    def session(self, tenant: str, session_id: str, now_s: float) -> ChatSession | None: ...

    def sessions(self, query: SessionQuery, now_s: float) -> list[ChatSession]: ...

    def change(
        self,
        tenant: str,
        session_id: str,
        now_s: float,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
    ) -> ChatSession | None: ...

    def delete(self, tenant: str, session_id: str) -> bool: ...

    def items(
        self, tenant: str, session_id: str, page: ItemPage = HISTORY
    ) -> list[SessionItem]: ...

    def add_items(
        self, tenant: str, session_id: str, items: Sequence[SessionItem], now_s: float
    ) -> bool: ...

    def delete_item(self, tenant: str, session_id: str, item_id: str) -> bool: ...

    def lock(
        self, tenant: str, session_id: str, owner: str, *, now_s: float, until_s: float
    ) -> bool: ...

    def unlock(self, tenant: str, session_id: str, owner: str) -> None: ...

    def put_turn(
        self,
        turn: SessionTurn,
        items: Sequence[SessionItem],
        *,
        owner: str = "",
        opened: bool = False,
    ) -> SessionTurn | None: ...

    def sign(self, tenant: str, response_id: str, now_s: float) -> bool: ...

    def turn(self, tenant: str, response_id: str, now_s: float) -> SessionTurn | None: ...

    def turns(self, tenant: str | None, most: int, now_s: float) -> list[SessionTurn]: ...

    def turn_items(self, tenant: str, response_id: str) -> list[SessionItem]: ...

    def history(self, tenant: str, response_id: str, now_s: float) -> list[SessionItem] | None: ...

    def delete_turn(self, tenant: str, response_id: str) -> bool: ...

    def prune(self, now_s: float) -> int: ...

    def close(self) -> None: ...


def store_lost(place: str, reason: object, cure: str) -> SessionStoreError:
    """Log why a store can't be used; return the error for clients, without place and reason.

    Args:
        place: of the store.
        reason: what happened.
        cure: what an administrator can do.
    """
    log.warning("conversations in %s can't be read or written: %s. %s", place, reason, cure)
    return SessionStoreError(
        "conversations can't be read or written at present",
        hint="Try again later; the log of the front has the reason.",
    )
