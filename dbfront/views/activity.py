"""What sessions are doing, for the admin view tierkv.stat_activity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.accounts.statement_entry import identify
from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.views.rows import Row, timestamp

LONGEST_SHOWN: Final = 65_536
"""Characters of another user's statement that are looked through for its normal form."""


@dataclass(slots=True)
class Activity:
    """What a session is doing, for tierkv.stat_activity."""

    state: str = "idle"
    query: str = ""
    query_start_s: float = 0.0
    query_id: str = ""
    progress: StatementProgress | None = None


def activity_row(pid: int, client: ClientInfo, activity: Activity, *, asking: str) -> Row:
    """Return a session's row of tierkv.stat_activity.

    Statements of the user who is ``asking`` are shown as they were written, those of others in
    normal form: their prompts are nobody else's business.
    """
    progress = activity.progress
    stats = progress.stats if progress else AiStats()
    started = activity.query_start_s
    return {
        "pid": pid,
        "query_id": activity.query_id or None,
        "usename": client.user,
        "application_name": client.application_name,
        "state": activity.state,
        "phase": _phase(activity),
        "round": stats.rounds,
        "calls_done": stats.distinct_calls,
        "calls_total": progress.calls_total if progress else 0,
        "errors": stats.errors,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.hit_tokens.total,
        "blended_tokens": stats.blended_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "completion_tokens": stats.completion_tokens,
        "query_start": timestamp(started) if started else None,
        "query": activity.query if client.user == asking else _without_literals(activity.query),
    }


def _phase(activity: Activity) -> str:
    """A round that runs with answers replays the statement, even if it collects more calls."""
    progress = activity.progress
    if progress is None:
        return "planning" if activity.state == "active" else ""
    return "replay" if progress.phase == "collect" and progress.round else progress.phase


def _without_literals(text: str) -> str | None:
    return identify(text)[1] if len(text) <= LONGEST_SHOWN else None
