"""Whole buffers in and out of a socket, straight between kernel and segment memory.

Called by dmp/session.py and dmp/transport/connection.py. Never copies in Python; raises OSError
(timeouts included) and EOFError only.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

Buffer = bytes | bytearray | memoryview
_IOV_MAX: Final = 1024
_SCRATCH_BYTES: Final = 256 << 10


def tune(sock: socket.socket) -> None:
    """Send small frames at once; keep half-dead peers detectable."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def receive_into(sock: socket.socket, view: memoryview, *, received: int = 0) -> None:
    """Fill ``view`` from offset ``received``; EOFError when the peer closed before that."""
    while received < len(view):
        count = sock.recv_into(view[received:])
        if count == 0:
            raise EOFError("the peer closed the connection")
        received += count


def receive(sock: socket.socket, size: int) -> bytearray:
    """Return exactly ``size`` bytes; the caller has bounded it."""
    data = bytearray(size)
    with memoryview(data) as view:
        receive_into(sock, view)
    return data


def discard(sock: socket.socket, size: int) -> None:
    """Read and forget ``size`` bytes, so that the next frame starts where it should."""
    scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
    while size > 0:
        count = sock.recv_into(scratch[: min(size, len(scratch))])
        if count == 0:
            raise EOFError("the peer closed the connection")
        size -= count


def send_all(sock: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send all parts in order with as few system calls as the kernel allows."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first : first + _IOV_MAX])
        while sent:
            if sent < len(views[first]):
                views[first] = views[first][sent:]
                break
            sent -= len(views[first])
            first += 1
