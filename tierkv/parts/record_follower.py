"""Keeps a front's limits, rights, logins and REST keys equal to the meta server's records.

Used by tierkv/parts/front_part.py. The meta server is asked every second; without an answer the
front goes on with those known so far.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

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
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.metaserver.client import MetaClient, Namespace
from tierkv.parts.audit_writer import AuditWriter
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.limits.gate import CallGate

if TYPE_CHECKING:
    from tierkv.dbfront.http.key_ring import KeyRing  # `tierkv sql` opens no doors.
    from tierkv.dbfront.pgwire.protocol.auth import Authenticator

_log = logging.getLogger(__name__)
LOOK_S: Final = 0.8


class RecordFollower:
    """Applies records within a second of a change.

    Attributes:
        keys: the REST door's; set when the door opens.
        logins: likewise of the SQL door.
    """

    def __init__(
        self, meta: MetaClient, gate: CallGate, book: RightsBook, directory: DirectoryClient
    ) -> None:
        self.keys: KeyRing | None = None
        self.logins: Authenticator | None = None
        self._directory = directory
        self._namespaces: tuple[Namespace, ...] = ()
        self._meta = meta
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
        rights = rights_of(await self._meta.list_records(RIGHTS_RECORDS))
        if rights != self._book.rights:  # The same value: sessions need not look again.
            self._book.rights = rights
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
