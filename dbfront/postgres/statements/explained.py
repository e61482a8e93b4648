"""Putting our part of an EXPLAIN into PostgreSQL's answer, whose one column is ``QUERY PLAN``.

As text it is rows of lines, and ours come behind them. As JSON it is one value, a list of one
object, which gets one more member.
"""

from __future__ import annotations

import json
import re
from typing import Final

from tierkv.dbfront.explain.plan import Explanation, ai_plan_json, ai_plan_lines
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.conversation import LENGTH
from tierkv.dbfront.postgres.wire.exchange import Reply

_DATA_ROW: Final = b"D"

TAKEN_BACK: Final = "AI Plan: above is a run with NULL for every answer, which was taken back"
"""The first line of an estimate: PostgreSQL finds what would be asked by running it."""


_ACTUAL_ROWS: Final = re.compile(rb"rows=(\d+)(?:\.\d+)? loops=")


def actual_rows(reply: Reply) -> int:
    """Read from an EXPLAIN ANALYZE how many rows its statement gave."""
    value = reply.first_row()[0] or b""
    if not value.startswith(b"["):
        found = _ACTUAL_ROWS.search(value)
        return int(found[1]) if found else 0
    return int(json.loads(value)[0]["Plan"].get("Actual Rows", 0))


def add_ai_plan(reply: Reply, told: Explanation, *, as_json: bool) -> None:
    """Add our part of the plan to an EXPLAIN's answer."""
    if as_json:
        _add_member(reply, told)
        return
    lines = ai_plan_lines(told)
    if told.estimate is not None:
        lines.insert(0, TAKEN_BACK)
    for line in lines:
        reply.output.add(messages.data_row([line.encode()]))


def _add_member(reply: Reply, told: Explanation) -> None:
    frames = _frames(b"".join(reply.output.pieces()))
    reply.output.close()
    for frame in frames:
        if frame[:1] == _DATA_ROW:
            (value,) = messages.row_values(frame)
            document = json.loads(value or b"[]")
            document[0]["AI Plan"] = ai_plan_json(told)
            frame = messages.data_row([json.dumps(document, indent=2).encode()])
        reply.output.add(frame)


def _frames(data: bytes) -> list[bytes]:
    frames: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 1 + LENGTH(data, at + 1)[0]
        frames.append(data[at:end])
        at = end
    return frames
