"""How far a job is: speed, remaining time, and the notices for a client.

Pure. Used by dbfront/jobs/job_commands.py and, for the view, job_views.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.jobs.job import AiJob, JobPart, PartState
from tierkv.dbfront.statement_results import Notice

TOLD_EVERY_S: Final = 5.0
"""Shortest time between two notices."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job is.

    Attributes:
        done, total: rows of the source.
        rate: rows per second while runners worked; None before the first batch.
        eta_s: seconds left at this speed; None without a speed, or at the end.
        hit_ratio: share of prompt tokens that were not computed; None without prompts.
    """

    done: int
    total: int
    rate: float | None
    eta_s: float | None
    hit_ratio: float | None

    @classmethod
    def of(cls, parts: tuple[JobPart, ...], total: int) -> JobProgress:
        """Add the parts up; the speeds of parts running at the same time are added."""
        done = sum(part.examined for part in parts)
        running = [part for part in parts if part.state is PartState.RUNNING] or list(parts)
        rates = [part.examined / part.busy_s for part in running if part.busy_s > 0]
        rate = sum(rates) if rates else None
        if rate is not None and running == list(parts) and len(parts) > 1:
            rate = done / max(sum(part.busy_s for part in parts), 1e-9)
        total = max(total, done)
        left = total - done
        prompts = sum(part.prompt_tokens for part in parts)
        return cls(
            done,
            total,
            rate,
            left / rate if rate and left else None,
            sum(part.hit_tokens for part in parts) / prompts if prompts else None,
        )


def progress_notice(job: AiJob) -> Notice:
    """Return the notice about a running job."""
    progress = JobProgress.of(job.parts, job.total)
    share = 100 * progress.done // max(progress.total, 1)
    text = f"job {job.name}: {progress.done} of {progress.total} rows ({share} %)"
    if progress.rate is not None:
        text += f", {progress.rate:.1f} rows/s"
    if progress.eta_s is not None:
        text += f", {_duration(progress.eta_s)} left"
    if progress.hit_ratio is not None:
        text += f", {100 * progress.hit_ratio:.0f} % of prompt tokens from the cache"
    if job.failed:
        text += f", {job.failed} set aside"
    return Notice("NOTICE", text)


def end_notice(job: AiJob, now_rows: int) -> Notice:
    """Return the notice about a job that is done.

    Args:
        job: the job.
        now_rows: rows that the source has at the end.
    """
    written = sum(part.written for part in job.parts)
    text = f"job {job.name} is done: {job.examined} rows read, {written} written"
    detail = hint = ""
    if job.failed:
        text += f", {job.failed} set aside"
        hint = (
            f"See tierkv.job_failures for the reasons. RESUME AI JOB {job.name} WITH "
            "(retry_failed = true) asks again."
        )
    if now_rows != job.examined:
        detail = (
            f"The source changed: it has {now_rows} rows now. RESUME reads new rows with higher "
            "keys; new rows with lower keys are not read."
        )
    return Notice("NOTICE", text, detail=detail, hint=hint)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"
