"""One client connection of a DMP node: frames in, node calls, frames out.

Run in a thread per connection by dmp/server/server.py, over a connected Wire. Requests may be
pipelined; replies keep the order of the requests. A refused request gets an ERROR frame, its
payload is skipped, and the connection stays usable. A peer that breaks the frame rules gets an
ERROR frame and is dropped. The reservations and holds of a dead client are freed when its last
connection closes. Bytes move straight between the socket and pinned slots, in the order of
dmp/node/turns.py; for a slow reader the node keeps only pins in memory, and the number of pinned
bytes is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.node.turn_order import TransferKind, Turn
from tierkv.dmp.server.rdma_door import RdmaGuest
from tierkv.dmp.slots.accounts import EVERYONE
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import (
    FrameHeader,
    FrameReader,
    FrameType,
    is_ahead,
    is_moving,
    pack_header,
)
from tierkv.dmp.wire.range_codec import Ref, pack_stored, pack_sums, unpack_ranges, unpack_sums
from tierkv.dmp.wire.socket_io import Wire, discard
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import (
    AuthenticationError,
    CacheError,
    RemoteProtocolError,
    ThrottledError,
    TierKVError,
    TransportError,
)
from tierkv.kvwire.credentials import accepts

log = logging.getLogger(__name__)
LEAVE_TIMEOUT_S: Final = 0.2
PIECE_BYTES: Final = 1 << 20
"""Once namespaces have limits, a reply has a turn for each piece, so that others wait less."""
_NO_HEADER: Final = FrameHeader(FrameType.ERROR, 0, 0, 0)
MAX_LEAVE_BYTES: Final = 1 << 20


class Clients:
    """Connections per client id; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: Counter[str] = Counter()

    def joined(self, client_id: str) -> None:
        """Count a new connection of a client."""
        with self._lock:
            self._connections[client_id] += 1

    def left(self, client_id: str, free: Callable[[str], None]) -> None:
        """Count a closed connection; after the client's last connection, call ``free``.

        The client may be connecting again; the lock makes ``joined`` wait until ``free`` has
        returned.
        """
        with self._lock:
            self._connections[client_id] -= 1
            if not self._connections[client_id]:
                del self._connections[client_id]
                free(client_id)


def pieces(views: Sequence[memoryview], most: int) -> Iterator[list[memoryview]]:
    """Cut buffers into pieces of ``most`` bytes together; the last may be shorter."""
    piece: list[memoryview] = []
    room = most
    for view in views:
        rest = view
        while len(rest) >= room:
            yield [*piece, rest[:room]]
            rest, piece, room = rest[room:], [], most
        if len(rest):
            piece.append(rest)
            room -= len(rest)
    if piece:
        yield piece


