"""A connected socket that moves whole buffers straight between kernel and segment memory.

Called by dmp/server/client_connection.py and dmp/transport/connection.py. No bytes are copied in
Python. Every call as a whole has a deadline, so a peer that drips bytes gains no time. Raises only
OSError (timeouts included) and EOFError.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final

Buffer = bytes | bytearray | memoryview
_IOV_MAX: Final = 1024
_SCRATCH_BYTES: Final = 256 << 10
_TIMEVAL: Final = struct.Struct("@ll")


class Wire:
    """A plain TCP connection.

    The socket is blocking, with SO_RCVTIMEO and SO_SNDTIMEO. Python's own timeouts would cost a
    poll() per call and make MSG_WAITALL useless; the kernel counts all waiting inside one call.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the maximum duration of each further call."""
        self.timeout_s = timeout_s
        self._limit(socket.SO_RCVTIMEO, timeout_s)
        self._limit(socket.SO_SNDTIMEO, timeout_s)

    def receive_some(self, view: memoryview) -> int:
        """Receive the bytes that have arrived, at least one; 0 when the peer closed its side."""
        try:
            return self._sock.recv_into(view)
        except BlockingIOError as error:
            raise TimeoutError("timed out: the peer is silent") from error

    def receive_into(self, view: memoryview, *, began: float = 0.0) -> None:
        """Fill ``view``; the deadline counts from ``began`` (0 means now)."""
        began = began or time.monotonic()
        try:
            got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("timed out: the peer is silent") from error
        if got != len(view):
            self._receive_rest(view, got, began)

    def receive_all(self, views: Sequence[memoryview], *, began: float = 0.0) -> None:
        """Fill all views in order, with one system call if the bytes keep coming."""
        began = began or time.monotonic()
        for first in range(0, len(views), _IOV_MAX):
            some = views[first : first + _IOV_MAX]
            try:
                got = self._sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                raise TimeoutError("timed out: the peer is silent") from error
            for view in some:
                if got < len(view):
                    self._receive_rest(view, max(got, 0), began)
                got -= len(view)

    def ask(self, request: bytes, views: Sequence[memoryview]) -> int:
        """Send a small request and receive the first packet of the reply.

        Returns:
            Number of bytes received into ``views``; at least one.
        """
        self._sock.sendall(request)
        try:
            got = self._sock.recvmsg_into(views)[0]
        except BlockingIOError as error:
            raise TimeoutError("timed out: the peer is silent") from error
        if not got:
            raise EOFError("the peer closed the connection")
        return got

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send all parts in order with as few system calls as the kernel allows."""
        began = time.monotonic()
        for first in range(0, len(parts), _IOV_MAX):
            some = parts[first : first + _IOV_MAX] if len(parts) > _IOV_MAX else parts
            sent = self._send_once(some)
            if sent != sum([len(part) for part in some]):
                self._send_rest(some, sent, began)

    def end_sending(self) -> None:
        """Tell the peer that no more bytes follow."""
        self._sock.shutdown(socket.SHUT_WR)

    @property
    def is_open(self) -> bool:
        """True if the kernel does not know of a close by the peer; never waits."""
        try:
            # Not SSLSocket's own recv, which accepts no flags. MSG_PEEK takes no bytes, so no bytes
            # are lost.
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return socket.socket.recv(self._sock, 1, flags) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _send_once(self, parts: Sequence[Buffer]) -> int:
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError as error:
            raise TimeoutError("timed out: the peer does not read") from error

    def _send_rest(self, parts: Sequence[Buffer], sent: int, began: float) -> None:
        """Continue after a short write (because of a timeout or a signal)."""
        left = [memoryview(part) for part in parts]
        try:
            while left:
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]
                    self._limit(socket.SO_SNDTIMEO, self.time_left(began))
                    sent = self._send_once(left)
        finally:
            self._limit(socket.SO_SNDTIMEO, self.timeout_s)

    def _receive_rest(self, view: memoryview, got: int, began: float) -> None:
        """Continue after a short read (the peer left, a timeout, or a signal)."""
        try:
            while got < len(view):
                self._limit(socket.SO_RCVTIMEO, self.time_left(began))
                try:
                    count = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
                except BlockingIOError as error:
                    raise TimeoutError("timed out: the peer is slow") from error
                if count == 0:
                    raise EOFError("the peer closed the connection")
                got += count
        finally:
            self._limit(socket.SO_RCVTIMEO, self.timeout_s)

    def time_left(self, began: float) -> float:
        """Return the rest of a deadline that counts from ``began``, or raise TimeoutError."""
        left = began + self.timeout_s - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("timed out: the peer is slow")
        return left

    def _limit(self, option: int, seconds: float) -> None:
        # Zero would mean no limit.
        micros = max(1_000, int(seconds * 1e6))
        value = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        # The peer may have closed the connection already; the next call will report that.
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)


class TlsWire(Wire):
    """A connection under TLS: no scatter or gather, one record after another."""

    _sock: ssl.SSLSocket

    def set_timeout(self, timeout_s: float) -> None:
        """Set the maximum duration of each further call."""
        self.timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def receive_into(self, view: memoryview, *, began: float = 0.0) -> None:
        """Fill ``view``; the deadline counts from ``began`` (0 means now)."""
        self._receive_rest(view, 0, began or time.monotonic())

    def receive_all(self, views: Sequence[memoryview], *, began: float = 0.0) -> None:
        """Fill all views in order."""
        began = began or time.monotonic()
        for view in views:
            self._receive_rest(view, 0, began)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send all parts in order; if all parts are small, as one record."""
        small = b"".join(bytes(part) for part in parts if len(part) < 4096)
        if sum(map(len, parts)) == len(small):
            self._sock.sendall(small)
            return
        began = time.monotonic()
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _SCRATCH_BYTES):
                self._sock.sendall(view[start : start + _SCRATCH_BYTES])
                self.time_left(began)

    def ask(self, request: bytes, views: Sequence[memoryview]) -> int:
        """Send a small request and fill the first view with the beginning of the reply."""
        self._sock.sendall(request)
        self._receive_rest(views[0], 0, time.monotonic())
        return len(views[0])

    def end_sending(self) -> None:
        """Tell the peer that no bytes follow (the TLS closing alert would wait for a reply)."""
        self._sock.shutdown(socket.SHUT_WR)

    def _receive_rest(self, view: memoryview, got: int, began: float) -> None:
        while got < len(view):
            count = self._sock.recv_into(view[got:])
            if count == 0:
                raise EOFError("the peer closed the connection")
            got += count
            if got < len(view):
                self.time_left(began)


def discard(wire: Wire, size: int, *, began: float = 0.0) -> None:
    """Read and forget ``size`` bytes, so that the next frame starts at the right place."""
    began = began or time.monotonic()
    with memoryview(bytearray(min(size, _SCRATCH_BYTES))) as scratch:
        while size > 0:
            count = min(size, len(scratch))
            wire.receive_into(scratch[:count], began=began)
            size -= count
            if size > 0:
                wire.time_left(began)
