"""One relayed session: bytes pass in both directions until a message needs attention.

Passing bytes needs no task and no copy of a message: the callback of each leg passes each chunk to
the opposite leg and counts the frames. For a message in need of attention, an ``Attendant`` takes
over as a task, after PostgreSQL has answered all earlier messages. An error about an unknown
function gets a hint here if the name resembles an AI function.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final, Protocol

from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.replies import error_fields
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.conversation import ClientFrames, Conversation
from tierkv.dbfront.postgres.wire.endpoint import HIGH_WATER_BYTES, Endpoint
from tierkv.dbfront.postgres.wire.login import LoggedIn
from tierkv.kvcore.errors import LocalProtocolError, NodeLostError, TierKVError
from tierkv.sql.calls.functions import AI_FUNCTIONS, PROMPT_TEMPLATE
from tierkv.sql.text.suggest import ai_function_hint

_NAME: Final = re.compile(rb"\b(ai_\w+)\(")
_STATE: Final = b"C42883\0"
_NOT_SEEN: Final = (
    "AI calls are answered in the client's own statement of at most 16 MiB; write them without a "
    "schema."
)


def hinted(data: bytes) -> bytes:
    """Add a hint with the probable function name to an error at the start of PostgreSQL's bytes."""
    if data[:1] != b"E" or _STATE not in data[:256]:
        return data
    end = 1 + int.from_bytes(data[1:5], "big")
    name = _NAME.search(data[:end])
    hint = None if end > len(data) or name is None else _hint(name[1].decode("ascii", "replace"))
    if hint is None:
        return data
    values = messages.fields(data[:end]) | {"H": hint.encode()}
    return messages.with_fields(b"E", values) + data[end:]


def _hint(name: str) -> str | None:
    if name in AI_FUNCTIONS or name == PROMPT_TEMPLATE:
        return _NOT_SEEN
    return ai_function_hint(name, [*AI_FUNCTIONS, PROMPT_TEMPLATE]) or None


_LOG = logging.getLogger(__name__)
_HELD: Final = "held"


class Attendant(Protocol):
    """Handles the messages that matter.

    1. ``matters`` is called for each statement while bytes pass, and must be quick.
    2. ``attend`` gets the first relevant message, and reads and writes the relay until the
       connection is between two batches again. No bytes pass meanwhile.
    3. ``cancel`` stops the current wait of ``attend`` unless PostgreSQL is working, and returns
       True if a wait was stopped.
    4. ``ended`` is called once, when the session is over.
    5. ``names_matter`` is True if messages with names of statements or portals matter too.
    """

    @property
    def names_matter(self) -> bool: ...

    def matters(self, message: bytes) -> bool: ...

    async def attend(self, message: bytes) -> None: ...

    def cancel(self) -> bool: ...

    def ended(self) -> None: ...


class BackendLostError(ConnectionError):
    """PostgreSQL closed the connection."""


