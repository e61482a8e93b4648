"""A reliable connection to a DMP node over a rail, and the posting of work on several links.

Called by dmp/transport/verbs/lane.py, always from one thread per link. pyverbs never releases the
interpreter lock, so a thread waits by polling with short sleeps: a blocking wait would stop the
whole process, and a thread per rail would only add context switches.

Requests of a queue pair complete in order, so a completion covers all earlier requests. Only every
n-th request and the last request are signalled (SendWindow).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from tierkv.dmp.transport.connection import Peer, PeerConnection
from tierkv.dmp.transport.remote_slots import remote_of
from tierkv.dmp.transport.verbs.device import Device, Op, QueuePair
from tierkv.dmp.transport.verbs.fabric import LocalMemory
from tierkv.dmp.transport.verbs.rails import Piece
from tierkv.dmp.wire import rdma_messages as m
from tierkv.dmp.wire.frame import FrameType
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import RemoteProtocolError, TransportError


@dataclass(slots=True)
class SendWindow:
    """Progress of one list of work requests; their numbers are [0, total).

    Attributes:
        total: number of requests.
        depth: maximum in flight; at least ``signal_every``, or no request would ever complete.
        signal_every: distance of signalled requests.
        posted: requests [0, posted) were posted.
        completed: requests [0, completed) are done.
    """

    total: int
    depth: int
    signal_every: int
    posted: int = 0
    completed: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.signal_every <= self.depth, (self.signal_every, self.depth)

    @property
    def is_finished(self) -> bool:
        """Whether all requests are done."""
        return self.completed == self.total

    @property
    def has_room(self) -> bool:
        """Whether one more request may be posted."""
        return self.posted < self.total and self.posted - self.completed < self.depth

    def post(self) -> tuple[int, bool]:
        """Take the next request; return its number, and whether the request is signalled."""
        assert self.has_room
        number = self.posted
        self.posted += 1
        return number, self.posted == self.total or self.posted % self.signal_every == 0

    def complete(self, number: int) -> None:
        """Note a completion: the request and all before it are done."""
        assert self.completed <= number < self.posted, (number, self.completed, self.posted)
        self.completed = number + 1


T = TypeVar("T")

_EAGER_POLLS: Final = 64
"""Polls before the first sleep: a small transfer on a fast network ends within these polls."""

_FIRST_SLEEP_S: Final = 20e-6
_LONGEST_SLEEP_S: Final = 1e-3


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Limits of one queue pair.

    Attributes:
        depth: maximum number of work requests in flight.
        signal_every: distance of requests that ask for a completion.
        stall_timeout_s: longest time without any completion.
    """

    depth: int = 64
    signal_every: int = 16
    stall_timeout_s: float = 5.0


class NodeAwayError(TransportError):
    """The node itself does not answer: no fault of the rail."""


