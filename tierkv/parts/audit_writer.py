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
"""Refusals of one limit make one line a minute: a client that tries in a loop must not push all
else out of the log."""


class AuditWriter:
    """Appends lines."""

    def __init__(self, meta: MetaClient, clock: Clock | None = None) -> None:
        self._meta = meta
        self._clock = clock or SystemClock()
        self._told: dict[tuple[Subject, str], tuple[int, float]] = {}

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
        now = self._clock.now()
        for key, count in list(refused.items()):
            told, at = self._told.get(key, (0, float("-inf")))
            if count == told or now - at < _REFUSALS_EACH_S:
                continue
            self._told[key] = (count, now)
            subject, limit = key
            await self.write(
                subject.name,
                "AI call",
                str(subject),
                Outcome.REFUSED,
                detail=f"limit of {limit}",
                times=count - told,
            )
