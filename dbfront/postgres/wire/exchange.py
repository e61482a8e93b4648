"""Sends messages to PostgreSQL and collects the answers, while no bytes pass by themselves.

The attendant uses an Exchange for two purposes: the relay's own statements, whose answers no client
sees, and the client's messages, whose answers are kept until known to be final.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import IO, Final

from tierkv.dbfront.postgres.relay import BackendLostError, Relay
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.conversation import LENGTH
from tierkv.kvcore import limits

MISS_STATE: Final = b"\0CTKV01\0"
"""SQLSTATE with which tierkv.ai_call reports a question without an answer."""

_RESET_STATE: Final = b"\0CTKV02\0"
_IN_MEMORY_BYTES: Final = 8 << 20
_MOST_MISSES_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 1 << 20
_DATA_ROW: Final = ord("D")
_ROWS: Final = frozenset(b"Dd")
_AT_ONCE: Final = frozenset(b"AS")
"""Notifications and changed settings, which are not part of a result."""


OnReset = Callable[[str | None], Awaitable[object]]


class Output:
    """Frames for the client, first in memory and then in an unnamed temporary file."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._file: IO[bytes] | None = None
        self._discarded = False

    def add(self, data: bytes) -> None:
        """Add frames."""
        if self._discarded:
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _IN_MEMORY_BYTES:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the output
            self._file.write(b"".join(self._pieces))
            self._pieces.clear()
            self._size = 0

    def discard(self) -> None:
        """Drop all frames, present and future."""
        self._discarded = True
        self.close()

    def close(self) -> None:
        """Free the memory and the file."""
        self._pieces.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def pieces(self) -> Iterator[bytes]:
        """Yield the frames, in order and in pieces of any size."""
        if self._file is not None:
            self._file.seek(0)
            while piece := self._file.read(_CHUNK_BYTES):
                yield piece
        yield b"".join(self._pieces)


class ServerReply:
    """The answer of PostgreSQL.

    Attributes:
        output: frames for the client; without ReadyForQuery, errors, misses and ``complete``.
        error: an ErrorResponse frame, if one arrived.
        complete: the CommandComplete frame, if one arrived.
        rows: number of DataRow frames that arrived.
        misses: misses reported by tierkv.ai_call, each once: form and hexadecimal question. Misses
            beyond the limit are reported again in the next round.
        resets: groups reported by tierkv.stat_reset; None for all.
    """

    def __init__(self, *, keep_with_misses: bool = False) -> None:
        self.output = Output()
        self.error: bytes | None = None
        self.complete = b""
        self.rows = 0
        self.misses: dict[bytes, None] = {}
        self.resets: list[str | None] = []
        self._keep_with_misses = keep_with_misses
        self._room_for_misses = _MOST_MISSES_BYTES

    @property
    def tag(self) -> bytes:
        """Return the command tag, for example ``INSERT 0 3``."""
        return self.complete[5:-1]

    def first_row(self) -> list[bytes | None]:
        """Parse the only row of a small result."""
        data = b"".join(self.output.pieces())
        at = 0
        while data[at] != _DATA_ROW:
            at += 1 + LENGTH(data, at + 1)[0]
        return messages.row_values(data[at:])

    def all_rows(self) -> Iterator[list[bytes | None]]:
        """Parse the rows of a small result."""
        data = b"".join(self.output.pieces())
        at = 0
        while at < len(data):
            following = at + 1 + LENGTH(data, at + 1)[0]
            if data[at] == _DATA_ROW:
                yield messages.row_values(data[at:following])
            at = following

    def says(self, sqlstate: str) -> bool:
        """Return True if a small result contains a notice with the SQLSTATE."""
        return f"\0C{sqlstate}\0".encode() in b"".join(self.output.pieces())

    def add_rows(self, data: bytes, count: int) -> None:
        """Add consecutive DataRow or CopyData frames."""
        self.rows += count
        self.output.add(data)

    def _add_miss(self, frame: bytes) -> None:
        at = frame.find(b"\0D")
        detail = frame[at + 2 : frame.index(b"\0", at + 2)] if at >= 0 else b""
        for miss in detail.splitlines() or [b""]:  # A user's function may say nothing.
            full = self._room_for_misses <= 0 or len(self.misses) > limits.MAX_CALLS_PER_STATEMENT
            if miss not in self.misses and not full:
                self._room_for_misses -= len(miss)
                self.misses[miss] = None

    def _add_reset(self, frame: bytes) -> None:
        what = messages.fields(frame).get("D", b"").decode("utf-8", "replace").strip()
        self.resets.append(what or None)

    def add_frame(self, frame: bytes) -> None:
        """Add any other frame."""
        kind = frame[:1]
        if kind == b"N" and MISS_STATE in frame[:64]:
            self._add_miss(frame)
            if not self._keep_with_misses:
                self.output.discard()
        elif kind == b"N" and _RESET_STATE in frame[:64]:
            self._add_reset(frame)
        elif kind == b"E":
            self.error = frame
        elif kind != b"Z":
            if kind == b"C":
                self.complete = frame
            else:
                self.output.add(frame)


