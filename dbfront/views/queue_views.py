"""Rows of the views ``tierkv.queues`` and ``tierkv.queue_pending``.

dbfront/statement/server.py calls ``queue_rows`` for both SQL doors.
"""

from __future__ import annotations

import json
from typing import Final

from tierkv.dbfront.queue.work_log import QueueState, WorkLog
from tierkv.kvcore import limits
from tierkv.sql.views import Row, timestamp

QUEUE_VIEWS: Final = frozenset({"queues", "queue_pending"})


async def queue_rows(view: str, log: WorkLog) -> list[Row]:
    """Return the rows of a view.

    Args:
        view: one of QUEUE_VIEWS.
        log: has the queues.

    Raises:
        QueueLostError: the log can't be reached.
    """
    states = await log.queues()
    if view == "queues":
        return [row for state in states for row in _groups(state)]
    return [row for state in states for row in await _entries(log, state)]


def _groups(state: QueueState) -> list[Row]:
    common: Row = {"queue": state.name, "length": state.length, "dead": state.dead}
    if not state.groups:  # No worker has looked yet.
        nothing: Row = {"group_name": None, "pending": 0, "consumers": 0, "oldest_idle_s": None}
        return [common | {"waiting": state.length} | nothing]
    return [
        common
        | {
            "group_name": group.name,
            "waiting": group.waiting,
            "pending": group.pending,
            "consumers": group.consumers,
            "oldest_idle_s": group.oldest_idle_s,
        }
        for group in state.groups
    ]


async def _entries(log: WorkLog, state: QueueState) -> list[Row]:
    rows: list[Row] = []
    for group in state.groups:
        for entry in await log.pending(state.name, group.name, count=limits.MAX_QUEUE_ROWS):
            rows.append(
                {
                    "queue": state.name,
                    "group_name": group.name,
                    "entry": entry.id,
                    "state": "pending",
                    "consumer": entry.consumer,
                    "idle_s": entry.idle_s,
                    "deliveries": entry.deliveries,
                    "reason": None,
                    "died_at": None,
                }
                | _job(entry.body)
            )
    for letter in await log.dead(state.name, count=limits.MAX_QUEUE_ROWS):
        rows.append(
            {
                "queue": state.name,
                "group_name": letter.group,
                "entry": letter.id,
                "state": "dead",
                "consumer": None,
                "idle_s": None,
                "deliveries": letter.deliveries,
                "reason": letter.reason,
                "died_at": timestamp(letter.at_s),
            }
            | _job(letter.body)
        )
    return rows


def _job(body: str) -> Row:
    """Return what an entry is about: a job and its owner, or a response and its tenant."""
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    told = fields if isinstance(fields, dict) else {}
    return {
        "job": told.get("name", told.get("response_id")),
        "owner": told.get("owner", told.get("tenant")),
    }
