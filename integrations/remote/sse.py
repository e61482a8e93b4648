"""Server-sent events out of bytes, as engines stream their answers.

Pure. Only line feeds end a line here: JSON texts may hold other characters that some take for
line ends.
"""

from __future__ import annotations

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError


class EventDecoder:
    """Cuts a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def push(self, received: bytes) -> list[str]:
        """Take bytes; return the data of each event that is whole.

        Raises:
            RemoteProtocolError: an event is longer than any should be, or no UTF-8.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        self._check(len(self._rest) + self._size)
        return [data for line in lines if (data := self._take(line.rstrip(b"\r"))) is not None]

    def _take(self, line: bytes) -> str | None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(value)
                self._check(self._size)
            return None
        if not self._data:
            return None
        data, self._data, self._size = b"\n".join(self._data), [], 0
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"an engine's event is no UTF-8: {error}") from error

    def _check(self, size: int) -> None:
        if size > limits.MAX_ENGINE_REPLY_BYTES:
            raise RemoteProtocolError(
                f"an engine's event exceeds {limits.MAX_ENGINE_REPLY_BYTES} bytes"
            )
