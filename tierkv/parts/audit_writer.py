"""Writes lines of the audit log to the meta server.

Used by the front for statements about the cluster and for refused calls, and by verbs of the
command line. Without a meta server the process logs the line instead: no statement fails for the
audit log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from tierkv.kvcore.audit import RECORD_KIND, AuditLine, Outcome
from tierkv.kvcore.call_limits import Subject
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.metaserver.client import ClusterRecord, MetaClient

_log = logging.getLogger(__name__)
_REFUSALS_EACH_S: Final = 60.0
"""Refusals for one reason make one line a minute: a client that tries in a loop must not push all
else out of the log."""


class AuditWriter:
    """Appends lines."""

    def __init__(self, meta: MetaClient, clock: Clock | None = None) -> None:
        self._meta = meta
        self._clock = clock or SystemClock()
        self._told: dict[tuple[str, str, str], tuple[int, float]] = {}

    async def write(
        self,
        who: str,
        action: str,
        subject: str,
        outcome: Outcome = Outcome.DONE,
        *,
        detail: str = "",
        times: int = 1,
    ) -> None:
        """Append one line."""
        line = AuditLine(self._clock.wall(), who, action, subject, outcome, detail, times)
        try:
            await self._meta.put_record(
                ClusterRecord(RECORD_KIND, line.record_name(), line.to_json())
            )
        except DirectoryUnavailableError as error:
            _log.warning("the audit log lacks a line: %s %s", line.to_json(), error.message)

    async def write_refusals(self, refused: Mapping[tuple[Subject, str], int]) -> None:
        """Append how often calls were refused since the last line of the same limit.

        Args:
            refused: all refusals of this process so far, by subject and limit.
        """
        for (subject, limit), count in list(refused.items()):
            await self._refused(subject.name, str(subject), f"limit of {limit}", count)

    async def write_denials(self, denied: Mapping[tuple[str, str], int]) -> None:
        """Append how often users lacked a right since the last line of the same user and right.

        Args:
            denied: all such calls of this process so far, by user and right.
        """
        for (user, right), count in list(denied.items()):
            await self._refused(user, right, "permission denied", count)

    async def write_failed_logins(self, failed: Mapping[str, int]) -> None:
        """Append how often logins failed since the last line of the same user.

        Args:
            failed: all of this process so far, by user.
        """
        for user, count in list(failed.items()):
            await self._refused(user, "SQL", "wrong password", count, action="login")

    async def _refused(
        self, who: str, subject: str, why: str, count: int, *, action: str = "AI call"
    ) -> None:
        """Append a line unless the last one of the same kind is too young."""
        now, key = self._clock.now(), (who, subject, why)
        told, at = self._told.get(key, (0, float("-inf")))
        if count == told or now - at < _REFUSALS_EACH_S:
            return
        self._told[key] = (count, now)
        times = count - told
        await self.write(who, action, subject, Outcome.REFUSED, detail=why, times=times)
