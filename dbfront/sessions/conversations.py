"""Conversations for the front's doors: the store without waiting, and turns in order.

REST (dbfront/http/responses) and ``ai_chat`` (dbfront/sessions/chat.py) share an object. Turns of
a conversation never overlap, in this front or between fronts:

    in this process   an asyncio lock per conversation, first come first served
    between fronts    a lock in the store, with a time limit, which the owner extends

A front killed in a turn therefore delays the conversation for at most ``LOCK_S``; the turn left
nothing behind, and the client sends the message again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from tierkv.dbfront.contracts import Message
from tierkv.dbfront.sessions.items import new_id, to_messages
from tierkv.dbfront.sessions.session_store import (
    ChatSession,
    SessionItem,
    SessionStore,
)
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import SessionBusyError, SessionStoreError, UnknownSessionError

log = logging.getLogger("tierkv.sessions")
P = ParamSpec("P")
T = TypeVar("T")

LOCK_S: Final = 15.0
"""Seconds that a conversation stays locked if its front is killed."""
_EXTEND_S: Final = 4.0
TURN_WAIT_S: Final = 60.0
"""Longest wait for earlier turns of the same conversation."""
_LOOK_S: Final = 0.05
_LOOK_MOST_S: Final = 0.5
_PRUNE_S: Final = 600.0


def unknown(what: str, name: str) -> UnknownSessionError:
    """Return the error about a name unknown to the tenant."""
    return UnknownSessionError(
        f"{what} with id {name[:140]!r} not found", hint="It may have expired or been deleted."
    )


class Conversations:
    """The conversations of one front process.

    Attributes:
        store: where sessions are kept; its methods are called through ``run``.
        clock: source of times.
        ttl_s: time to live of new sessions, after the last turn; 0.0: forever.
    """

    def __init__(self, store: SessionStore, clock: Clock, *, ttl_s: float = 0.0) -> None:
        self.store = store
        self.clock = clock
        self.ttl_s = ttl_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        self._queues: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._pruner: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Delete expired sessions from now on, every few minutes."""
        self._pruner = asyncio.create_task(self._prune(), name="sessions")

    async def stop(self) -> None:
        """Close the store; stopping again does nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self._pruner is not None:
            self._pruner.cancel()
            await asyncio.gather(self._pruner, return_exceptions=True)
            self._pruner = None
        await self.run(self.store.close)
        self._threads.shutdown()

    async def run(self, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Call a method of the store in the store's thread.

        A call in progress ends, also when the caller is cancelled.

        Raises:
            SessionStoreError: the store can't be used.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*given, **named))

    async def session(self, tenant: str, session_id: str) -> ChatSession:
        """Return a session.

        Raises:
            UnknownSessionError: the tenant has none of this name.
        """
        found = await self.run(self.store.session, tenant, session_id, self.clock.wall())
        if found is None:
            raise unknown("Conversation", session_id)
        return found

    async def kept(self, tenant: str, name: str) -> tuple[tuple[Message, ...], str]:
        """Return the messages of a conversation, or up to a response, and the model.

        Raises:
            UnknownSessionError: the tenant has none of this id.
        """
        now_s = self.clock.wall()
        items = await self.run(self.store.history, tenant, name, now_s)
        if items is not None:
            turn = await self.run(self.store.turn, tenant, name, now_s)
            return tuple(to_messages(items)), "" if turn is None else turn.model
        session = await self.run(self.store.session, tenant, name, now_s)
        if session is None or not session.is_list:
            raise unknown("Conversation", name)
        items = await self.run(self.store.items, tenant, name)
        return tuple(to_messages(items)), session.model

    async def create(
        self,
        tenant: str,
        *,
        session_id: str = "",
        is_list: bool = True,
        metadata: Mapping[str, str] | None = None,
        items: Sequence[SessionItem] = (),
        ttl_s: float | None = None,
    ) -> ChatSession:
        """Make a session, or return the session of the given name.

        Args:
            tenant: the owner.
            session_id: name of the session; empty: a new one.
            is_list: see ChatSession.
            metadata: the client's names and values.
            items: first items of a conversation.
            ttl_s: time to live; None: that of the front.

        Raises:
            SessionFullError: too many items, or too many sessions.
        """
        now_s = self.clock.wall()
        made = ChatSession(
            tenant,
            session_id or new_id("conv" if is_list else "sess"),
            is_list=is_list,
            metadata=metadata or {},
            created_s=now_s,
            seen_s=now_s,
            ttl_s=self.ttl_s if ttl_s is None else ttl_s,
        )
        await self.run(self.store.create, made, items)
        return await self.session(tenant, made.session_id)

    @asynccontextmanager
    async def turn_of(self, tenant: str, session_id: str) -> AsyncIterator[str]:
        """Wait for earlier turns of a conversation, and hold up later turns.

        Yields:
            the owner to give to ``store.put_turn``.

        Raises:
            UnknownSessionError: there is no such conversation.
            SessionBusyError: earlier turns took longer than ``TURN_WAIT_S``.
        """
        queue = self._queues.setdefault((tenant, session_id), asyncio.Lock())
        owner = secrets.token_hex(8)
        held = False
        try:
            try:
                async with asyncio.timeout(TURN_WAIT_S):
                    held = await queue.acquire()
                    await self._take(tenant, session_id, owner)
            except TimeoutError:
                raise SessionBusyError(
                    f"another turn of conversation {session_id!r} is still running",
                    hint="Send the turn again when the other one has ended.",
                ) from None
            keeper = asyncio.create_task(self._keep(tenant, session_id, owner))
            try:
                yield owner
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                with suppress(SessionStoreError):  # The lock then ends by its time.
                    await self.run(self.store.unlock, tenant, session_id, owner)
        finally:
            if held:
                queue.release()

    async def _take(self, tenant: str, session_id: str, owner: str) -> None:
        pause_s = _LOOK_S
        while not await self._lock(tenant, session_id, owner):
            await self.session(tenant, session_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MOST_S)

    async def _lock(self, tenant: str, session_id: str, owner: str) -> bool:
        now_s = self.clock.wall()
        until_s = now_s + LOCK_S
        return await self.run(
            self.store.lock, tenant, session_id, owner, now_s=now_s, until_s=until_s
        )

    async def _keep(self, tenant: str, session_id: str, owner: str) -> None:
        """Extend a lock; a lost lock is noticed when the turn is stored."""
        while True:
            await asyncio.sleep(_EXTEND_S)
            try:
                if not await self._lock(tenant, session_id, owner):
                    return
            except SessionStoreError as error:
                log.warning("a conversation's lock was not extended: %s", error)

    async def _prune(self) -> None:
        while True:
            try:
                if deleted := await self.run(self.store.prune, self.clock.wall()):
                    log.info("%d expired conversations were deleted", deleted)
            except SessionStoreError as error:
                log.warning("expired conversations stay: %s", error)
            await asyncio.sleep(_PRUNE_S)
