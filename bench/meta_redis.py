"""The same lookups in Redis: one MGET, or pipelined EXISTS, over a loopback socket.

A minimal client: MGET is the faster of the two, so it is the floor that counts.

Used by bench.meta. Requests are made before the clock starts and replies are only counted, so the
measured time is the server's. No persistence.
"""

from __future__ import annotations

import socket
import subprocess
import time

from bench.pool_cores import server_side
from bench.pool_peers import await_port, end, free_port, redis_server
from tierkv.kvcore.ids import BlockKey

_CHUNK = 10_000


class RedisKeys:
    """A Redis server that holds keys; raises PeerMissingError without an installed Redis."""

    def __init__(self) -> None:
        self._port = free_port()
        with server_side():
            self._process = subprocess.Popen(
                [redis_server(), "--port", str(self._port), "--bind", "127.0.0.1", "--save", "",
                 "--appendonly", "no", "--dir", "/tmp"],
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        await_port(self._port, self._process)
        self._socket = socket.create_connection(("127.0.0.1", self._port))

    def store(self, keys: list[BlockKey]) -> None:
        """SET each key to a short value."""
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            self._send([b"*3\r\n$3\r\nSET\r\n$16\r\n%b\r\n$1\r\n1\r\n" % key for key in chunk])
            self._await(b"+OK\r\n", len(chunk))

    def exists(self, keys: list[BlockKey]) -> float:
        """Ask for all keys in one pipeline; return the seconds."""
        request = [b"*2\r\n$6\r\nEXISTS\r\n$16\r\n%b\r\n" % key for key in keys]
        began = time.perf_counter()
        self._send(request)
        self._await(b":1\r\n", len(keys))
        return time.perf_counter() - began

    def mget(self, keys: list[BlockKey]) -> float:
        """Ask for the values of all keys in one command; return the seconds."""
        head = b"*%d\r\n$4\r\nMGET\r\n" % (len(keys) + 1)
        request = [head, *(b"$16\r\n%b\r\n" % key for key in keys)]
        reply = b"*%d\r\n" % len(keys) + b"$1\r\n1\r\n" * len(keys)
        began = time.perf_counter()
        self._send(request)
        left = len(reply)
        while left:
            data = self._socket.recv(1 << 20)
            assert reply[len(reply) - left :].startswith(data), "a key is missing"
            left -= len(data)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        end(self._process)

    def _send(self, commands: list[bytes]) -> None:
        self._socket.sendall(b"".join(commands))

    def _await(self, reply: bytes, count: int) -> None:
        left = len(reply) * count
        while left:
            data = self._socket.recv(1 << 20)
            assert data.strip(reply) == b"", "a key is missing"
            left -= len(data)
