"""What a job does after an error: set the row aside, wait and try again, or stop.

In doubt a job stops: a stopped job can be resumed. Only
errors with a possible cause in a row's data are followed to the row.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Final

from tierkv.kvcore.errors import (
    CallLimitError,
    CancelledByUserError,
    ContextTooLongError,
    DeadlineError,
    NodeRefusedError,
    RetryableError,
    RowLevelError,
    SqlError,
    TierKVError,
    UdfArgumentError,
)

_OF_ROWS: Final = ("22", "23", "P0", "44")
"""Classes of SQLSTATE: data, constraints, errors raised by triggers, WITH CHECK OPTION."""

_PASSING: Final = ("08", "40", "53", "57", "58")
_LASTING: Final = frozenset({"53400", "53100", "57014"})


class JobRemedy(StrEnum):
    """What to do after the error of a batch."""

    SET_ASIDE = "set aside"
    WAIT = "wait"
    STOP = "stop"


def remedy(error: TierKVError) -> JobRemedy:
    """Return what to do after an error of a batch.

    SET_ASIDE means that one of the rows is at fault: the batch is halved until the row stands
    alone.
    """
    if isinstance(error, CancelledByUserError | DeadlineError):
        return JobRemedy.STOP
    if isinstance(error, CallLimitError):
        return JobRemedy.WAIT
    if isinstance(error, NodeRefusedError):
        return JobRemedy.STOP
    if isinstance(error, RowLevelError | ContextTooLongError | UdfArgumentError):
        return JobRemedy.SET_ASIDE
    if isinstance(error, RetryableError):
        return JobRemedy.WAIT
    state = error.sqlstate
    if isinstance(error, SqlError) and state in _LASTING:
        return JobRemedy.STOP
    if state[:2] in _OF_ROWS:
        return JobRemedy.SET_ASIDE
    return JobRemedy.WAIT if state[:2] in _PASSING else JobRemedy.STOP


def told(error: TierKVError) -> str:
    """Return an error as a line, for the tables of jobs."""
    return f"{error.sqlstate}: {' '.join(error.message.split())}"[:2000]


def cancelled_by_client() -> CancelledByUserError:
    """Return the error of a job cancelled between two statements."""
    return CancelledByUserError("canceling statement due to user request")


async def pause_unless(cancelled: asyncio.Event, seconds: float) -> None:
    """Wait, unless a cancel comes first.

    Raises:
        CancelledByUserError: the cancel came.
    """
    try:
        async with asyncio.timeout(seconds):
            await cancelled.wait()
    except TimeoutError:
        return
    raise cancelled_by_client()
