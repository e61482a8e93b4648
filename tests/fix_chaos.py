"""A TCP proxy on loopback that disturbs what passes: the network faults of docs/faults.md.

It stands between two processes of a cluster and runs in a thread of
its own. A test assigns a ``Fault`` to a direction; it holds from the next chunk on, also on
connections that are open.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

_CHUNK_BYTES: Final = 16 << 10
_WINDOW_BYTES: Final = 1 << 20
"""A delay holds back what is on its way together, so that it limits no rate."""

_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to chunks of one direction.

    Attributes:
        drop: swallow everything; the connection stays open.
        delay_s: seconds each chunk waits.
        jitter_s: up to so much more or less, at random.
        bytes_per_s: rate limit; 0 is none.
        reset_share: share of chunks at which the connection is reset (RST).
        flip_share: share of chunks in which one bit is flipped.
        flip_from: shorter chunks are not flipped, so that headers and pings pass.
        flip_until: none is flipped once ``ChaosProxy.flipped`` has reached it.
    """

    drop: bool = False
    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    reset_share: float = 0.0
    flip_share: float = 0.0
    flip_from: int = 0
    flip_until: float = math.inf


NONE: Final = Fault()
HOLE: Final = Fault(drop=True)
RESET: Final = Fault(reset_share=1.0)


class ChaosProxy:
    """Forwards connections to one address.

    Attributes:
        address: ``host:port`` it listens on.
        to_server: fault of what clients send; assign to switch.
        to_client: fault of what the server sends.
        hold: accept connections and be silent: the server never hears of them.
        accepted: connections taken so far.
        carried: bytes forwarded so far, both directions.
        dropped: bytes swallowed so far.
        flipped: bits flipped so far.
        resets: connections reset so far.
    """

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0", seed: int = 0) -> None:
        self.to_server = self.to_client = NONE
        self.hold = False
        self.accepted = self.carried = self.dropped = self.flipped = self.resets = 0
        self._target = target
        self._random = random.Random(seed)
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter | None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        host, _, port = listen.rpartition(":")
        self._socket = socket.create_server((host, int(port)), backlog=128)
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._do(self._listen())

    def both(self, fault: Fault) -> None:
        """Set the fault of both directions."""
        self.to_server = self.to_client = fault

    def heal(self) -> None:
        """Forward everything again."""
        self.both(NONE)
        self.hold = False

    def reset_all(self) -> None:
        """End every open connection with RST, at both ends."""
        self._do(self._reset_all())

    def close(self) -> None:
        """Stop listening and end all connections."""
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()
        self._socket.close()

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, sock=self._socket, limit=_WINDOW_BYTES
        )

    async def _reset_all(self) -> None:
        for near, far in list(self._pairs):
            self._reset(near, far)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.hold:
            held = (writer, None)
            self._pairs.add(held)
            try:
                while await reader.read(_CHUNK_BYTES):
                    pass
            finally:
                self._pairs.discard(held)
            return
        host, _, port = self._target.rpartition(":")
        far_reader, far = await asyncio.open_connection(host, int(port), limit=_WINDOW_BYTES)
        pair = (writer, far)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far, writer, up=True))
                group.create_task(self._forward(far_reader, writer, far, up=False))
        except* OSError:
            pass
        finally:
            self._pairs.discard(pair)
            far.close()

    async def _forward(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        *,
        up: bool,
    ) -> None:
        while chunk := await source.read(self._most(up=up)):
            fault = self.to_server if up else self.to_client
            if fault.reset_share and self._random.random() < fault.reset_share:
                self._reset(sink, other)
                return
            if fault.delay_s or fault.bytes_per_s:
                await asyncio.sleep(self._wait_s(fault, len(chunk)))
                fault = self.to_server if up else self.to_client
            if fault.drop:
                self.dropped += len(chunk)
                continue
            sink.write(self._flipped(chunk, fault))
            self.carried += len(chunk)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()

    def _most(self, *, up: bool) -> int:
        fault = self.to_server if up else self.to_client
        return _WINDOW_BYTES if fault.delay_s else _CHUNK_BYTES

    def _wait_s(self, fault: Fault, size: int) -> float:
        jitter_s = self._random.uniform(-fault.jitter_s, fault.jitter_s)
        rate_s = size / fault.bytes_per_s if fault.bytes_per_s else 0.0
        return max(0.0, fault.delay_s + jitter_s) + rate_s

    def _flipped(self, chunk: bytes, fault: Fault) -> bytes:
        if len(chunk) < fault.flip_from or self.flipped >= fault.flip_until:
            return chunk
        if self._random.random() >= fault.flip_share:
            return chunk
        damaged = bytearray(chunk)
        damaged[self._random.randrange(fault.flip_from // 2, len(chunk))] ^= (
            1 << self._random.randrange(8)
        )
        self.flipped += 1
        return bytes(damaged)

    def _reset(self, *writers: asyncio.StreamWriter | None) -> None:
        self.resets += 1
        for writer in writers:
            if writer is None:
                continue
            raw = writer.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            writer.transport.abort()
