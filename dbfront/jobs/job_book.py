"""Reads and writes jobs in the tables of schema ``tierkv_jobs``, through the session of a job.

A runner writes checkpoints only while the part's row has the runner's secret. Another runner or a
cancel replaces the secret; the late runner's transaction then changes no row and is undone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from tierkv.dbfront.jobs.job import (
    AiJob,
    FailedRow,
    JobBatch,
    JobPart,
    JobSession,
    PartState,
)
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock
from tierkv.sql.jobs.job_command import JobOptions
from tierkv.sql.jobs.job_statement import (
    KeyRange,
    literal,
    read_job_statement,
)
from tierkv.sql.jobs.job_tables import PART_COLUMNS, SCHEMA

_COUNTS: Final = (
    "examined", "written", "failed", "calls", "prompt_tokens", "hit_tokens", "completion_tokens",
)  # fmt: skip


class JobBook:
    """The jobs of one owner."""

    def __init__(self, session: JobSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._counted = self._cost()
        self._pending = self._counted

    async def find(self, name: str) -> AiJob | None:
        """Return a job with its parts; None without such a job."""
        columns = "statement, options, key_type, path, total, created_s"
        rows = await self._session.own(
            f"SELECT {_texts(columns.split(', '))} FROM {SCHEMA}.jobs WHERE {self._is(name)}"
        )
        if not rows:
            return None
        statement, options, key_type, path, total, created_s = (text or "" for text in rows[0])
        return AiJob(
            name,
            statement,
            read_job_statement(statement),
            JobOptions(**json.loads(options)),
            key_type,
            path,
            int(total),
            float(created_s),
            await self._parts(name),
        )

    async def _parts(self, name: str) -> tuple[JobPart, ...]:
        rows = await self._session.own(
            f"SELECT {_texts(PART_COLUMNS)} FROM {SCHEMA}.parts WHERE {self._is(name)} "
            "ORDER BY part"
        )
        return tuple(map(part_of_row, rows))

    async def names(self) -> list[str]:
        """Return the names of the owner's jobs."""
        where = f"owner = {literal(self._session.owner)}"
        rows = await self._session.own(f"SELECT job FROM {SCHEMA}.jobs WHERE {where}")
        return [str(name) for (name,) in rows]

    async def add(self, job: AiJob) -> None:
        """Add a job with its parts; the caller has a transaction."""
        owner, name = literal(self._session.owner), literal(job.name)
        options = literal(json.dumps(asdict(job.options)))
        await self._session.own(
            f"INSERT INTO {SCHEMA}.jobs VALUES ({owner}, {name}, {literal(job.statement)}, "
            f"{options}, {literal(job.key_type)}, {literal(job.path)}, {job.total}, "
            f"{job.created_s})"
        )
        for part in job.parts:
            low, high = _or_null(part.bounds.low), _or_null(part.bounds.high)
            await self._session.own(
                f"INSERT INTO {SCHEMA}.parts VALUES ({owner}, {name}, {part.number}, {low}, "
                f"{high}, NULL, '', '{part.state}', 0, 0, 0, 0, 0, 0, 0, 0, "
                f"{self._clock.wall()}, '')"
            )

    async def change_options(self, job: AiJob, options: JobOptions) -> None:
        """Keep other options for a job."""
        text = literal(json.dumps(asdict(options)))
        await self._session.own(
            f"UPDATE {SCHEMA}.jobs SET options = {text} WHERE {self._is(job.name)}"
        )

    async def drop(self, name: str) -> None:
        """Remove a job and its rows set aside; what the job has written stays."""
        for table in ("failures", "parts", "jobs"):
            await self._session.own(f"DELETE FROM {SCHEMA}.{table} WHERE {self._is(name)}")

    async def begin(self, job: AiJob, number: int) -> JobPart:
        """Give a part to this runner alone; return the part."""
        run = secrets.token_hex(8)
        await self._session.own(
            f"UPDATE {SCHEMA}.parts SET run = '{run}', state = '{PartState.RUNNING}', error = '', "
            f"updated_s = {self._clock.wall()} WHERE {self._is(job.name)} AND part = {number}"
        )
        return await self.part(job, number)

    async def part(self, job: AiJob, number: int) -> JobPart:
        """Read a part."""
        return (await self._parts(job.name))[number - 1]

    async def end(self, job: AiJob, part: JobPart, state: PartState, error: str = "") -> None:
        """Note why a runner stops; nothing changes if another runner has the part."""
        await self._session.own(
            f"UPDATE {SCHEMA}.parts SET state = '{state}', run = '', error = {literal(error)}, "
            f"updated_s = {self._clock.wall()} WHERE {self._is(job.name)} "
            f"AND part = {part.number} AND run = '{part.run}'"
        )

    async def cancel(self, name: str) -> int:
        """Stop the runners of a job at the next checkpoint; return the number of open parts."""
        rows = await self._session.own(
            f"UPDATE {SCHEMA}.parts SET state = '{PartState.CANCELLED}', run = '', "
            f"error = 'cancelled', updated_s = {self._clock.wall()} "
            f"WHERE {self._is(name)} AND state <> '{PartState.DONE}' RETURNING part"
        )
        return len(rows)

    async def reopen(self, job: AiJob) -> None:
        """Let another runner begin the parts that are open, or have new rows."""
        await self._session.own(
            f"UPDATE {SCHEMA}.parts SET state = '{PartState.WAITING}', run = '', error = '' "
            f"WHERE {self._is(job.name)}"
        )

    async def checkpoint(
        self, job: AiJob, part: JobPart, batch: JobBatch, written: int, busy_s: float
    ) -> bool:
        """Note a batch as done, in the transaction of the batch's rows.

        Returns:
            False: the part is another runner's now, or was cancelled.
        """
        return await self._advance(job, part, batch, busy_s, written=written)

    async def set_aside(
        self, job: AiJob, part: JobPart, batch: JobBatch, row: FailedRow, busy_s: float
    ) -> bool:
        """Note a row with an error of its own, and go on behind the row; see ``checkpoint``."""
        values = (row.key, row.sqlstate, row.message)
        owner, name = literal(self._session.owner), literal(job.name)
        await self._session.own(
            f"INSERT INTO {SCHEMA}.failures VALUES ({owner}, {name}, {part.number}, "
            f"{', '.join(map(literal, values))}, {self._clock.wall()})"
        )
        return await self._advance(job, part, batch, busy_s, failed=batch.rows)

    async def _advance(
        self,
        job: AiJob,
        part: JobPart,
        batch: JobBatch,
        busy_s: float,
        *,
        written: int = 0,
        failed: int = 0,
    ) -> bool:
        added = {"examined": batch.rows, "written": written, "failed": failed, "busy_s": busy_s}
        added |= self._new_cost()
        sums = ", ".join(f"{name} = {name} + {value}" for name, value in added.items() if value)
        rows = await self._session.own(
            f"UPDATE {SCHEMA}.parts SET {sums}, last_key = {_or_null(batch.keys.high)}, "
            f"updated_s = {self._clock.wall()} WHERE {self._is(job.name)} "
            f"AND part = {part.number} AND run = '{part.run}' RETURNING part"
        )
        return len(rows) == 1

    async def failed_rows(self, job: AiJob, number: int) -> list[FailedRow]:
        """Return the rows of a part set aside."""
        rows = await self._session.own(
            f"SELECT key, sqlstate, message FROM {SCHEMA}.failures WHERE {self._is(job.name)} "
            f"AND part = {number} ORDER BY failed_s LIMIT {limits.MAX_JOB_FAILURES_SHOWN}"
        )
        return [FailedRow(*(text or "" for text in row)) for row in rows]

    async def recover(self, job: AiJob, part: JobPart, row: FailedRow, written: int) -> bool:
        """Note the success of a row set aside, in the transaction of the row."""
        await self._session.own(
            f"DELETE FROM {SCHEMA}.failures WHERE {self._is(job.name)} AND key = {literal(row.key)}"
        )
        sums = "".join(f", {name} = {name} + {value}" for name, value in self._new_cost().items())
        rows = await self._session.own(
            f"UPDATE {SCHEMA}.parts SET failed = failed - 1, written = written + {written}{sums} "
            f"WHERE {self._is(job.name)} AND part = {part.number} AND run = '{part.run}' "
            "RETURNING part"
        )
        return len(rows) == 1

    def committed(self) -> None:
        """Count the calls of a committed transaction."""
        self._counted = self._pending

    def _new_cost(self) -> dict[str, float]:
        """Return the cost of the session's calls since the last checkpoint, failed or not."""
        self._pending = self._cost()
        return {name: value - self._counted[name] for name, value in self._pending.items()}

    def _cost(self) -> dict[str, int]:
        stats = self._session.stats
        return {
            "calls": stats.distinct_calls - stats.cached_answers,
            "prompt_tokens": stats.prompt_tokens,
            "hit_tokens": stats.hit_tokens.total,
            "completion_tokens": stats.completion_tokens,
        }

    def _is(self, name: str) -> str:
        return f"owner = {literal(self._session.owner)} AND job = {literal(name)}"


def part_of_row(row: Sequence[str | None]) -> JobPart:
    """Return a part from its row of text, in the order of PART_COLUMNS."""
    text = dict(zip(PART_COLUMNS, row, strict=True))
    return JobPart(
        number=int(text["part"] or 0),
        bounds=KeyRange(text["low"], text["high"]),
        at=text["last_key"],
        run=text["run"] or "",
        state=PartState(text["state"] or PartState.WAITING),
        busy_s=float(text["busy_s"] or 0),
        updated_s=float(text["updated_s"] or 0),
        error=text["error"] or "",
        **{name: int(text[name] or 0) for name in _COUNTS},
    )


def _texts(columns: Sequence[str]) -> str:
    return ", ".join(f"CAST({name} AS text)" for name in columns)


def _or_null(text: str | None) -> str:
    return "NULL" if text is None else literal(text)
