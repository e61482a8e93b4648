"""Sockets for the events of one rank of an engine: live events, replays, end of the connection.

Created by integrations/events/feed.py. The listener decides nothing:
integrations/events/following.py receives the events and returns instructions. Each connection has
new sockets, so a queue never delivers messages of an earlier connection.

The addresses come from settings, or are defaults. By default vLLM and SGLang publish on port 5557.
A replay of events needs a second port; the default here is the first port after the ports for
events. Each data-parallel rank uses the ports after the previous rank's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tierkv.integrations.events.following import AskReplay, Following, Instruction
from tierkv.integrations.events.messages import decode_batch
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import ConfigError

_EVENTS_PORT: Final = 5557
_ANY_HOST: Final = frozenset({"*", "0.0.0.0", "[::]", "::"})
OFF: Final = "off"
"""Value of a setting that turns events or replay off."""


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """Addresses of the event sockets of one rank.

    Attributes:
        rank: data-parallel rank.
        events: address of the engine's PUB socket.
        replay: address of the engine's ROUTER socket; empty: no replay.
    """

    rank: int
    events: str
    replay: str = ""


def event_endpoints(
    engine_url: str, *, events_url: str = "", replay_url: str = "", ranks: int = 1
) -> tuple[EventEndpoint, ...]:
    """Return the addresses of each rank; empty if events are off.

    Args:
        engine_url: URL of the engine's HTTP server. The host in the URL is the default host and
            replaces a wildcard host, so addresses may be copied from the engine's own flags.
        events_url: ``engine.events_url``: ``tcp://host:port``, ``ipc://path``, ``off`` or empty.
        replay_url: ``engine.events_replay_url``, in the same forms.
        ranks: number of data-parallel ranks of the engine.

    Raises:
        ConfigError: an address is unusable, or the ranks or ports do not fit.
    """
    if not 1 <= ranks <= limits.MAX_ENGINE_RANKS:
        raise ConfigError(f"an engine has 1 to {limits.MAX_ENGINE_RANKS} ranks, not {ranks}")
    if events_url == OFF:
        return ()
    host = urlsplit(engine_url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    events = _address(events_url or f"tcp://{host}:{_EVENTS_PORT}", host, "engine.events_url")
    replay = ""
    if replay_url != OFF:
        default = f"tcp://{host}:{_EVENTS_PORT + ranks}"
        replay = _address(replay_url or default, host, "engine.events_replay_url")
    places = [
        EventEndpoint(rank, _of_rank(events, rank), _of_rank(replay, rank)) for rank in range(ranks)
    ]
    shared = {place.events for place in places} & {place.replay for place in places}
    if shared:
        raise ConfigError(
            f"engine.events_url and engine.events_replay_url both use {min(shared)}",
            hint="Each rank needs its own port in both: begin the second range after the first.",
        )
    return tuple(places)


def _address(text: str, host: str, setting: str) -> str:
    """Check an address, and replace a wildcard host with the engine's host."""
    if text.startswith("ipc://") and len(text) > len("ipc://"):
        return text
    where, _, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not where or not port.isdecimal():
        raise ConfigError(
            f"{setting} is {text!r}, which is not an address",
            hint="Write tcp://host:port or ipc://path, as in the engine's --kv-events-config, or "
            "off.",
        )
    if not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{setting} is {text!r}: the port must be 1 to 65535")
    return f"tcp://{host if where in _ANY_HOST else where}:{port}"


def _of_rank(address: str, rank: int) -> str:
    """Return the address of a rank: ports count up from rank 0, which needs a TCP address."""
    if rank == 0 or not address:
        return address
    if not address.startswith("tcp://"):
        raise ConfigError(f"{address} is one address, but the engine has several ranks")
    where, _, port = address.rpartition(":")
    if int(port) + rank >= 1 << 16:
        raise ConfigError(f"{address} leaves no port for rank {rank}: ports end at 65535")
    return f"{where}:{int(port) + rank}"


_log = logging.getLogger(__name__)

_RETRY_S: Final = 0.2
_REPLY_S: Final = 2.0
"""Longest wait for the next message of a replay; vLLM polls for requests ten times a second."""

_CHECK_S: Final = 5.0
_LONGEST_CHECK_S: Final = 60.0
_QUEUED_BATCHES: Final = 10_000
_HEARTBEAT_MS: Final = 2_000
_SILENCE_MS: Final = 10_000
_END: Final = -1
"""Sequence number, as a signed one, of the message that ends a replay."""

Act = Callable[[Instruction], None]


