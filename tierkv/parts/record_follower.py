"""Keeps a front's limits, rights, logins and REST keys equal to the meta server's records.

Prompts that another front process forgot are records for a while, too: this process then deletes
the answers to these prompts.

Used by tierkv/parts/front_part.py. The meta server is asked every second; without an answer the
front goes on with those known so far.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.answer_cache.answer_key import PromptMark
from tierkv.dbfront.answer_cache.kept_answer import StoreLostError
from tierkv.kvcore import call_limits
from tierkv.kvcore.access import (
    KEY_RECORDS,
    LOGIN_RECORDS,
    RIGHTS_RECORDS,
    RightsBook,
    keys_of,
    logins_of,
    rights_of,
)
from tierkv.kvcore.call_limits import limits_of
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.metaserver.client import ClusterRecord, MetaClient, Namespace
from tierkv.parts.audit_writer import AuditWriter
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.limits.gate import CallGate

if TYPE_CHECKING:
    from tierkv.dbfront.http.key_ring import KeyRing  # `tierkv sql` opens no doors.
    from tierkv.dbfront.pgwire.protocol.auth import Authenticator

_log = logging.getLogger(__name__)
LOOK_S: Final = 0.8
FORGOTTEN_RECORDS: Final = "kv_forgotten"
_TOLD_S: Final = 3_600.0
_MOST_TOLD: Final = 500
"""Records of forgotten prompts leave after an hour, or if there are more."""


class RecordFollower:
    """Applies records within a second of a change.

    Attributes:
        keys: the REST door's; set when the door opens.
        logins: likewise of the SQL door.
    """

    def __init__(
        self,
        meta: MetaClient,
        gate: CallGate,
        book: RightsBook,
        directory: DirectoryClient,
        answers: AnswerCache,
    ) -> None:
        self._answers = answers
        self._forgotten: frozenset[str] = frozenset()
        self.keys: KeyRing | None = None
        self.logins: Authenticator | None = None
        self._directory = directory
        self._namespaces: tuple[Namespace, ...] = ()
        self._meta = meta
        self._clock = SystemClock()
        self._gate = gate
        self._book = book
        self._audit = AuditWriter(meta)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then keep looking in the background."""
        with suppress(DirectoryUnavailableError):
            await self.look()
        self._task = asyncio.create_task(self._follow(), name="records-follow")

    async def stop(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def look(self) -> None:
        """Apply the records of now; also called after a change by this front.

        Raises:
            DirectoryUnavailableError: the meta server does not answer; nothing changed.
        """
        if self.keys is not None:
            self.keys.stored = keys_of(await self._meta.list_records(KEY_RECORDS))
        if self.logins is not None:
            self.logins.stored = logins_of(await self._meta.list_records(LOGIN_RECORDS))
        self._book.rights = rights_of(await self._meta.list_records(RIGHTS_RECORDS))
        limits = limits_of(await self._meta.list_records(call_limits.RECORD_KIND))
        namespaces = await self._meta.list_namespaces()
        if namespaces != self._namespaces:
            self._namespaces = namespaces
            self._directory.namespaces_changed()
        self._gate.namespace_of = {
            (tenant, namespace.model): namespace.name
            for namespace in namespaces
            for tenant in namespace.members
        }
        self._gate.follow(limits)
        await self._forget(await self._meta.list_records(FORGOTTEN_RECORDS))

    async def tell_forgotten(self, marks: Sequence[PromptMark]) -> None:
        """Tell the other front processes about forgotten prompts.

        Raises:
            DirectoryUnavailableError: the meta server does not answer; they were not told.
        """
        now_s = self._clock.wall()
        name = f"{round(1000 * now_s):015}.{secrets.token_hex(4)}"
        self._forgotten |= {name}
        body = json.dumps([mark.text for mark in marks])
        await self._meta.put_record(ClusterRecord(FORGOTTEN_RECORDS, name, body))
        known = sorted(self._forgotten)
        oldest = f"{round(1000 * (now_s - _TOLD_S)):015}"
        old = [each for each in known if each < oldest] + known[:-_MOST_TOLD]
        for each in dict.fromkeys(old):
            await self._meta.put_record(ClusterRecord(FORGOTTEN_RECORDS, each, ""))

    async def _forget(self, records: Sequence[ClusterRecord]) -> None:
        told = [record for record in records if record.name not in self._forgotten]
        marks: list[PromptMark] = []
        for record in told:
            with suppress(ValueError, TypeError, AttributeError):
                marks += map(PromptMark.of_text, json.loads(record.body))
        if marks:
            try:
                await self._answers.forget(marks)
            except StoreLostError as error:
                _log.warning("answers to forgotten prompts are deleted later: %s", error)
                return
        self._forgotten = frozenset(record.name for record in records)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                await self._audit.write_refusals(self._gate.refused)
                await self._audit.write_denials(self._book.denied)
                if self.logins is not None:
                    await self._audit.write_failed_logins(self.logins.failed)
            except DirectoryUnavailableError:
                continue
            except Exception:  # noqa: BLE001 - outermost loop: the look must outlive any bug
                _log.exception("could not look at limits and keys")