class _ByteFrames:
    """Handlers of one connection."""

    def __init__(self, wire: Wire, reader: FrameReader, node: DmpNode) -> None:
        self._wire = wire
        self._reader = reader
        self._node = node
        self._slow = False

    def _begin(self, account: int, kind: TransferKind, size: int, *, charges: bool = True) -> Turn:
        """Wait for the turn to move bytes; a slow peer takes no place."""
        turn = Turn(account, kind, size, counts=not self._slow, charges=charges)
        if size > PIECE_BYTES and not kind.writes and self._node.turns.has_shares:
            turn.piece = PIECE_BYTES
        self._node.turns.take(turn, timeout_s=self._wire.timeout_s)
        return turn

    def _end(self, turn: Turn) -> None:
        self._slow = self._node.turns.end(turn)

    def read(self, header: FrameHeader, refs: Sequence[Ref]) -> None:
        """Send ranges straight from their slots."""
        total = sum([ref[5] for ref in refs])
        if total > limits.MAX_FRAME_BYTES:
            raise RemoteProtocolError("more is asked for than fits a frame")
        kind = TransferKind.AHEAD if is_ahead(header.request_id) else TransferKind.READ
        if is_moving(header.request_id):
            kind = TransferKind.MOVE_OUT
        turn = self._begin(self._node.gets.account_of(refs[0]), kind, total)
        try:
            ticket = self._node.gets.begin_read(refs)
            try:
                lead = pack_header(
                    FrameType.REPLY,
                    header.request_id,
                    head_bytes=8 * len(refs),
                    payload_bytes=total,
                )
                self._send(turn, lead + pack_sums(ticket.checksums), ticket.views)
            finally:
                self._node.gets.end_read(ticket)
        finally:
            self._end(turn)

    def _send(self, turn: Turn, lead: bytes, views: Sequence[memoryview]) -> None:
        """Send a reply, with a turn for each piece.

        Raises:
            OSError: also if no turn came in time, because a part of the reply has been sent.
        """
        if turn.piece == turn.size:
            self._wire.send([lead, *views])
            return
        for number, piece in enumerate(pieces(views, PIECE_BYTES)):
            if number == 0:
                self._wire.send([lead, *piece])
                continue
            try:
                size = sum(map(len, piece))
                self._node.turns.go_on(turn, size, timeout_s=self._wire.timeout_s)
            except TransportError as error:
                raise TimeoutError(error.message) from error
            self._wire.send(piece)

    def write(self, header: FrameHeader, head: bytearray) -> bytes:
        """Receive ranges straight into their slots."""
        refs = unpack_ranges(head)
        if sum([ref[5] for ref in refs]) != header.payload_bytes:
            raise RemoteProtocolError("a WRITE frame's payload is as long as its ranges")
        account = self._node.gets.account_of(refs[0])
        # The bytes were charged when the slots were reserved.
        turn = self._begin(account, _write_kind(header), header.payload_bytes, charges=False)
        try:
            ticket = self._node.puts.begin_write(refs)
            try:
                self._reader.take(ticket.views)
            finally:
                self._node.puts.end_write(ticket)
        finally:
            self._end(turn)
        return b""

    def put(self, header: FrameHeader, head: bytearray) -> bytes:
        """Reserve, receive and seal whole blocks; the reply has None for blocks without a slot."""
        ask = m.Put.unpack(head)
        if ask.data_bytes + ask.sums_bytes != header.payload_bytes:
            raise RemoteProtocolError("a PUT frame's payload is as long as its blocks")
        account = self._node.puts.account_of(ask.puts[0]) if ask.puts else EVERYONE
        try:
            turn = self._begin(account, _write_kind(header), ask.data_bytes)
        except ThrottledError:
            self._reader.skip()
            return m.MaybeRefs([None] * len(ask.puts)).pack()
        try:
            return self._store(ask)
        finally:
            self._end(turn)

    def _store(self, ask: m.Put) -> bytes:
        ticket = self._node.puts.begin_put(ask.puts)
        try:
            sums = bytearray(ask.sums_bytes)
            self._receive_blocks(ask.puts, ticket.views, memoryview(sums))
        except BaseException:
            self._node.puts.abort_put(ticket)
            raise
        places = self._node.puts.end_put(ticket, _checksums(ask.puts, sums))
        return m.MaybeRefs(places).pack()

    def _receive_blocks(
        self, puts: Sequence[BlockSpec], views: Sequence[memoryview | None], sums: memoryview
    ) -> None:
        """Receive each run of blocks that have a slot with one call; skip the other blocks."""
        run: list[memoryview] = []
        for put, view in zip(puts, views, strict=True):
            if view is not None:
                run.append(view)
                continue
            self._reader.take(run)
            run = []
            self._reader.skip(put.ranges.payload_bytes)
        run.append(sums)
        self._reader.take(run)


def _write_kind(header: FrameHeader) -> TransferKind:
    return TransferKind.MOVE_IN if is_moving(header.request_id) else TransferKind.WRITE


