"""One relayed session: bytes pass in both directions, until a message must be looked at.

While bytes pass, there is no task and no copy of a message: the callback of each leg gives its
chunk to the other leg and counts the frames. For a message that matters, an ``Attendant`` takes
over as a task, once PostgreSQL has answered everything before that message. An error about an
unknown function gets a hint here if its name looks like an AI function.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final, Protocol

from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.errors import error_fields
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
    """Give an error at the start of what PostgreSQL sent the name that was probably meant."""
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
    """Who looks at messages that matter.

    1. ``matters`` is asked for each statement, in the middle of passing bytes; it must be quick.
    2. ``attend`` is given the first such message, and reads and writes the relay until the
       connection is between two batches again. No bytes pass meanwhile.
    3. ``cancel`` stops what ``attend`` waits for, if that is not PostgreSQL; it answers whether it
       was.
    4. ``ended`` is called once, when the session is over.
    5. ``names_matter`` says whether messages that name statements or portals matter too.
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
        login: who it is.
        books: who owes whom an answer.
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

    def use(self, attendant: Attendant) -> None:
        """Have messages that matter looked at."""
        self._attendant = attendant
        self._frames = ClientFrames(self.books, attendant.matters)

    async def serve(self) -> None:
        """Relay until one side leaves; both legs are closed then."""
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
        # Cut short, PostgreSQL would note a lost client in its log.
        self.backend.write(messages.TERMINATE)
        await self.backend.finish()

    def stop(self, error: TierKVError) -> None:
        """End the session with a FATAL error."""
        if not self._done.done():
            if self._listener is None and self.books.between_frames:
                self.tell(error, fatal=True)
            self._done.set_result(None)

    def tell(self, error: BaseException, *, fatal: bool = False) -> None:
        """Send the client an error."""
        self.client.write(replies.error_response(error_fields(error, fatal=fatal)))

    def cancel(self) -> bool:
        """Stop what the session waits for; False where only PostgreSQL can."""
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
        """Go on passing bytes, or end the session where the work failed."""
        self._work = None
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or self._done.done():
            return
        if error is None:
            self.client.release(_HELD)
            self._from_client(b"")
            return
        if isinstance(error, BackendLostError):
            lost = NodeLostError("PostgreSQL closed the connection unexpectedly")
            self.tell(lost, fatal=True)
        elif not isinstance(error, ConnectionError):
            _LOG.error("relayed session of %s failed", self.client.peer, exc_info=error)
            self.tell(error, fatal=True)
        self._done.set_result(None)

    async def _all_answered(self) -> None:
        """Wait until PostgreSQL owes nothing; what it says goes to the client."""
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
        """Give the attendant the client's next message.

        Raises:
            ConnectionError: the client or PostgreSQL left.
            RemoteProtocolError: it is no message.
        """
        while (message := self._frames.next_message()) is None:
            self.client.release(_HELD)
            await self._anything()
        return message

    def pass_on(self, message: bytes) -> None:
        """Let PostgreSQL have a client's message; its answer passes by itself."""
        self.books.client_frame(message[0])
        self.backend.write(message)

    async def frame_ended(self) -> None:
        """Wait until nothing of a passing notification is still to come."""
        while not self.books.between_frames:
            await self._anything()

    def listen(self, listener: Callable[[bytes], None] | None) -> None:
        """Hand what PostgreSQL sends to ``listener``; empty bytes: it closed the connection.

        None ends that; the listener must have used up whole frames.
        """
        if listener is not None and self._listener is not None:
            raise LocalProtocolError("somebody listens already")
        self._listener = listener
        if listener is not None and self.backend.closed:
            listener(b"")
