"""What sessions are doing, for the admin view tierkv.stat_activity."""

from __future__ import annotations

from dataclasses import dataclass

from dbfront.admin_views import Row, timestamp
from dbfront.contracts import ClientInfo
from dbfront.statistics import AiStats, StatementProgress


@dataclass(slots=True)
class Activity:
    """What a session is doing, for tierkv.stat_activity."""

    state: str = "idle"
    query: str = ""
    query_start_s: float = 0.0
    progress: StatementProgress | None = None


def activity_row(pid: int, client: ClientInfo, activity: Activity) -> Row:
    """Return a session's row of tierkv.stat_activity."""
    progress = activity.progress
    stats = progress.stats if progress else AiStats()
    started = activity.query_start_s
    return {
        "pid": pid,
        "usename": client.user,
        "application_name": client.application_name,
        "state": activity.state,
        "phase": progress.phase if progress else "",
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
        "query": activity.query,
    }