class Relay:
    """A client's session with PostgreSQL.

    Attributes:
        login: user, parameters and connection of the session.
        books: counts unanswered messages in both directions.
        client, backend: the two legs.
    """

    def __init__(self, client: Endpoint, login: LoggedIn) -> None:
        self.login = login
        self.client = client
        self.backend = login.backend
        self.books = Conversation()
        self.books.parameters.update(login.parameters)
        self._attendant: Attendant | None = None
        self._frames = ClientFrames(self.books, lambda message: False)
        self._work: asyncio.Task[None] | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener: Callable[[bytes], None] | None = None
        self._news: asyncio.Future[None] | None = None
        self._leaving: TierKVError | None = None

    def use(self, attendant: Attendant) -> None:
        """Set the attendant for the messages that matter."""
        self._attendant = attendant
        self._frames = ClientFrames(self.books, attendant.matters)

    async def serve(self) -> None:
        """Relay until one side leaves; close both legs at the end."""
        client, backend = self.client, self.backend
        client.other, backend.other = backend, client
        client.on_data, backend.on_data = self._from_client, self._from_server
        client.on_close, backend.on_close = self._client_left, self._backend_left
        try:
            if behind := self.login.behind + backend.take_unread():
                self._from_server(behind)
            if early := self.login.leftover + client.take_unread():
                self._from_client(early)
            if client.closed:
                self._client_left()
            if backend.closed:
                self._backend_left()
            await self._done
        finally:
            await self._end()

    async def _end(self) -> None:
        if self._attendant is not None:
            self._attendant.ended()
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait([self._work])
        # A connection closed without Terminate would leave a log entry in PostgreSQL.
        self.backend.write(messages.TERMINATE)
        await self.backend.finish()

    def leave(self, error: TierKVError) -> None:
        """End the session with ``error`` as soon as no statement and no transaction is open."""
        self._leaving = error
        self._leave_at_rest()

    def _leave_at_rest(self) -> None:
        books = self.books
        if self._leaving is None or self._work is not None or self._listener is not None:
            return
        if books.settled and not books.in_batch and books.status == "I":
            self.stop(self._leaving)

    def stop(self, error: TierKVError) -> None:
        """End the session with a FATAL error."""
        if not self._done.done():
            if self._listener is None and self.books.between_frames:
                self.tell(error, fatal=True)
            self._done.set_result(None)

    def tell(self, error: BaseException, *, fatal: bool = False) -> None:
        """Send an error to the client."""
        self.client.write(replies.error_response(error_fields(error, fatal=fatal)))

    def cancel(self) -> bool:
        """Stop the session's current wait; return False if only PostgreSQL can stop it."""
        return self._attendant is not None and self._work is not None and self._attendant.cancel()

    def _client_left(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _backend_left(self) -> None:
        if self._listener is not None:
            self._listener(b"")
        elif not self._done.done():
            self._done.set_result(None)
        self._wake()

    def _from_client(self, data: bytes) -> None:
        if self._work is not None:
            self._frames.add(data)
            if self._frames.held > HIGH_WATER_BYTES:
                self.client.hold(_HELD)
            self._wake()
            return
        try:
            cut = self._frames.feed(data)
        except TierKVError as error:
            self.stop(error)
            return
        if cut.passed:
            self.backend.write(cut.passed)
        if cut.message is not None:
            self._take_over(cut.message)

    def _from_server(self, data: bytes) -> None:
        if self._listener is not None:
            self._listener(data)
            return
        self.client.write(hinted(data) if self.books.between_frames else data)
        self.books.server_data(data)
        if self._news is not None:
            self._wake()
        if self._leaving is not None:
            self._leave_at_rest()

    def _take_over(self, message: bytes) -> None:
        work = asyncio.get_running_loop().create_task(self._attend(message))
        self._work = work
        work.add_done_callback(self._attended)

    async def _attend(self, message: bytes) -> None:
        assert self._attendant is not None
        await self._all_answered()
        await self._attendant.attend(message)
        self._frames.names_matter = self._attendant.names_matter

    def _attended(self, work: asyncio.Task[None]) -> None:
        """Continue to pass bytes, or end the session if the work failed."""
        self._work = None
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or self._done.done():
            return
        if error is None:
            self.client.release(_HELD)
            self._from_client(b"")
            self._leave_at_rest()
            return
        if isinstance(error, BackendLostError):
            lost = NodeLostError("PostgreSQL closed the connection unexpectedly")
            self.tell(lost, fatal=True)
        elif not isinstance(error, ConnectionError):
            _LOG.error("relayed session of %s failed", self.client.peer, exc_info=error)
            self.tell(error, fatal=True)
        self._done.set_result(None)

    async def _all_answered(self) -> None:
        """Wait until PostgreSQL has answered everything; the answers go to the client."""
        if self.books.sent > self.books.answered:
            self.backend.write(messages.FLUSH)
        while not self.books.settled:
            await self._anything()

    async def _anything(self) -> None:
        if self.backend.closed:
            raise BackendLostError
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def next_message(self) -> bytes:
        """Return the client's next message to the attendant.

        Raises:
            ConnectionError: the client or PostgreSQL left.
            RemoteProtocolError: the bytes are not a message.
        """
        while (message := self._frames.next_message()) is None:
            self.client.release(_HELD)
            await self._anything()
        return message

    def pass_on(self, message: bytes) -> None:
        """Send a client's message to PostgreSQL; the answer passes to the client by itself."""
        self.books.client_frame(message[0])
        self.backend.write(message)

    async def frame_ended(self) -> None:
        """Wait until the current frame from PostgreSQL, for example a notification, is complete."""
        while not self.books.between_frames:
            await self._anything()

    def listen(self, listener: Callable[[bytes], None] | None) -> None:
        """Pass PostgreSQL's bytes to ``listener``; empty bytes mean a closed connection.

        None removes the listener, which must have consumed whole frames.
        """
        if listener is not None and self._listener is not None:
            raise LocalProtocolError("a listener is already waiting")
        self._listener = listener
        if listener is not None and self.backend.closed:
            listener(b"")