class RelayExchange:
    """One relayed session, as used by the attendant."""

    def __init__(self, relay: Relay, on_reset: OnReset | None = None) -> None:
        self._relay = relay
        self._books = relay.books
        self._on_reset = on_reset

    @property
    def status(self) -> str:
        """Return the transaction state at the last ReadyForQuery."""
        return self._books.status

    async def own(self, *statements: bytes, sync: bool) -> ServerReply:
        """Run statements of the relay itself; no client sees the answers.

        Args:
            statements: made by ``messages.own_statement``.
            sync: end the batch, which commits outside a transaction block. Never between messages
                of a client's batch.
        """
        return await self.ask(b"".join(statements), sync=sync)

    async def ask(
        self, data: bytes, *, sync: bool | None = None, keep_with_misses: bool = False
    ) -> ServerReply:
        """Send whole messages and collect the whole answer.

        Args:
            data: the messages.
            sync: True adds a Sync, False a Flush; None adds nothing.
            keep_with_misses: keep rows although answers were missing.

        Raises:
            BackendLostError: PostgreSQL closed the connection without an error message.
            ConnectionResetError: PostgreSQL closed the connection; its last error went to the
                client.
        """
        reply = ServerReply(keep_with_misses=keep_with_misses)
        await self._relay.frame_ended()
        gathering = _Gathering(self._relay, reply)
        if sync is not None:
            data += messages.SYNC if sync else messages.FLUSH
        for kind in _kinds(data):
            self._books.client_frame(kind)
        self._relay.listen(gathering.feed)
        try:
            self._relay.backend.write(data)
            if not self._books.settled:
                await gathering.done
        except BaseException:
            reply.output.close()
            raise
        finally:
            self._relay.listen(None)
        for what in reply.resets if self._on_reset and reply.error is None else ():
            assert self._on_reset is not None
            await self._on_reset(what)
        return reply

    async def deliver(self, reply: ServerReply, *, error: bytes | None = None) -> None:
        """Send a result to the client, as fast as the client reads.

        Args:
            reply: the result; its frames are used up.
            error: an ErrorResponse for the end, in place of CommandComplete.
        """
        await self.send(reply.output.pieces())
        reply.output.close()
        await self.send([error or reply.complete])

    async def send(self, pieces: Iterable[bytes]) -> None:
        """Send frames to the client, as fast as the client reads."""
        for piece in pieces:
            self._relay.client.write(piece)
            await self._relay.client.drain()


class _Gathering:
    """Splits received bytes into frames for a reply, until all messages are answered."""

    def __init__(self, relay: Relay, reply: ServerReply) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._relay = relay
        self._reply = reply
        self._kept: list[bytes] = []
        self._missing = 0

    def feed(self, data: bytes) -> None:
        """Add bytes from PostgreSQL."""
        if not data:
            self._lost()
            return
        self._relay.books.server_data(data)
        self._kept.append(data)
        if len(data) < self._missing:
            self._missing -= len(data)
            return
        whole = b"".join(self._kept) if len(self._kept) > 1 else data
        used = self._frames(whole)
        self._kept = [whole[used:]] if used < len(whole) else []
        if self._relay.books.settled and not self.done.done():
            self.done.set_result(None)

    def _frames(self, data: bytes) -> int:
        at = run = rows = 0
        end = len(data)
        self._missing = 0
        while at + 5 <= end:
            following = at + 1 + LENGTH(data, at + 1)[0]
            if following > end:
                self._missing = following - end
                break
            if data[at] in _ROWS:
                rows += 1
            else:
                if run < at:
                    self._reply.add_rows(data[run:at], rows)
                    rows = 0
                self._frame(data[at:following])
                run = following
            at = following
        if run < at:
            self._reply.add_rows(data[run:at], rows)
        return at

    def _frame(self, frame: bytes) -> None:
        if frame[0] in _AT_ONCE:
            self._relay.client.write(frame)
        else:
            self._reply.add_frame(frame)

    def _lost(self) -> None:
        """Handle the loss of PostgreSQL; its last error, if any, goes to the client."""
        if self.done.done():
            return
        last_words = self._reply.error
        if last_words is not None:
            self._relay.client.write(last_words)
            self.done.set_exception(ConnectionResetError("told by PostgreSQL itself"))
        else:
            self.done.set_exception(BackendLostError())


def _kinds(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        yield data[at]
        at += 1 + LENGTH(data, at + 1)[0]
