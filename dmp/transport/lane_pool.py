"""The lanes of one DMP node: as many threads as there are lanes transfer at once, others wait.

Called by dmp/transport/verbs/node.py. Lanes keep their connections; the bounce buffer is lent to a
call from those all nodes share, so that memory grows with threads and not with nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tierkv.dmp.transport.verbs.fabric import Bounce
from tierkv.dmp.transport.verbs.lane import Lane, VerbsSettings
from tierkv.dmp.transport.verbs.rail_board import NoRailError, RailBoard
from tierkv.kvcore.errors import TransportError


class LanePool:
    """Lanes to one node; thread-safe."""

    def __init__(self, board: RailBoard, settings: VerbsSettings, room: int) -> None:
        self._board = board
        self._settings = settings
        self._room = room
        self._changed = threading.Condition()
        self._idle: list[Lane] = []
        self._made = 0
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[Lane]:
        """Give a lane of one's own.

        Raises:
            NoRailError: none became free in time, or no memory could be registered.
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
        """Close idle lanes now, and busy ones when they are given back."""
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

    def _take(self) -> Lane:
        with self._changed:
            self._changed.wait_for(self._has_one, self._settings.wait_s)
            if self._closed:
                raise TransportError(f"the connection to {self._board.peer.node_id} is closed")
            if self._idle:
                return self._idle.pop()
            if self._made >= self._settings.lanes:
                raise NoRailError("all RDMA lanes are busy")
            self._made += 1
            return Lane(self._made, self._board, self._settings, self._room)

    def _has_one(self) -> bool:
        return self._closed or bool(self._idle) or self._made < self._settings.lanes
