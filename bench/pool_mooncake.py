"""Mooncake Store over TCP as a contender: a master, a storage process and this client.

Called by bench.pool_worker in a separate virtual environment; ``python -m bench.pool_mooncake`` is
the storage process. The benchmark uses Mooncake's fastest path: registered buffers and the
zero-copy calls.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

from bench.pool_cell import BATCH, POOL_BYTES, Array, Cell, Contender, Operation, Values
from bench.pool_cores import server_side
from bench.pool_peers import await_port, end, free_port

_LOCAL_BYTES = 64 << 20


def contenders() -> dict[str, Contender]:
    """Return the store."""
    return {"mooncake": Mooncake()}


class Mooncake:
    """A client without memory of its own, so every byte crosses the socket."""

    ops = ("get", "put")

    def __init__(self) -> None:
        self._rpc, self._http = free_port(), free_port()
        self._numbers = itertools.count()
        self._last: list[str] = []
        self._registered: list[Array] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        master = Path(sys.executable).parent / "mooncake_master"
        command = [
            str(master), "--rpc_port", str(self._rpc), "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={self._http}",
            f"--metrics_port={free_port()}",
        ]  # fmt: skip
        with server_side():
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        await_port(self._rpc, self._processes[0])
        await_port(self._http, self._processes[0])
        with server_side():
            storage = subprocess.Popen(
                [sys.executable, "-m", "bench.pool_mooncake", str(self._rpc), str(self._http)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        self._processes.append(storage)
        assert storage.stdout is not None
        for line in storage.stdout:
            if line.strip() == b"ready":
                break
        else:
            raise RuntimeError("the storage process ended")
        self._store = _connect(self._rpc, self._http, segment_bytes=0)

    def store(self, values: Values) -> None:
        for row in self._registered:
            self._store.unregister_buffer(row.ctypes.data)
        self._values = values
        self._store.remove_all(force=True)
        # Rows are adjacent, so one registration covers a whole set.
        self._registered = [_covering(rows) for rows in (values.source, *values.targets)]
        for whole in self._registered:
            _good([self._store.register_buffer(whole.ctypes.data, whole.nbytes)])
        _good(self._put([f"get{k}" for k in range(BATCH)], list(range(BATCH))))

    def _put(self, names: list[str], chosen: list[int]) -> list[int]:
        rows = [self._values.source[k] for k in chosen]
        if len(rows) == 1:
            return [self._store.put_from(names[0], rows[0].ctypes.data, rows[0].nbytes)]
        answer: list[int] = self._store.batch_put_from(
            names, [row.ctypes.data for row in rows], [row.nbytes for row in rows]
        )
        return answer

    def operation(self, cell: Cell, thread: int) -> Operation:
        store, values = self._store, self._values
        addresses = [row.ctypes.data for row in values.targets[thread]]
        names = [f"get{k}" for k in range(BATCH)]
        size = values.size

        def get_one(i: int) -> None:
            k = values.chosen(i, 1).start
            _moved([store.get_into(names[k], addresses[k], size)], size)

        def get_many(i: int) -> None:
            _moved(store.batch_get_into(names, addresses, [size] * BATCH), size)

        def put(i: int) -> None:
            chosen = list(values.chosen(i, cell.batch))
            fresh = [f"put{next(self._numbers)}" for _ in chosen]
            _good(self._put(fresh, chosen))
            self._last = fresh

        if cell.op == "put":
            return put
        return get_one if cell.batch == 1 else get_many

    def stored(self) -> list[bytes]:
        return [self._store.get(name) for name in self._last]

    def tidy(self) -> None:
        """Remove the values of puts: a put into a full store fails, eviction comes later."""
        self._store.remove_by_regex("^put", force=True)

    def close(self) -> None:
        self._store.close()
        self._end()

    def _end(self) -> None:
        for process in reversed(self._processes):
            if process.stdin is not None:
                process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
            end(process)


def _covering(rows: list[Array]) -> Array:
    size = rows[0].nbytes * len(rows)
    whole = np.lib.stride_tricks.as_strided(rows[0], shape=(size,), strides=(1,))
    return whole


def _good(codes: list[int]) -> None:
    if any(codes):
        raise RuntimeError(f"mooncake answered {[code for code in codes if code]}")


def _moved(counts: list[int], size: int) -> None:
    if any(count != size for count in counts):
        raise RuntimeError(f"mooncake moved {counts} of {size} bytes")


def _connect(rpc: int, http: int, *, segment_bytes: int) -> Any:
    store = MooncakeDistributedStore()
    _good(
        [
            store.setup(
                f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{http}/metadata", segment_bytes,
                _LOCAL_BYTES, "tcp", "", f"127.0.0.1:{rpc}",
            )
        ]
    )  # fmt: skip
    return store


def serve(rpc: int, http: int) -> None:
    """Hold the memory until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = _connect(rpc, http, segment_bytes=POOL_BYTES)
    print("ready", file=answers, flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
