"""The limits of the machine: a plain socket with the pool's message pattern, and memcpy.

Called by bench.pool_worker. A get sends 64 bytes and receives the value. A put sends 64 bytes and
the value, and receives 16 bytes. The server is a separate process with a thread per connection and
does no checks, parsing or lookups.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import xxhash

from bench.pool_cell import BATCH, Array, Cell, Contender, Operation, Values
from bench.pool_cores import server_side

_REQUEST: Final = struct.Struct("<IIQ48x")
_GET, _PUT, _STORE = 0, 1, 2
_ACK: Final = bytes(16)
_IOV: Final = 1024


def contenders() -> dict[str, Contender]:
    """Return the raw limits by name."""
    return {"raw": RawSocket(), "memcpy": Memcpy(), "memcpy_hash": HashedCopy()}


class _Shared:
    """Values on page borders in /dev/shm, as in a pool."""

    def __init__(self, size: int) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(BATCH * size)
            self._map = mmap.mmap(file.fileno(), BATCH * size)
        whole = np.frombuffer(self._map, np.uint8)
        whole[:] = 0
        self.rows: list[Array] = [whole[i * size : (i + 1) * size] for i in range(BATCH)]


class Memcpy:
    """Copies between private buffers and a mapping of /dev/shm, by numpy."""

    ops = ("get", "put")

    def __init__(self) -> None:
        self._kept: _Shared | None = None
        self._put: _Shared | None = None
        self._last: list[int] = []

    def store(self, values: Values) -> None:
        self._values = values
        self._kept, self._put = _Shared(values.size), _Shared(values.size)
        for to, row in zip(self._kept.rows, values.source, strict=True):
            to[:] = row

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, shared = self._values, self._kept if cell.op == "get" else self._put
        assert shared is not None
        memory = shared.rows
        source, target = values.source, values.targets[thread]

        def get(i: int) -> None:
            for k in values.chosen(i, cell.batch):
                np.copyto(target[k], memory[k])

        def put(i: int) -> None:
            self._last = list(values.chosen(i, cell.batch))
            for k in self._last:
                np.copyto(memory[k], source[k])

        return get if cell.op == "get" else put

    def stored(self) -> list[bytes]:
        assert self._put is not None
        return [self._put.rows[k].tobytes() for k in self._last]

    def tidy(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._kept = self._put = None


class HashedCopy(Memcpy):
    """Copies that verify: the floor of a get by shared memory, which hashes every range."""

    ops = ("get",)

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, shared = self._values, self._kept
        assert shared is not None
        sums = [xxhash.xxh3_64_intdigest(row) for row in values.source]
        memory, target = shared.rows, values.targets[thread]

        def get(i: int) -> None:
            for k in values.chosen(i, cell.batch):
                np.copyto(target[k], memory[k])
                assert xxhash.xxh3_64_intdigest(target[k]) == sums[k], "bytes differ"

        return get


class SocketContender:
    """A server process of the benchmark's own, and one connection to it per thread."""

    ops = ("get", "put")

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        """Start the server.

        Args:
            serve: runs in the server process. Sends its port first, then answers a size, for the
                values to come, with the same size.
        """
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._server = context.Process(target=serve, args=(theirs,), daemon=True)
        with server_side():
            self._server.start()
        self._port: int = ours.recv()
        self._control = ours
        self._socks: dict[int, socket.socket] = {}

    def store(self, values: Values) -> None:
        self._values = values
        self._control.send(values.size)
        assert self._control.recv() == values.size

    def tidy(self) -> None:
        """Do nothing: these servers keep values in a fixed number of places."""

    def close(self) -> None:
        for sock in self._socks.values():
            sock.close()
        self._control.close()
        self._server.join(5)
        self._server.kill()
        self._server.join()

    def _connection(self, thread: int) -> socket.socket:
        if thread not in self._socks:
            sock = socket.create_connection(("127.0.0.1", self._port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socks[thread] = sock
        return self._socks[thread]


class RawSocket(SocketContender):
    """Blocking sendmsg and recv_into."""

    def __init__(self) -> None:
        super().__init__(_serve)

    def store(self, values: Values) -> None:
        super().store(values)
        views = [memoryview(row) for row in values.source]
        self._put(self._connection(0), _STORE, range(BATCH), views)

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, sock = self._values, self._connection(thread)
        targets = [memoryview(row) for row in values.targets[thread]]
        sources = [memoryview(row) for row in values.source]

        def get(i: int) -> None:
            chosen = values.chosen(i, cell.batch)
            sock.sendall(_REQUEST.pack(_GET, chosen.start, cell.batch))
            for k in chosen:
                _fill(sock, targets[k])

        def put(i: int) -> None:
            self._last = values.chosen(i, cell.batch)
            self._put(sock, _PUT, self._last, sources)

        return get if cell.op == "get" else put

    def _put(self, sock: socket.socket, kind: int, chosen: range, views: list[memoryview]) -> None:
        request = _REQUEST.pack(kind, chosen.start, len(chosen))
        _send(sock, [memoryview(request), *(views[k] for k in chosen)])
        _fill(sock, memoryview(bytearray(16)))

    def stored(self) -> list[bytes]:
        self._control.send(("stored", list(self._last)))
        answer: list[bytes] = self._control.recv()
        return answer


def _fill(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:] if done else view)
        if not count:
            raise EOFError("the peer closed the connection")
        done += count


def _send(sock: socket.socket, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first : first + _IOV])
        while first < len(views) and sent >= len(views[first]):
            sent -= len(views[first])
            first += 1
        if sent:
            views[first] = views[first][sent:]


class _Server:
    """State shared by the threads of the server process."""

    def __init__(self) -> None:
        self.kept: list[memoryview] = []
        self.put: list[memoryview] = []

    def resize(self, size: int) -> None:
        self.kept = [memoryview(row) for row in _Shared(size).rows]
        self.put = [memoryview(row) for row in _Shared(size).rows]

    def serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = memoryview(bytearray(_REQUEST.size))
        with sock, contextlib.suppress(EOFError, ConnectionError):
            while True:
                _fill(sock, request)
                kind, first, count = _REQUEST.unpack(request)
                if kind == _GET:
                    _send(sock, self.kept[first : first + count])
                    continue
                for view in (self.kept if kind == _STORE else self.put)[first : first + count]:
                    _fill(sock, view)
                sock.sendall(_ACK)


def _serve(control: Connection) -> None:
    """Accept connections; ``control`` carries sizes and read-back until ``control`` ends."""
    server = _Server()
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=server.serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    control.send(listener.getsockname()[1])
    with contextlib.suppress(EOFError):
        while True:
            ask = control.recv()
            if isinstance(ask, int):
                server.resize(ask)
                control.send(ask)
            else:
                control.send([bytes(server.put[k]) for k in ask[1]])
