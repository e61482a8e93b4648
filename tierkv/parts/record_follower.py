"""Keeps a front's limits, rights, logins and REST keys equal to the meta server's records.

Prompts that another front process forgot are records for a while, too: this process then deletes
the answers to these prompts.

Used by tierkv/parts/front_part.py. The meta server is asked every second; without an answer the
front goes on with those known so far.

``NodeFile`` keeps the known nodes for a front that starts while the meta server is away;
scheduler/nodes/cluster_view.py reads and writes. The file is a cache: a missing or damaged file, or
a file of another cluster, counts as empty. The file contains no secret.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import json_format

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
from tierkv.kvcore.errors import DirectoryUnavailableError, RemoteProtocolError
from tierkv.kvwire.v1 import meta_pb2
from tierkv.metaserver.client import ClusterRecord, DirectoryNode, MetaClient, Namespace
from tierkv.metaserver.rpc import wire
from tierkv.parts.audit_writer import AuditWriter
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.limits.gate import CallGate

if TYPE_CHECKING:
    from tierkv.dbfront.http.config import KeyRing  # `tierkv sql` opens no doors.
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
        records = self._meta.list_records
        keys, logins = await records(KEY_RECORDS), await records(LOGIN_RECORDS)
        rights = rights_of(await records(RIGHTS_RECORDS))
        limits = limits_of(await records(call_limits.RECORD_KIND))
        namespaces = await self._meta.list_namespaces()
        # All at once from here: nobody sees a key gone and its limits still there.
        if self.keys is not None:
            self.keys.stored = keys_of(keys)
        if self.logins is not None:
            self.logins.stored = logins_of(logins)
        if rights != self._book.rights:  # The same value: sessions need not look again.
            self._book.rights = rights
        if namespaces != self._namespaces:
            self._namespaces = namespaces
            self._directory.namespaces_changed()
        self._gate.namespace_of = {
            (tenant, namespace.model): namespace.name
            for namespace in namespaces
            for tenant in namespace.members
        }
        self._gate.follow(limits)
        await self._forget(await records(FORGOTTEN_RECORDS))

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


log = logging.getLogger("tierkv.front")


class NodeFile:
    """A file of nodes; satisfies tierkv.scheduler.nodes.cluster_view.NodeMemory."""

    def __init__(self, path: Path, *, meta_address: str) -> None:
        """Create without I/O.

        Args:
            path: replaced as a whole when the nodes change.
            meta_address: distinguishes clusters that share a folder.
        """
        self._path = path
        self._meta_address = meta_address
        self._written = ""

    def load(self) -> tuple[tuple[DirectoryNode, ...], str]:
        """Return the nodes and the name of the default model from the last ``note``."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
            if found["meta_address"] != self._meta_address:
                return (), ""
            messages = (json_format.ParseDict(n, meta_pb2.DirectoryNode()) for n in found["nodes"])
            return tuple(map(wire.NODE_STATE.from_proto, messages)), str(found["default_model"])
        except FileNotFoundError:
            return (), ""
        except (
            OSError, ValueError, KeyError, TypeError, json_format.ParseError, RemoteProtocolError
        ) as error:  # fmt: skip
            log.warning("can't read the nodes of the last run from %s: %s", self._path, error)
            return (), ""

    def note(self, nodes: Sequence[DirectoryNode], default_model: str) -> None:
        """Write the nodes to the file after a change; a failed write is only logged."""
        text = self._text(nodes, default_model)
        if text == self._written:
            return
        self._written = text  # A failed write is not retried before the nodes change.
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = self._path.with_suffix(".new")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as error:
            log.warning("can't write the list of nodes to %s: %s", self._path, error)

    def _text(self, nodes: Sequence[DirectoryNode], default_model: str) -> str:
        infos = [json_format.MessageToDict(_lasting(node)) for node in nodes]
        content = {
            "meta_address": self._meta_address, "default_model": default_model, "nodes": infos,
        }  # fmt: skip
        return json.dumps(content, indent=1, sort_keys=True)


def _lasting(node: DirectoryNode) -> meta_pb2.DirectoryNode:
    """Remove the fields that change with each heartbeat."""
    message = wire.NODE_STATE.to_proto(node)
    message.ClearField("report")
    message.ClearField("heartbeat_age_s")
    message.ClearField("state")
    return message
