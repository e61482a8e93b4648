"""Request traces: JSON lines in Mooncake's format, plain or compressed with zstandard, as a stream.

The simulator and the benchmarks read traces only through this module. An unusable line is refused
with its number and the reason, and counted; reading continues. If too many lines are refused, the
file is not a trace.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import zstandard

from tierkv.kvcore.errors import UserError
from tierkv.kvcore.limits import (
    MAX_CHAIN_BLOCKS,
    MAX_CONTEXT_TOKENS,
    MAX_TRACE_LINE_BYTES,
    MAX_TRACE_REFUSED,
    MAX_TRACE_REFUSED_SHARE,
    MAX_TRACE_REQUESTS,
)

DEFAULT_BLOCK_TOKENS: Final = 512
"""Tokens per id in Mooncake's traces."""

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_PACKED_STEP_BYTES: Final = 1 << 10
"""A few packed bytes can unpack to megabytes; the unpacked size of this many always fits in memory.
"""

_SHOWN_REFUSALS: Final = 20
_MAX_ID: Final = 1 << 63
_MAX_TIMESTAMP_MS: Final = 1e15
_FORMAT: Final = (
    'one JSON object per line: {"timestamp": ms, "input_length": tokens, "output_length": tokens,'
    ' "hash_ids": [ids]}'
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        timestamp_s: arrival time, from the trace's origin.
        input_tokens: tokens of the prompt.
        output_tokens: tokens of the answer.
        block_ids: one id per block of the prompt; an id names its whole prefix, so equal ids have
            equal prefixes. A partial last block may be present or missing.
        session_id: id of the conversation; None when the trace has no session.
        turn: number of the turn in the session, from 1; 0 when unknown.
        tool_use: whether the answer ended in a tool call; None when unknown.
        think_time_s: time between the previous answer and this request; None when unknown.
    """

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    session_id: str | None = None
    turn: int = 0
    tool_use: bool | None = None
    think_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A refused line and the reason; lines count from 1."""

    line: int
    reason: str


@dataclass(slots=True)
class TraceReader:
    """Reads one file; iterate over the reader once.

    Attributes:
        path: path of the trace.
        lines: number of lines so far, without empty lines.
        refused_lines: number of refused lines so far.
        refused: the first refusals, for a report.
    """

    path: Path
    lines: int = 0
    refused_lines: int = 0
    refused: list[RefusedLine] = field(default_factory=list)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of the file.

        Raises:
            UserError: the file does not exist, has another format, or has no request.
        """
        known_ids: dict[int, int] = {}
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(_lines(_decompressed(file)), start=1):
                    request = self._parsed(number, line, known_ids)
                    if request is not None:
                        yield request
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"trace {self.path} can't be read: {reason}") from error
        except zstandard.ZstdError as error:
            raise UserError(
                f"trace {self.path} is cut off or damaged after line {self.lines}: {error}",
                hint="Fetch it again.",
            ) from error
        self._judge()

    def _parsed(self, number: int, line: bytes, known_ids: dict[int, int]) -> Request | None:
        if not line.strip():
            return None
        self.lines += 1
        try:
            if self.lines - self.refused_lines > MAX_TRACE_REQUESTS:
                raise ValueError(f"more than {MAX_TRACE_REQUESTS} requests")
            return _request(line, known_ids)
        except (ValueError, RecursionError) as error:
            self.refused_lines += 1
            if len(self.refused) < _SHOWN_REFUSALS:
                self.refused.append(RefusedLine(number, str(error)))
            if self.refused_lines == self.lines == MAX_TRACE_REFUSED:
                raise self._not_a_trace() from None
            return None

    def _judge(self) -> None:
        too_many = max(MAX_TRACE_REFUSED, self.lines * MAX_TRACE_REFUSED_SHARE)
        if self.refused_lines == self.lines or self.refused_lines > too_many:
            raise self._not_a_trace()

    def _not_a_trace(self) -> UserError:
        detail = "; ".join(f"line {bad.line}: {bad.reason}" for bad in self.refused[:3])
        return UserError(
            f"{self.refused_lines} of {self.lines} lines of {self.path} are no requests",
            detail=detail,
            hint=f"A trace has {_FORMAT}, plain or compressed with zstd.",
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory, in the order of its timestamps.

    Attributes:
        requests: the requests; equal timestamps keep the order of the file.
        refused_lines: number of refused lines.
        refused: the first refused lines.
    """

    requests: tuple[Request, ...]
    refused_lines: int = 0
    refused: tuple[RefusedLine, ...] = ()

    @property
    def block_references(self) -> int:
        """Blocks of all prompts."""
        return sum(len(request.block_ids) for request in self.requests)

    @property
    def unique_blocks(self) -> int:
        """Different blocks: the size of a cache without evictions."""
        return len(set().union(*(request.block_ids for request in self.requests)))


def load_trace(path: Path | str) -> Trace:
    """Read a whole trace.

    Raises:
        UserError: as TraceReader.
    """
    reader = TraceReader(Path(path))
    requests = in_order(reader)
    return Trace(requests, reader.refused_lines, tuple(reader.refused))


def in_order(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Return requests by timestamp; requests with equal timestamps keep their order."""
    return tuple(sorted(requests, key=lambda request: request.timestamp_s))


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    compressed = file.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
    file.seek(0)
    if not compressed:
        return file
    return io.BufferedReader(_Unpacked(file), 1 << 20)


class _Unpacked(io.RawIOBase):
    """The content of zstd frames; a truncated frame is an error, unlike in zstandard's reader."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._packed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(_PACKED_STEP_BYTES)
            if not self._packed:
                break
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data
        if not self._ready and not self._frame.eof:
            raise zstandard.ZstdError("the last frame has no end")
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines; a line beyond the limit is truncated and becomes unreadable."""
    while line := file.readline(MAX_TRACE_LINE_BYTES):
        rest = line
        while len(rest) == MAX_TRACE_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_TRACE_LINE_BYTES)
        yield line


def _request(line: bytes, known_ids: dict[int, int]) -> Request:
    """Parse one line.

    Raises:
        ValueError: with the reason.
    """
    if len(line) == MAX_TRACE_LINE_BYTES and not line.endswith(b"\n"):
        raise ValueError(f"longer than {MAX_TRACE_LINE_BYTES} bytes")
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return Request(
        timestamp_s=_number(row, "timestamp", _MAX_TIMESTAMP_MS) / 1000.0,
        input_tokens=_tokens(row, "input_length"),
        output_tokens=_tokens(row, "output_length"),
        block_ids=_ids(row, known_ids),
        session_id=_session(row),
        turn=_tokens(row, "turn") if row.get("turn") is not None else 0,
        tool_use=row["tool_use"] if isinstance(row.get("tool_use"), bool) else None,
        think_time_s=_think_time(row),
    )


def _number(row: dict[str, object], name: str, most: float) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {_shown(value)}")
    if not (math.isfinite(value) and 0 <= value <= most):
        raise ValueError(f"{name} must be between 0 and {most:g}, got {_shown(value)}")
    return value


def _tokens(row: dict[str, object], name: str) -> int:
    value = _number(row, name, MAX_CONTEXT_TOKENS)
    if value != int(value):
        raise ValueError(f"{name} must be a whole number, got {_shown(value)}")
    return int(value)


def _ids(row: dict[str, object], known_ids: dict[int, int]) -> tuple[int, ...]:
    """Return the ids; equal ids share one object, because most ids occur many times."""
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids must be a list, got {_shown(ids)}")
    if len(ids) > MAX_CHAIN_BLOCKS:
        raise ValueError(f"hash_ids has {len(ids)} blocks, at most {MAX_CHAIN_BLOCKS}")
    for value in ids:
        if type(value) is not int or not 0 <= value < _MAX_ID:
            raise ValueError(f"hash_ids must be whole numbers from 0, got {_shown(value)}")
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids has an id twice, but an id names its whole prefix")
    return tuple([known_ids.setdefault(value, value) for value in ids])


def _session(row: dict[str, object]) -> str | None:
    value = row.get("session_id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"session_id must be a number or a text, got {_shown(value)}")
    return str(value)[:128]


def _think_time(row: dict[str, object]) -> float | None:
    value = row.get("think_time")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
