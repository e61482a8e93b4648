"""Traces: what a line means, which lines are refused and why, and when a file is no trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from tierkv.kvcore.errors import UserError
from tierkv.kvcore.limits import MAX_CHAIN_BLOCKS, MAX_TRACE_LINE_BYTES
from tierkv.simulator.trace import Request, TraceReader, load_trace

GOOD = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}
AGENT = GOOD | {"session_id": 20672, "turn": 3, "tool_use": True, "think_time": 2.5}


def line(**changes: object) -> bytes:
    return json.dumps(GOOD | changes).encode() + b"\n"


def written(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_plain_and_compressed_are_the_same(tmp_path: Path) -> None:
    plain = written(tmp_path, line(), json.dumps(AGENT).encode())
    packed = tmp_path / "packed"
    packed.write_bytes(zstandard.compress(plain.read_bytes()))
    assert load_trace(plain) == load_trace(packed)
    assert load_trace(plain).requests == (
        Request(1.5, 700, 3, (7, 8)),
        Request(1.5, 700, 3, (7, 8), "20672", 3, True, 2.5),
    )


def test_frames_behind_one_another_are_one_file(tmp_path: Path) -> None:
    path = written(tmp_path, zstandard.compress(line()), zstandard.compress(line(timestamp=9)))
    assert len(load_trace(path).requests) == 2


def test_requests_come_in_the_order_of_their_timestamps(tmp_path: Path) -> None:
    path = written(tmp_path, line(hash_ids=[1]), line(timestamp=0), line(hash_ids=[2]))
    assert [r.block_ids for r in load_trace(path).requests] == [(7, 8), (1,), (2,)]


def test_sizes_are_counted(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, line(), line(hash_ids=[7, 9]), line(hash_ids=[])))
    assert (trace.block_references, trace.unique_blocks) == (4, 3)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{not json\n", "Expecting"),
        (b"[1, 2]\n", "not a JSON object"),
        (b"\xff\xfe\n", "utf"),
        (b"[" * 100_000 + b"\n", "recursion"),
        (line(timestamp="soon"), "timestamp must be a number"),
        (line(timestamp=-1), "timestamp must be between"),
        (line(timestamp=float("nan")), "timestamp must be between"),
        (line(timestamp=True), "timestamp must be a number"),
        (line(input_length=1.5), "input_length must be a whole number"),
        (line(input_length=10**30), "input_length must be between"),
        (line(output_length=None), "output_length must be a number"),
        (line(hash_ids=None), "hash_ids must be a list"),
        (line(hash_ids=[1, "2"]), "hash_ids must be whole numbers"),
        (line(hash_ids=[1, -2]), "hash_ids must be whole numbers"),
        (line(hash_ids=[True]), "hash_ids must be whole numbers"),
        (line(hash_ids=[4, 4]), "twice"),
        (line(hash_ids=list(range(MAX_CHAIN_BLOCKS + 1))), "at most 8192"),
        (line(session_id=[1]), "session_id must be"),
        (b'{"timestamp":' + b"1" * MAX_TRACE_LINE_BYTES + b"}\n", "longer than"),
    ],
)
def test_a_bad_line_is_refused_with_its_reason_and_the_rest_goes_on(
    tmp_path: Path, bad: bytes, reason: str
) -> None:
    trace = load_trace(written(tmp_path, line(), b"\n", bad, line()))
    assert len(trace.requests) == 2 and trace.refused_lines == 1
    assert trace.refused[0].line == 3
    assert reason in trace.refused[0].reason


def test_unknown_think_time_and_odd_extras_are_no_reason_to_refuse(tmp_path: Path) -> None:
    path = written(tmp_path, line(think_time=-1, tool_use="yes", colour="red"))
    request = load_trace(path).requests[0]
    assert request.think_time_s is None and request.tool_use is None


def test_ten_bad_lines_at_the_start_are_another_format(tmp_path: Path) -> None:
    path = written(tmp_path, *[b"a,b,c\n"] * 10, *[line()] * 5000)
    with pytest.raises(UserError, match="10 of 10 lines") as caught:
        load_trace(path)
    assert "hash_ids" in caught.value.hint and "line 1:" in caught.value.detail


def test_more_than_one_percent_is_too_many(tmp_path: Path) -> None:
    lines = [line()] * 1000 + [b"?\n"] * 11
    with pytest.raises(UserError, match="11 of 1011"):
        load_trace(written(tmp_path, *lines))
    assert load_trace(written(tmp_path, *lines, *lines[:1000])).refused_lines == 11


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 of 0 lines"):
        load_trace(written(tmp_path, b"\n"))
    with pytest.raises(UserError, match="can't be read: No such file"):
        load_trace(tmp_path / "nowhere.jsonl")


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    packed = zstandard.compress(b"".join(line(hash_ids=[i, i + 1]) for i in range(9000)))
    with pytest.raises(UserError, match="cut off or damaged"):
        load_trace(written(tmp_path, packed[: len(packed) // 2]))


def test_a_stream_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    reader = TraceReader(written(tmp_path, line(), b"?\n", line()))
    first = next(iter(reader))
    assert first.block_ids == (7, 8)
    assert (reader.lines, reader.refused_lines) == (1, 0)
