"""The floor of Python: the pool's protocol in the shortest loop, without any bookkeeping.

Called by bench.pool_worker. A get names its values by 16 bytes each; the answer has their checksums
and bytes, which the client verifies. A put sends keys, bytes and checksums; the server keeps the
values in a ring of slots, the oldest first out, and answers a reference for each. No eviction
policy, chains, leases, reports, headers that survive a restart, deadlines or checks of any input:
what the pool does beyond this loop is its own, what this loop takes is the interpreter's.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final

import xxhash

from bench.pool_cell import BATCH, Cell, Contender, Operation, Values
from bench.pool_raw import SocketContender

_HEAD: Final = struct.Struct("<III")
_GET, _PUT = 0, 1
_KEY: Final = 16
_PLACE: Final = struct.Struct("<QQ")
_SEGMENT_BYTES: Final = 1 << 30
_PIECE_BYTES: Final = 256 << 10
_xxh3 = xxhash.xxh3_64_intdigest


def contenders() -> dict[str, Contender]:
    """Return the floor by name."""
    return {"stripped": Stripped()}


class Stripped(SocketContender):
    """The pool's protocol; the server's ring forgets the oldest values."""

    def __init__(self) -> None:
        super().__init__(_serve)
        self._numbers = itertools.count()
        self._last: list[bytes] = []

    def store(self, values: Values) -> None:
        super().store(values)
        self._kept = self._put(self._connection(0), range(BATCH), b"kept----")

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, sock, kept = self._values, self._connection(thread), self._kept
        targets = [memoryview(row) for row in values.targets[thread]]

        def get(i: int) -> None:
            chosen = values.chosen(i, cell.batch)
            size, views = values.size, targets[chosen.start : chosen.stop]
            keys = b"".join(kept[chosen.start : chosen.stop])
            sock.sendall(_HEAD.pack(_GET, cell.batch, size) + keys)
            sums = bytearray(8 * cell.batch)
            if size * cell.batch <= _PIECE_BYTES:
                _fill(sock, [memoryview(sums), *views])
                found = [_xxh3(view) for view in views]
            else:
                _fill(sock, [memoryview(sums)])
                found = list(_fill_hashed(sock, views))
            assert [*struct.unpack(f"<{cell.batch}Q", sums)] == found, "bytes differ"

        def put(i: int) -> None:
            self._last = self._put(sock, values.chosen(i, cell.batch), b"put-----")

        return get if cell.op == "get" else put

    def _put(self, sock: socket.socket, chosen: range, prefix: bytes) -> list[bytes]:
        count = len(chosen)
        views = [memoryview(self._values.source[k]) for k in chosen]
        keys = [prefix + next(self._numbers).to_bytes(8, "big") for _ in chosen]
        ready = [_HEAD.pack(_PUT, count, self._values.size) + b"".join(keys)]
        sums, waiting = [], 0
        for view in views:
            sums.append(_xxh3(view))
            ready.append(view)
            waiting += len(view)
            if waiting >= _PIECE_BYTES:
                _send(sock, ready)
                ready, waiting = [], 0
        _send(sock, [*ready, struct.pack(f"<{count}Q", *sums)])
        places = bytearray(_PLACE.size * count)
        _fill(sock, [memoryview(places)])
        assert len([*_PLACE.iter_unpack(places)]) == count
        return keys

    def stored(self) -> list[bytes]:
        self._control.send(list(self._last))
        answer: list[bytes] = self._control.recv()
        return answer


def _fill(sock: socket.socket, views: list[memoryview]) -> None:
    got = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
    for view in views:
        while got < len(view):
            more = sock.recv_into(view[max(got, 0) :], 0, socket.MSG_WAITALL)
            if not more:
                raise EOFError("the peer closed the connection")
            got = max(got, 0) + more
        got -= len(view)


def _fill_hashed(sock: socket.socket, views: list[memoryview]) -> Iterator[int]:
    """Fill about a piece at a time; yield each view's checksum while its bytes are cached."""
    step = max(1, _PIECE_BYTES // len(views[0]))
    for start in range(0, len(views), step):
        group = views[start : start + step]
        if len(group[0]) <= _PIECE_BYTES:
            _fill(sock, group)
            yield from map(_xxh3, group)
            continue
        state, view = xxhash.xxh3_64(), group[0]
        for at in range(0, len(view), _PIECE_BYTES):
            piece = view[at : at + _PIECE_BYTES]
            _fill(sock, [piece])
            state.update(piece)
        yield state.intdigest()


def _send(sock: socket.socket, parts: list[bytes | memoryview]) -> None:
    sent = sock.sendmsg(parts)
    if sent != sum([len(part) for part in parts]):
        sock.sendall(b"".join(parts)[sent:])


class _Ring:
    """Slots of one size in /dev/shm, and the value under each key."""

    def __init__(self, size: int) -> None:
        step = -(-size // 4096) * 4096
        self.count = max(2 * BATCH, _SEGMENT_BYTES // step)
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(bytes(self.count * step))  # The memory is there before the clock starts.
            file.flush()
            view = memoryview(mmap.mmap(file.fileno(), self.count * step))
        self.views = [view[i * step : i * step + size] for i in range(self.count)]
        self.names: list[bytes] = [b""] * self.count
        self.by_key: dict[bytes, tuple[memoryview, int]] = {}
        self.lock = threading.Lock()
        self._next = BATCH

    def take(self, keys: list[bytes]) -> list[int]:
        """Return a slot per key; the first slots are for the values that gets read."""
        if keys[0].startswith(b"kept"):
            return list(range(len(keys)))
        with self.lock:
            if self._next + len(keys) > self.count:
                self._next = BATCH
            slots = list(range(self._next, self._next + len(keys)))
            self._next += len(keys)
            for slot in slots:
                self.by_key.pop(self.names[slot], None)
        return slots

    def serve(self, sock: socket.socket, kind: int, count: int) -> None:
        """Answer one request whose head was read."""
        raw = bytearray(_KEY * count)
        _fill(sock, [memoryview(raw)])
        keys = [bytes(raw[i : i + _KEY]) for i in range(0, len(raw), _KEY)]
        if kind == _GET:
            found = [self.by_key[key] for key in keys]
            sums = struct.pack(f"<{count}Q", *[checksum for _, checksum in found])
            _send(sock, [sums, *[view for view, _ in found]])
            return
        slots, sums = self.take(keys), bytearray(8 * count)
        views = [self.views[slot] for slot in slots]
        _fill(sock, [*views, memoryview(sums)])
        with self.lock:
            for slot, key in zip(slots, keys, strict=True):
                self.names[slot] = key
            pairs = zip(views, struct.unpack(f"<{count}Q", sums), strict=True)
            self.by_key.update(zip(keys, pairs, strict=True))
        sock.sendall(b"".join([_PLACE.pack(slot, 1) for slot in slots]))


def _serve(control: Connection) -> None:
    """Accept connections; ``control`` carries sizes and read-back until ``control`` ends."""
    rings: list[_Ring] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def converse(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = memoryview(bytearray(_HEAD.size))
        with sock, contextlib.suppress(EOFError, ConnectionError):
            while True:
                _fill(sock, [head])
                kind, count, _ = _HEAD.unpack(head)
                rings[-1].serve(sock, kind, count)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=converse, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    control.send(listener.getsockname()[1])
    with contextlib.suppress(EOFError):
        while True:
            ask = control.recv()
            if isinstance(ask, int):
                rings[:] = []
                rings.append(_Ring(ask))
                control.send(ask)
            else:
                control.send([bytes(rings[-1].by_key[key][0]) for key in ask])