class RailLink:
    """A queue pair and its control connection, which end together.

    Attributes:
        accept: the node's description of itself and of its memory.
        rail: index of our device in the fabric.
    """

    def __init__(
        self, device: Device, rail: int, peer: Peer, remote_device: str, settings: LinkSettings
    ) -> None:
        """Connect.

        Raises:
            NodeAwayError: the node does not answer.
            CacheError: the node refuses, or the rail does not work.
        """
        self.rail = rail
        self.settings = settings
        self._pair = QueuePair(device, depth=settings.depth, serves=False)
        try:
            self._control = _call_node(peer)
            try:
                ask = m.RdmaConnect(remote_device, self._pair.address)
                reply = self._control.call(FrameType.RDMA_CONNECT, ask.pack())
                self.accept = _trust(m.RdmaAccept.unpack, reply)
                self._pair.connect(self.accept.address)
            except BaseException:
                self._control.close()
                raise
        except BaseException:
            with suppress(TransportError):
                self._pair.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the node still holds its end; a stop of the node is noticed at once."""
        return self._control.is_open

    def post(self, op: Op, piece: Piece, memory: LocalMemory, *, number: int, last: bool) -> None:
        """Start one piece; the ``last`` piece of a group asks for a completion."""
        self._pair.post(
            op,
            number=number,
            signalled=last,
            local=memory.local_end(self.rail, piece.local),
            remote=remote_of(self.accept, piece.at, piece.size),
            size=piece.size,
        )

    def completed(self) -> int:
        """Return the number of the last finished request; -1 if none finished since the last call.

        Raises:
            TransportError: a request failed; the link is unusable.
        """
        last = -1
        for done in self._pair.poll():
            if done.error:
                raise TransportError(f"RDMA: {done.error}")
            last = done.number
        return last

    def close(self) -> None:
        """End both; after the return no byte is read or written for this link any more."""
        with suppress(TransportError):
            self._pair.close()
        self._control.close()


def _call_node(peer: Peer) -> PeerConnection:
    try:
        return PeerConnection(peer)
    except TransportError as error:
        raise NodeAwayError(error.message) from error


def ask_offer(peer: Peer) -> m.RdmaOffer:
    """Ask a node for its RDMA ports.

    Raises:
        CacheError: the node can't be reached, or does not know RDMA.
    """
    connection = PeerConnection(peer)
    try:
        return _trust(m.RdmaOffer.unpack, connection.call(FrameType.RDMA_OFFER, b""))
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class TransferJob:
    """A piece, and the registered memory of its local end."""

    piece: Piece
    memory: LocalMemory


def run_jobs(
    op: Op, shares: Sequence[tuple[RailLink, Sequence[TransferJob]]], clock: Clock
) -> dict[RailLink, TransportError]:
    """Do all jobs on all links at once; each link has several jobs in flight.

    Returns:
        the failed links with the error of each; their jobs may or may not have been done. The
        caller must close these links before reusing the memory.
    """
    runs = [_Run(link, jobs, clock.now()) for link, jobs in shares]
    failed: dict[RailLink, TransportError] = {}
    idle = 0
    while active := [run for run in runs if not run.window.is_finished and run.link not in failed]:
        moved = False
        for run in active:
            try:
                moved |= run.step(op, clock.now())
            except TransportError as error:
                failed[run.link] = error
        idle = 0 if moved else idle + 1
        if idle:
            time.sleep(_pause(idle))
    return failed


class _Run:
    """The jobs of one link."""

    def __init__(self, link: RailLink, jobs: Sequence[TransferJob], now: float) -> None:
        self.link = link
        self._jobs = jobs
        settings = link.settings
        self.window = SendWindow(len(jobs), settings.depth, settings.signal_every)
        self._moved_at = now

    def step(self, op: Op, now: float) -> bool:
        """Post requests up to the limit and note completions; return True on any progress."""
        before = self.window.posted
        while self.window.has_room:
            number, last = self.window.post()
            job = self._jobs[number]
            self.link.post(op, job.piece, job.memory, number=number, last=last)
        done = self.link.completed()
        if done >= 0:
            self.window.complete(done)
        moved = done >= 0 or self.window.posted > before
        if moved:
            self._moved_at = now
        elif now - self._moved_at > self.link.settings.stall_timeout_s:
            raise TransportError("RDMA: no completion in time")
        return moved


def _pause(idle: int) -> float:
    """Return how long to sleep after ``idle`` polls in vain; 0 lets other threads run."""
    if idle <= _EAGER_POLLS:
        return 0.0
    doublings = min(idle - _EAGER_POLLS, 10) - 1
    return min(_FIRST_SLEEP_S * 2.0**doublings, _LONGEST_SLEEP_S)


def _trust(unpack: Callable[[bytearray], T], head: bytearray) -> T:
    try:
        return unpack(head)
    except RemoteProtocolError as error:
        raise TransportError(f"nonsense from the node: {error}") from error
