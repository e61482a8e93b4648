"""Redis (or Valkey) as a contender: redis-py with the hiredis parser over loopback TCP.

Called by bench.pool_worker in a virtual environment of its own. ``redis`` batches with MGET and
MSET, ``redis_pipe`` with a pipeline of GET and SET. No persistence; one connection per thread.
"""

from __future__ import annotations

import subprocess
from typing import Any

import redis

from bench.pool_cell import BATCH, Cell, Contender, Operation, Values
from bench.pool_cores import server_side
from bench.pool_peers import await_port, end, free_port, redis_server

_READ_BYTES = 1 << 20


def contenders() -> dict[str, Contender]:
    """Return both ways to batch, over one server."""
    server = RedisServer()
    return {"redis": Redis(server, pipe=False), "redis_pipe": Redis(server, pipe=True)}


class RedisServer:
    """The server process."""

    def __init__(self) -> None:
        self.port = free_port()
        with server_side():
            self._process = subprocess.Popen(
                [redis_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                 "--appendonly", "no", "--proto-max-bulk-len", "1gb", "--dir", "/tmp"],
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        await_port(self.port, self._process)

    def close(self) -> None:
        """End the server process."""
        end(self._process)


class Redis:
    """One way to use the server."""

    def __init__(self, server: RedisServer, *, pipe: bool) -> None:
        self.ops: tuple[str, ...] = ("get_batch", "put_batch") if pipe else ("get", "put")
        self._server = server
        self._pipe = pipe
        self._clients: dict[int, Any] = {}
        self._last: list[str] = []

    def store(self, values: Values) -> None:
        self._values = values
        client = self._client(0)
        client.flushall()
        for k in range(BATCH):
            client.set(f"v{k}", memoryview(values.source[k]))

    def _client(self, thread: int) -> Any:
        if thread not in self._clients:
            client = redis.Redis(
                "127.0.0.1", self._server.port, single_connection_client=True,
                socket_read_size=_READ_BYTES,
            )  # type: ignore[call-arg]  # fmt: skip
            client.ping()
            self._clients[thread] = client
        return self._clients[thread]

    def operation(self, cell: Cell, thread: int) -> Operation:
        client, values = self._client(thread), self._values

        def get_one(i: int) -> object:
            return [client.get(f"v{values.chosen(i, 1).start}")]

        def get_many(i: int) -> object:
            names = [f"v{k}" for k in values.chosen(i, cell.batch)]
            if not self._pipe:
                return client.mget(names)
            with client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.get(name)
                return pipe.execute()

        def put_one(i: int) -> None:
            k = values.chosen(i, 1).start
            self._last = [f"p{k}"]
            client.set(f"p{k}", memoryview(values.source[k]))

        def put_many(i: int) -> None:
            pairs = {f"p{k}": memoryview(values.source[k]) for k in values.chosen(i, cell.batch)}
            self._last = list(pairs)
            if not self._pipe:
                client.mset(pairs)
                return
            with client.pipeline(transaction=False) as pipe:
                for name, value in pairs.items():
                    pipe.set(name, value)
                pipe.execute()

        if cell.op == "get":
            return get_one if cell.batch == 1 else get_many
        return put_one if cell.batch == 1 else put_many

    def stored(self) -> list[bytes]:
        answer: list[bytes] = self._client(0).mget(self._last)
        return answer

    def tidy(self) -> None:
        """Do nothing: puts overwrite the same keys."""

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._server.close()