class RankListener:
    """Keeps listening to one rank. ``run`` it as a task; cancelling the task closes everything.

    Attributes:
        endpoint: addresses of the rank.
        following: state of the rank's stream.
        connected: True while a publisher is connected.
        doubted: set by callers to report a suspected restart of the engine; the listener
            reconnects.
        lag_s: delay of the last live batch by both clocks, in seconds; None before the first batch.
    """

    def __init__(
        self, endpoint: EventEndpoint, act: Act, *, clock: Clock, check_s: float = _CHECK_S
    ) -> None:
        """Create a listener.

        Args:
            endpoint: addresses of the rank.
            act: carries out instructions about blocks, in the event loop.
            clock: wall time for comparison with the engine's time.
            check_s: time between checks for batches that were published but not received.
        """
        self.endpoint = endpoint
        self.following = Following(replays=bool(endpoint.replay))
        self.connected = False
        self.lag_s: float | None = None
        self._act = act
        self._clock = clock
        self._check_s = check_s
        self._ask_from: int | None = None
        self._asked = asyncio.Event()
        self.doubted = asyncio.Event()

    async def run(self) -> None:
        """Connect, listen and connect again, for ever."""
        with zmq.asyncio.Context() as context:
            while True:
                try:
                    await self._connection(context)
                except zmq.ZMQError as error:
                    _log.warning("no KV events from %s: %s", self.endpoint.events, error)
                except Exception:  # noqa: BLE001 - outermost loop: it outlives its own bugs
                    _log.exception("reading KV events from %s failed", self.endpoint.events)
                await asyncio.sleep(_RETRY_S)

    async def _connection(self, context: zmq.asyncio.Context) -> None:
        """Listen on one connection, from the handshake to the end."""
        with _socket(context, zmq.SUB) as events:
            events.set_hwm(_QUEUED_BATCHES)
            events.subscribe(b"")
            with _monitored(events) as monitor:
                events.connect(self.endpoint.events)
                await _until(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)
                self._begin()
                try:
                    await self._listen(context, events, monitor)
                finally:
                    self._end()

    def _begin(self) -> None:
        _log.info("receiving KV events from %s", self.endpoint.events)
        self.connected = True
        self.doubted.clear()
        self._do(self.following.connected())

    def _end(self) -> None:
        self.connected = False
        self._ask_from = None
        self._asked.clear()
        self._do(self.following.disconnected())

    async def _listen(
        self, context: zmq.asyncio.Context, events: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket
    ) -> None:
        """Run all tasks of a connection until the first one ends; its end ends the connection."""
        jobs = {
            asyncio.create_task(self._hear(events)),
            asyncio.create_task(self._replays(context)),
            asyncio.create_task(self._checks()),
            asyncio.create_task(_until(monitor, zmq.EVENT_DISCONNECTED)),
            asyncio.create_task(self._until_doubted()),
        }
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        for job in done:
            job.result()
        _log.info("no more KV events from %s: the connection has ended", self.endpoint.events)

    async def _until_doubted(self) -> None:
        await self.doubted.wait()

    async def _hear(self, events: zmq.asyncio.Socket) -> None:
        while True:
            frames = await events.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                batch = decode_batch(_number(frames[1]), frames[2])
                self.lag_s = max(0.0, self._clock.wall() - batch.time_s)
                self._do(self.following.live(batch))

    async def _checks(self) -> None:
        """Check for newer batches periodically, less often if the engine does not answer."""
        wait_s = self._check_s
        while True:
            await asyncio.sleep(wait_s)
            checks = self.following.counts["checks"]
            self._do(self.following.check())
            await asyncio.sleep(min(wait_s, _REPLY_S))
            answered = self.following.counts["checks"] > checks
            wait_s = self._check_s if answered else min(2 * wait_s, _LONGEST_CHECK_S)

    async def _replays(self, context: zmq.asyncio.Context) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            start, self._ask_from = self._ask_from, None
            if start is not None:
                await self._replay(context, start)

    async def _replay(self, context: zmq.asyncio.Context, start: int) -> None:
        """Request batches and pass them on, until the replay ends or another is requested."""
        with _socket(context, zmq.DEALER) as socket:
            socket.set_hwm(0)  # A ROUTER drops messages over the limit: only the engine sets one.
            socket.connect(self.endpoint.replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while self._ask_from is None:
                try:
                    async with asyncio.timeout(_REPLY_S):
                        frames = await socket.recv_multipart()
                except TimeoutError:
                    self._do(self.following.replay_failed())
                    return
                if len(frames) < 3 or len(frames[-2]) != 8:
                    continue
                if int.from_bytes(frames[-2], "big", signed=True) == _END:
                    self._do(self.following.replay_ended())
                    return
                self._do(self.following.replayed(decode_batch(_number(frames[-2]), frames[-1])))

    def _do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, AskReplay):
                self._ask_from = instruction.start
                self._asked.set()
            else:
                self._act(instruction)


@contextmanager
def _socket(context: zmq.asyncio.Context, kind: int) -> Iterator[zmq.asyncio.Socket]:
    """Open a socket that discards queued messages when closed."""
    socket: zmq.asyncio.Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_ENGINE_EVENT_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    try:
        yield socket
    finally:
        socket.close()


@contextmanager
def _monitored(socket: zmq.asyncio.Socket) -> Iterator[zmq.asyncio.Socket]:
    """Open the socket that reports the connections of another socket."""
    monitor: Any = socket.get_monitor_socket()
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close()


async def _until(monitor: zmq.asyncio.Socket, event: int) -> None:
    """Wait until a connection reports the event."""
    while True:
        message = await recv_monitor_message(monitor)
        if message["event"] & event:
            return


def _number(frame: bytes) -> int:
    return int.from_bytes(frame, "big")