def _checksums(puts: Sequence[BlockSpec], sums: bytearray) -> list[tuple[int, ...]]:
    """Split the checksums of all ranges by block."""
    found = tuple(unpack_sums(sums, len(sums) // 8))
    answer, start = [], 0
    for put in puts:
        answer.append(found[start : start + put.ranges.count])
        start += put.ranges.count
    return answer


class Session:
    """A connection and the rights of its peer."""

    def __init__(
        self,
        wire: Wire,
        node: DmpNode,
        clients: Clients,
        *,
        rdma: RdmaGuest | None = None,
        trusted: Callable[[], None] = lambda: None,
    ) -> None:
        self._wire = wire
        self._node = node
        self._clients = clients
        self._now_trusted = trusted
        self._client_id = ""
        self._rdma = rdma
        self._reader = FrameReader(wire)
        self._bytes = _ByteFrames(wire, self._reader, node)
        self._handlers: dict[FrameType, Callable[[bytearray], bytes]] = {
            FrameType.HELLO: self._hello,
            FrameType.LOOKUP: self._lookup,
            FrameType.RESERVE: self._reserve,
            FrameType.SEAL: self._seal,
            FrameType.ABORT: self._abort,
            FrameType.HOLD: self._hold,
            FrameType.RELEASE: self._release,
            FrameType.TOUCH: self._touch,
            FrameType.SUSPECT: self._suspect,
            FrameType.STATS: self._stats,
            FrameType.PROMOTE: self._promote,
            FrameType.DESCRIBE: self._describe,
            FrameType.ABOUT: self._about,
            FrameType.ERASE: self._erase,
            **(rdma.handlers if rdma else {}),
        }

    def run(self) -> None:
        """Serve frames until the peer leaves or breaks a rule; then free the client's leftovers."""
        try:
            while self._serve_one():
                pass
        except (OSError, EOFError) as error:
            log.debug("dmp %s: connection ended: %s", self._node.node_id, error)
        except (RemoteProtocolError, AuthenticationError) as error:
            log.warning("dmp %s: peer dropped: %s", self._node.node_id, error)
            self._leave()
        finally:
            if self._rdma is not None:
                self._rdma.close()  # Before the slots are reused.
            if self._client_id:
                self._clients.left(self._client_id, self._node.puts.release_owner)

    def _leave(self) -> None:
        """Let the peer read the error: a close with unread bytes would reset the connection."""
        with contextlib.suppress(OSError, EOFError):
            self._wire.end_sending()
            self._wire.set_timeout(LEAVE_TIMEOUT_S)
            discard(self._wire, MAX_LEAVE_BYTES, began=time.monotonic())

    def _serve_one(self) -> bool:
        header = _NO_HEADER
        try:
            found = self._reader.next()
            if found is None:
                return False
            header = found
            if header.type is FrameType.READ:
                ref = self._reader.one_range(header)
                refs = [ref] if ref else unpack_ranges(self._reader.head(header))
                self._bytes.read(header, refs)
            else:
                self._dispatch(header, self._reader.head(header))
        except CacheError as error:
            # Skip the rest of the refused frame first: a peer that is still sending does not read
            # yet.
            self._reader.skip()
            self._send_error(header, error)
        except (RemoteProtocolError, AuthenticationError) as error:
            with contextlib.suppress(OSError):
                self._send_error(header, error)
            raise
        return True

    def _dispatch(self, header: FrameHeader, head: bytearray) -> None:
        if header.type is FrameType.WRITE:
            self._reply(header, self._bytes.write(header, head))
        elif header.type is FrameType.PUT:
            self._reply(header, self._bytes.put(header, head))
        else:
            handler = self._handlers.get(header.type)
            if handler is None:
                raise RemoteProtocolError(f"a client does not send {header.type.name}")
            self._reply(header, handler(head))

    def _reply(self, header: FrameHeader, head: bytes) -> None:
        lead = pack_header(FrameType.REPLY, header.request_id, head_bytes=len(head))
        self._wire.send([lead + head])

    def _send_error(self, header: FrameHeader, error: TierKVError) -> None:
        head = m.ErrorReply(error.code, error.message).pack()
        lead = pack_header(FrameType.ERROR, header.request_id, head_bytes=len(head))
        self._wire.send([lead + head])

    # Frames without bytes

    def _hello(self, head: bytearray) -> bytes:
        hello = m.Hello.unpack(head)
        node = self._node
        if not accepts(node.config.token, hello.token):
            raise AuthenticationError("wrong cluster token")
        if not self._reader.trusted:
            self._reader.trusted = True
            self._now_trusted()
            self._wire.set_timeout(node.config.frame_timeout_s)
        self._be(hello.client_id)
        path = str(node.config.segment_file)
        return m.Welcome(node.node_id, node.host, node.incarnation, path).pack()

    def _about(self, head: bytearray) -> bytes:
        return m.About(self._node.config.zone).pack()

    def _be(self, client_id: str) -> None:
        """Attribute all further requests of the peer to a client id."""
        if self._client_id:
            self._clients.left(self._client_id, self._node.puts.release_owner)
        self._client_id = client_id
        if client_id:
            self._clients.joined(client_id)

    def _lookup(self, head: bytearray) -> bytes:
        return m.MaybeRefs(self._node.gets.lookup(m.BlockLookup.unpack(head).keys)).pack()

    def _promote(self, head: bytearray) -> bytes:
        return m.MaybeRefs(self._node.promote(m.BlockLookup.unpack(head).keys)).pack()

    def _describe(self, head: bytearray) -> bytes:
        return pack_stored(self._node.gets.describe(m.BlockLookup.unpack(head).keys))

    def _reserve(self, head: bytearray) -> bytes:
        ask = m.Reserve.unpack(head)
        places = self._node.puts.reserve(ask.puts, deadline_s=ask.deadline_s, owner=self._client_id)
        return m.MaybeRefs(places).pack()

    def _seal(self, head: bytearray) -> bytes:
        ask = m.Seal.unpack(head, self._node.node_id)
        return m.MaybeRefs(self._node.puts.seal(ask.items)).pack()

    def _abort(self, head: bytearray) -> bytes:
        self._node.puts.abort(m.Refs.unpack(head, self._node.node_id).locations)
        return b""

    def _hold(self, head: bytearray) -> bytes:
        ask = m.Refs.unpack(head, self._node.node_id)
        held = self._node.gets.hold(ask.locations, ttl_s=ask.number, owner=self._client_id)
        return m.Flags(held).pack()

    def _release(self, head: bytearray) -> bytes:
        ask = m.Refs.unpack(head, self._node.node_id)
        self._node.gets.release(ask.locations, owner=self._client_id)
        return b""

    def _touch(self, head: bytearray) -> bytes:
        ask = m.Refs.unpack(head, self._node.node_id)
        self._node.gets.touch(ask.locations, read_bytes=int(ask.number))
        return b""

    def _suspect(self, head: bytearray) -> bytes:
        ask = m.Ranges.unpack(head, self._node.node_id)
        return m.Flags(self._node.gets.suspect(ask.refs)).pack()

    def _erase(self, head: bytearray) -> bytes:
        return m.pack_erased(self._node.erase(m.BlockLookup.unpack(head).keys))

    def _stats(self, head: bytearray) -> bytes:
        if head:
            raise RemoteProtocolError("a STATS frame is empty")
        return m.pack_stats(self._node.reports.stats())
