"""A lane moves bytes of one thread to and from a DMP node: a link per rail and a bounce buffer.

Called by dmp/transport/verbs/node.py. A lane serves one thread at a time, so as many threads as
lanes transfer at once, and other threads wait. Jobs of a failed link move to the other links. After
an error a link is never used again, because its queue pair is unusable.

Lanes keep their connections. Each call borrows a bounce buffer from a stock that all nodes share,
so memory grows with threads and not with nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tierkv.dmp.transport.inproc import copy_bytes
from tierkv.dmp.transport.verbs.device import Op
from tierkv.dmp.transport.verbs.fabric import Bounce
from tierkv.dmp.transport.verbs.link import (
    LinkSettings,
    NodeAwayError,
    RailLink,
    TransferJob,
    run_jobs,
)
from tierkv.dmp.transport.verbs.rail_board import NoRailError, Rail, RailBoard
from tierkv.dmp.transport.verbs.rails import NumaPlace, Piece, cut, join, share_out
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError, StaleEpochError, TransportError
from tierkv.kvcore.ids import Incarnation

_TRIES = 2
"""Failures of a rail within a call after which the call gives up the rail: the first failure may be
a link that died unseen."""


@dataclass(frozen=True, slots=True)
class VerbsSettings:
    """How a client moves bytes over RDMA.

    Attributes:
        lanes: number of threads that transfer at once; each has a queue pair per rail.
        bounce_bytes: registered memory per call for buffers that are not registered themselves.
        chunk_bytes: longest work request; rails share a transfer in chunks of this size.
        stripe_bytes: smaller transfers stay on one rail.
        wait_s: how long a call waits for a free lane.
        link: settings of one queue pair.
    """

    lanes: int = 4
    bounce_bytes: int = 8 << 20
    chunk_bytes: int = 1 << 20
    stripe_bytes: int = 256 << 10
    wait_s: float = 5.0
    link: LinkSettings = field(default_factory=LinkSettings)


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """The caller's bytes and their offset in the segment.

    Attributes:
        local: address of the bytes.
        size: number of bytes.
        at: offset in the segment file.
        view: the bytes, if the processor can reach them; None for GPU memory.
    """

    local: int
    size: int
    at: int
    view: memoryview | None = None


@dataclass(slots=True)
class Wave:
    """Jobs that run together, and the related copies between bounce buffer and caller.

    Attributes:
        jobs: work requests.
        copies: (part of the bounce buffer, the caller's bytes).
    """

    jobs: list[TransferJob] = field(default_factory=list)
    copies: list[tuple[memoryview, memoryview]] = field(default_factory=list)


class VerbsLane:
    """Links and bounce buffer of one thread at a time.

    Attributes:
        bounce: registered memory, lent for one call.
    """

    bounce: Bounce

    def __init__(self, number: int, board: RailBoard, settings: VerbsSettings, room: int) -> None:
        self._number = number
        self._board = board
        self._settings = settings
        self._links: dict[Rail, RailLink] = {}
        self._room = room

    def link(self, incarnation: Incarnation) -> RailLink:
        """Return any link to an incarnation of the node.

        Raises:
            StaleEpochError: the node is in another incarnation.
            NoRailError: no rail works.
            CacheError: the node does not answer.
        """
        return self._connected(self.bounce.memory.place, incarnation, Counter())[0][1]

    def move(
        self, op: Op, jobs: Sequence[TransferJob], incarnation: Incarnation, clock: Clock
    ) -> None:
        """Do all jobs on any working rails.

        Raises:
            StaleEpochError, NoRailError, CacheError: as ``link``; part of the jobs may have been
                done.
        """
        failures: Counter[Rail] = Counter()
        left = list(jobs)
        while left:
            links = self._connected(left[0].memory.place, incarnation, failures)
            sizes = [job.piece.size for job in left]
            if sum(sizes) < self._settings.stripe_bytes:
                links = [links[self._number % len(links)]]
            shares = share_out(left, sizes, [link for _, link in links])
            try:
                failed = run_jobs(op, shares, clock)
            except BaseException:
                self._drop_all()  # No bytes may land in memory that the caller uses again.
                raise
            rails = {link: rail for rail, link in links}
            for link, _ in shares:
                if link in failed:
                    self._fail(rails[link], failed[link], failures)
                else:
                    self._board.succeeded(rails[link])
            left = [job for link, share in shares if link in failed for job in share]

    def waves(self, spans: Sequence[MemorySpan]) -> list[Wave]:
        """Plan the transfer between the caller's bytes and offsets in the segment.

        Registered memory is used in place; other memory goes through the bounce buffer, in as many
        waves as necessary.

        Raises:
            TransportError: bytes without a view are not registered.
        """
        waves = [Wave()]
        start = used = self._room
        for span in spans:
            memory = self._board.fabric.find(span.local, span.size)
            if memory is not None:
                pieces = cut(Piece(span.local, span.at, span.size), self._settings.chunk_bytes)
                waves[-1].jobs += [TransferJob(piece, memory) for piece in pieces]
                continue
            if span.view is None:
                raise TransportError("device memory must be registered before bytes land in it")
            view, at = span.view, span.at
            done = 0
            while done < view.nbytes:
                if used == len(self.bounce.view):
                    waves.append(Wave())
                    used = start
                size = min(view.nbytes - done, len(self.bounce.view) - used)
                size = min(size, self._settings.chunk_bytes)
                piece = Piece(self.bounce.memory.start + used, at + done, size)
                waves[-1].jobs.append(TransferJob(piece, self.bounce.memory))
                part = self.bounce.view[used : used + size]
                waves[-1].copies.append((part, view[done : done + size]))
                done, used = done + size, used + size
        return waves

    def own_jobs(self, pieces: Sequence[Piece]) -> list[TransferJob]:
        """Make jobs of pieces in the bounce buffer."""
        return [TransferJob(piece, self.bounce.memory) for piece in join(pieces)]

    def close(self) -> None:
        """Close all links."""
        self._drop_all()

    def _connected(
        self, place: NumaPlace, incarnation: Incarnation, failures: Counter[Rail]
    ) -> list[tuple[Rail, RailLink]]:
        while True:
            without = [rail for rail, count in failures.items() if count >= _TRIES]
            rails = self._board.usable(place, without=without)
            links = [(r, self._link_of(r, incarnation, failures)) for r in rails]
            found = [(rail, link) for rail, link in links if link is not None]
            if found:
                return found

    def _link_of(
        self, rail: Rail, incarnation: Incarnation, failures: Counter[Rail]
    ) -> RailLink | None:
        link = self._links.get(rail)
        if link is not None and not (
            link.is_alive and link.accept.incarnation >= incarnation
        ):  # The node stopped or restarted.
            self._drop(rail)
            link = None
        if link is None:
            board, device = self._board, self._board.fabric.devices[rail.local]
            try:
                link = RailLink(device, rail.local, board.peer, rail.remote, self._settings.link)
            except NodeAwayError as error:
                raise NoRailError(error.message) from error
            except CacheError as error:
                failures[rail] += _TRIES
                board.failed(rail, error)
                return None
            self._links[rail] = link
        if link.accept.incarnation != incarnation:
            raise StaleEpochError(
                f"{self._board.peer.node_id} is in incarnation {link.accept.incarnation}, "
                f"not {incarnation}"
            )
        return link

    def _fail(self, rail: Rail, error: TransportError, failures: Counter[Rail]) -> None:
        self._drop(rail)
        failures[rail] += 1
        self._board.failed(rail, error)

    def _drop_all(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _drop(self, rail: Rail) -> None:
        self._links.pop(rail).close()


def copy_out(wave: Wave) -> None:
    """Copy the read bytes from the bounce buffer to the caller."""
    for part, view in wave.copies:
        copy_bytes(view, part)


def copy_in(wave: Wave) -> None:
    """Copy the bytes to write from the caller into the bounce buffer."""
    for part, view in wave.copies:
        copy_bytes(part, view)


class LanePool:
    """Lanes to one node; thread-safe."""

    def __init__(self, board: RailBoard, settings: VerbsSettings, room: int) -> None:
        self._board = board
        self._settings = settings
        self._room = room
        self._changed = threading.Condition()
        self._idle: list[VerbsLane] = []
        self._made = 0
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[VerbsLane]:
        """Lend an exclusive lane.

        Raises:
            NoRailError: no lane became free in time, or no memory could be registered.
            TransportError: the pool is closed.
        """
        lane = self._take()
        try:
            with ExitStack() as stack:
                lane.bounce = self._lend(stack)
                yield lane
        finally:
            with self._changed:
                keep = not self._closed
                if keep:
                    self._idle.append(lane)
                self._changed.notify()
            if not keep:
                lane.close()

    def close(self) -> None:
        """Close idle lanes now, and busy lanes when they are returned."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for lane in idle:
            lane.close()

    def _lend(self, stack: ExitStack) -> Bounce:
        size = self._room + self._settings.bounce_bytes
        try:
            return stack.enter_context(self._board.fabric.bounce(size))
        except TransportError as error:
            raise NoRailError(error.message) from error

    def _take(self) -> VerbsLane:
        with self._changed:
            self._changed.wait_for(self._has_one, self._settings.wait_s)
            if self._closed:
                raise TransportError(f"the connection to {self._board.peer.node_id} is closed")
            if self._idle:
                return self._idle.pop()
            if self._made >= self._settings.lanes:
                raise NoRailError("all RDMA lanes are busy")
            self._made += 1
            return VerbsLane(self._made, self._board, self._settings, self._room)

    def _has_one(self) -> bool:
        return self._closed or bool(self._idle) or self._made < self._settings.lanes
