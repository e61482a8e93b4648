"""What a front shows of the cluster: the content of the admin views, and the checks of ``/readyz``.

Used by tierkv/parts/front_part.py; the front's doors ask through the interfaces of dbfront. The
checks of ``/readyz?verbose`` are about parts that a front can run without, but should have: each
check returns an empty string, or the problem. This module changes nothing in the cluster, except
that a view of nodes that start on demand starts them, and that users change namespaces.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tierkv.config import LoadedConfig, list_entries, name_list
from tierkv.dbfront.answer_cache.answer_cache import AnswerCache
from tierkv.dbfront.contracts import ClientInfo, TableAccess
from tierkv.dbfront.generation.generation import Generation
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.statement.limit_change import changed_limits
from tierkv.dbfront.statement.namespace_change import change_of, wrong_existence
from tierkv.dbfront.statement.rights_change import (
    changed_rights,
    check_login,
    check_new_role,
    check_owners,
    check_right,
    with_owner_changed,
    with_role,
    with_tables_moved,
    wrong_role,
)
from tierkv.dbfront.views.admin import OwnedChange, SettingRow
from tierkv.kvcore import audit as audit_log
from tierkv.kvcore.access import (
    KEY_RECORDS,
    LOGIN_RECORDS,
    PUBLIC,
    RIGHTS_RECORDS,
    Rights,
    RoleRights,
    keys_of,
    login_body,
    rights_of,
)
from tierkv.kvcore.audit import AuditLine, Outcome, lines_of
from tierkv.kvcore.call_limits import (
    RECORD_KIND,
    CallLimits,
    Subject,
    SubjectKind,
    limits_of,
    record_name,
)
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import (
    ConfigError,
    DirectoryUnavailableError,
    NoNodeError,
    RightMissingError,
    SqlError,
    TierKVError,
    UserError,
)
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.node import ModelInfo, NodeReport
from tierkv.metaserver.client import (
    BlockListing,
    ClusterRecord,
    DirectoryNode,
    MetaClient,
    Namespace,
)
from tierkv.parts.audit_writer import AuditWriter
from tierkv.parts.record_follower import RecordFollower
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.limits.gate import Caller, LimitLeft
from tierkv.scheduler.pins import PinKeeper
from tierkv.sql.cluster_command import OWNED_VERBS, ClusterCommand, GrantedRight, RightKind
from tierkv.sql.schema_rights import SHARED_SCHEMAS
from tierkv.sql.text.suggest import did_you_mean

_REPORT_WITHIN_S: Final = 1.0
"""Longest wait of a view for a compute node's counters, before it shows the last heartbeat's."""

LEAST_FREE_BYTES: Final = 64 << 20
"""With fewer free bytes a commit may soon fail."""

Check = Callable[[], Awaitable[str]]


@contextmanager
def _no_directory_is_no_view() -> Iterator[None]:
    """Tell a DBA to try again: AI calls run without the meta server, admin views can't."""
    try:
        yield
    except DirectoryUnavailableError as error:
        raise NoNodeError(
            "the admin views need the meta server, which does not answer",
            detail=error.message,
            hint="AI calls work without it; `tierkv status` shows when it is back.",
        ) from error


@dataclass(slots=True)
class MetaSource:
    """Content of the admin views, from the meta server and the compute nodes.

    Attributes:
        own_id: this front's name in the list of nodes; None while not listed.
        records: keeps this front's limits and keys up to date; None in a process without calls.
    """

    meta: MetaClient
    generation: Generation
    dispatcher: Dispatcher
    config: LoadedConfig
    own_id: NodeId | None = None
    records: RecordFollower | None = None

    @property
    def answers(self) -> AnswerCache:
        """This front's answer cache."""
        return self.generation.answers

    @property
    def pins(self) -> PinKeeper:
        """The pinned prompts of the cluster."""
        return self.generation.steering.pins

    @property
    def conversations(self) -> Conversations:
        """The conversations that this front can continue."""
        return self.generation.conversations

    async def nodes(self) -> tuple[DirectoryNode, ...]:
        """Return every known node; compute nodes and this front with current counters.

        No heartbeat contains the counters of a statement that has just ended.
        """
        await self._need_nodes()
        with _no_directory_is_no_view():
            nodes = await self.meta.list_nodes()
        reports = await self.dispatcher.view.fresh_reports(_REPORT_WITHIN_S)
        if self.own_id is not None:
            reports[self.own_id] = self.own_report()
        return tuple(
            replace(node, report=reports[node.info.node_id], heartbeat_age_s=0.0)
            if node.info.node_id in reports
            else node
            for node in nodes
        )

    async def _need_nodes(self) -> None:
        """Start nodes that start on demand: a view of the nodes is a demand."""
        if self.dispatcher.view.asleep:
            await self.dispatcher.wake()

    def own_report(self) -> NodeReport:
        """Return this front's report for a heartbeat."""
        return NodeReport(cache_errors=self.dispatcher.snapshot().cache_errors)

    async def blocks(self, limit: int) -> BlockListing:
        """Return copies of blocks, at most ``limit``."""
        await self._need_nodes()
        with _no_directory_is_no_view():
            return await self.meta.list_blocks(limit)

    async def directory(self) -> tuple[tuple[str, int], ...]:
        """Return the meta server's counters of blocks and leases."""
        await self._need_nodes()
        with _no_directory_is_no_view():
            return await self.meta.directory_counts()

    async def change_cluster(
        self, user: str, command: ClusterCommand, owned: OwnedChange | None = None
    ) -> None:
        """Carry out a statement about the cluster; see ClusterSource."""
        subject = command.name if command.limited is None else f"{command.limited} {command.name}"
        audit = AuditWriter(self.meta)
        try:
            if not self._is_own(user, command):
                self._refuse_stranger(user)
            await self._change(command, owned)
        except TierKVError as error:
            denied = isinstance(error, RightMissingError)
            outcome = Outcome.REFUSED if denied else Outcome.FAILED
            await audit.write(user, command.tag, subject, outcome, detail=error.message)
            raise
        given = ", ".join(f"{option.name} = {option.value}" for option in command.options)
        if command.password is not None:
            given = "password" if command.password else "no login"
        elif command.right is not None:
            made = command.verb in ("CREATE", "DROP", "DROP OWNED")
            given = "" if made else str(command.right)
        elif command.limited is not None and command.verb == "DROP":
            given = "reset"
        await audit.write(user, command.tag, subject, detail=given)

    async def _change(self, command: ClusterCommand, owned: OwnedChange | None) -> None:
        if command.right is not None:
            with _no_directory_is_no_view():
                await self._change_rights(command.right, command, owned)
            return
        if command.limited is not None:
            with _no_directory_is_no_view():
                await self._change_limits(Subject(command.limited, command.name), command)
            return
        change = change_of(command.options)
        await self._check_model(change.model)
        with _no_directory_is_no_view():
            known = {each.name: each for each in await self.meta.list_namespaces()}
            old = known.get(command.name)
            if (old is not None) == (command.verb == "CREATE"):
                if command.tolerant:
                    return
                raise wrong_existence(command, known)
            if command.verb == "DROP":
                await self.meta.drop_namespace(command.name)
            else:
                changed = change.applied_to(old or Namespace(command.name))
                self._refuse_below_pins(changed)
                await self.meta.put_namespace(changed)
            if self.records is not None:
                await self.records.look()

    def _refuse_below_pins(self, namespace: Namespace) -> None:
        """Refuse a capacity below what the namespace's tenants have pinned."""
        capacity = namespace.limits.capacity_bytes if namespace.limits is not None else 0
        pinned = self.pins.size_bytes(namespace.members)
        if 0 < capacity < pinned:
            raise SqlError(
                f"{pinned} bytes of namespace {namespace.name} are pinned, more than the capacity "
                f"of {capacity}",
                sqlstate="53100",
                hint="End pins (SELECT * FROM tierkv.pins), or give the namespace more.",
            )

    async def _check_model(self, name: str | None) -> None:
        """Refuse an unserved model, while other models are served."""
        served = [model.name for model in await self.generation.models()] if name else []
        if served and name not in served:
            raise UserError(
                f"no model {name!r} is served here",
                hint=did_you_mean(name or "", served) or f"Served are {', '.join(sorted(served))}.",
            )

    async def _change_limits(self, subject: Subject, command: ClusterCommand) -> None:
        """Set or reset limits; they hold at this front at once, elsewhere within a second."""
        name = record_name(subject)
        if subject.kind is SubjectKind.KEY and command.verb != "DROP":
            await self._need_key(subject.name)
        if command.verb == "DROP":
            await self.meta.put_record(ClusterRecord(RECORD_KIND, name, ""))
        else:
            old = limits_of(await self.meta.list_records(RECORD_KIND)).get(subject, CallLimits())
            limits = changed_limits(old, command.options)
            await self.meta.put_record(ClusterRecord(RECORD_KIND, name, limits.to_json()))
        if self.records is not None:
            await self.records.look()

    async def _change_rights(
        self, right: GrantedRight, command: ClusterCommand, owned: OwnedChange | None
    ) -> None:
        """Grant, revoke, make or drop; it holds at this front at once, elsewhere in a second."""
        check_right(right)
        if right.kind is RightKind.TABLE and not self.config.settings.front.users:
            raise SqlError(
                "tables have no owners here, because nobody logs in",
                sqlstate="55000",
                hint="Set front.users and front.admins first.",
            )
        known = rights_of(await self.meta.list_records(RIGHTS_RECORDS))
        login: str | None = "" if command.verb == "DROP" else None
        if command.password is not None:
            login = await self._verifier(command, known)
        if command.verb in ("CREATE", "DROP"):
            if command.verb == "CREATE":
                check_new_role(command.name, {*known.roles, *self.config.settings.front.users})
            if (command.name in known.roles) == (command.verb == "CREATE"):
                if command.tolerant:
                    return
                raise wrong_role(command, known.roles)
        elif command.verb in OWNED_VERBS:
            settings = self.config.settings.front
            check_owners(command, {*known.roles, *settings.users, *name_list(settings.admins)})
        changed: dict[str, RoleRights | None] = {}
        if command.verb in ("DROP", *OWNED_VERBS):
            changed |= await self._owner_changed(known, right, command.verb, owned)
        if command.verb in ("CREATE", "DROP"):
            known = Rights({**known.roles, **{r: v for r, v in changed.items() if v is not None}})
            changed |= with_role(known, command.name, exists=command.verb == "CREATE")
        elif command.verb in ("GRANT", "REVOKE"):
            grants = command.verb == "GRANT"
            changed |= {
                role: changed_rights(known.own(role), right, grants=grants) for role in right.roles
            }
        for role, rights in changed.items():
            body = "" if rights is None else rights.to_json()
            await self.meta.put_record(ClusterRecord(RIGHTS_RECORDS, role, body))
        if login is not None:
            body = login_body(login)
            await self.meta.put_record(ClusterRecord(LOGIN_RECORDS, command.name, body))
        if self.records is not None:
            await self.records.look()

    async def _owner_changed(
        self, known: Rights, right: GrantedRight, verb: str, owned: OwnedChange | None
    ) -> dict[str, RoleRights]:
        """Have the front's database drop or keep what roles own; return the changed rights."""
        if owned is None:
            return {}
        schemas = frozenset[str]().union(*map(known.owned_schemas, right.roles)) - SHARED_SCHEMAS
        there = await owned(ClusterCommand(verb, right.roles[0], right=right), schemas)
        owner = right.names[0] if verb == "REASSIGN OWNED" else None
        return with_owner_changed(known, right.roles, owner, there)

    async def move_tables(self, user: str, moved: Mapping[str, str | None]) -> None:
        """Let rights follow tables to other names, or end with them; see ClusterSource."""
        with _no_directory_is_no_view():
            known = rights_of(await self.meta.list_records(RIGHTS_RECORDS))
            changed = with_tables_moved(known, moved)
            for role, rights in changed.items():
                await self.meta.put_record(ClusterRecord(RIGHTS_RECORDS, role, rights.to_json()))
        audit = AuditWriter(self.meta)
        for name, new in moved.items() if changed else ():
            told = "dropped" if new is None else f"renamed to {new}"
            await audit.write(user, "REVOKE" if new is None else "ALTER TABLE", name, detail=told)
        if self.records is not None:
            await self.records.look()

    async def _verifier(self, command: ClusterCommand, known: Rights) -> str:
        """Return the verifier of a user's new password; empty if the login is taken away."""
        from tierkv.dbfront.pgwire.protocol.auth import parse_verifier  # `tierkv sql` has no door.

        check_login(command, known, self.config.settings.front.users)
        if not command.password:
            return ""
        try:
            made = await asyncio.to_thread(parse_verifier, command.name, command.password)
        except ConfigError as error:
            raise SqlError(error.message, sqlstate="22023", hint=error.hint) from None
        return made.text

    def _is_own(self, user: str, command: ClusterCommand) -> bool:
        """Return whether a change is about the user's own password, tables or roles."""
        if command.right is not None and command.verb in OWNED_VERBS:
            names = {*command.right.roles, *command.right.names}
            return names <= self.generation.rights.roles_of(user)
        if command.right is not None and command.right.kind is RightKind.TABLE:
            schemas = [name.partition(".")[0] for name in command.right.names]
            return all(self.generation.rights.owns_schema(user, schema) for schema in schemas)
        return bool(command.password) and (command.verb, command.name) == ("ALTER", user)

    def _refuse_stranger(self, user: str) -> None:
        """Refuse a user who may not change the cluster.

        Raises:
            RightMissingError: the user is no administrator.
        """
        if not self._may_administer(user):
            raise RightMissingError(
                f"user {user} may not change namespaces, limits or rights",
                hint="An administrator runs GRANT tierkv_admin, or an operator adds the user to "
                "front.admins.",
            )

    def _may_administer(self, user: str) -> bool:
        """Return whether a user may change the cluster; without logins everybody may."""
        front = self.config.settings.front
        is_open = not name_list(front.admins) and not front.users and not front.postgres
        return is_open or self.generation.rights.is_admin(user)

    def owners(self, client: ClientInfo) -> tuple[str, str] | None:
        """Return the names in the visible rows of a client; see ClusterSource."""
        if self._may_administer(client.user):
            return None
        namespace = self.generation.gate.namespace_of.get((client.user, ""), client.user)
        return client.user, namespace

    def table_access(self, client: ClientInfo) -> TableAccess | None:
        """Return which schemas a client may use; see ClusterSource."""
        front = self.config.settings.front
        if not front.users or front.postgres:
            return None
        logins = self.records.logins if self.records is not None else None
        made = logins is not None and client.user in logins.stored
        admin = self._may_administer(client.user)
        return TableAccess(None if admin else self.generation.rights, has_schema=made)

    def rights(self, client: ClientInfo) -> dict[str, RoleRights]:
        """Return the visible rights by role; see ClusterSource."""
        book = self.generation.rights
        roles = dict(book.rights.roles) | {PUBLIC: book.rights.own(PUBLIC)}
        if not self._may_administer(client.user):
            mine = book.roles_of(client.user)
            roles = {role: rights for role, rights in roles.items() if role in mine}
        return roles

    async def _need_key(self, name: str) -> None:
        known = [k.name for k in keys_of(await self.meta.list_records(KEY_RECORDS)).values()]
        if name not in known:
            raise SqlError(
                f'AI key "{name}" does not exist',
                sqlstate="42704",
                hint=did_you_mean(name, known) if known else "Make it with `tierkv key create`.",
            )

    async def call_limits(self, client: ClientInfo, *, own: bool) -> tuple[LimitLeft, ...]:
        """Return limits and what is left of them; see ClusterSource."""
        everybody = not own and self._may_administer(client.user)
        caller = None if everybody else Caller(client.user, client.key)
        return tuple(await self.generation.gate.left(caller))

    async def audit_log(self, client: ClientInfo) -> list[AuditLine]:
        """Return the lines that a client may see; see ClusterSource."""
        with _no_directory_is_no_view():
            lines = lines_of(await self.meta.list_records(audit_log.RECORD_KIND))
        if self._may_administer(client.user):
            return lines
        return [line for line in lines if line.who == client.user]

    async def namespaces(self) -> tuple[Namespace, ...]:
        """Return the configured namespaces; tenants without a namespace have the defaults."""
        with _no_directory_is_no_view():
            return await self.meta.list_namespaces()

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that nodes serve."""
        return await self.generation.models()

    async def settings(self) -> tuple[SettingRow, ...]:
        """Return this process's configuration, secrets masked."""
        return tuple(
            SettingRow(entry.key, entry.value, entry.source, entry.description)
            for entry in list_entries(self.config)
        )


def front_checks(
    meta: MetaClient, dispatcher: Dispatcher, *, folder: Path | None
) -> dict[str, Check]:
    """Return the checks of one front by name.

    Args:
        meta: the directory.
        dispatcher: knows the nodes.
        folder: folder of tables and statistics; None if both are in memory.
    """

    clock = SystemClock()

    async def directory() -> str:
        try:
            await meta.list_nodes()
        except DirectoryUnavailableError as error:
            return error.message
        return ""

    async def nodes() -> str:
        now = clock.now()
        records = dispatcher.state.fleet.records.values()
        away = sorted(r.info.node_id for r in records if r.state != "alive" or not r.usable(now))
        return f"do not answer: {', '.join(away)}" if away else ""

    async def pool() -> str:
        states = [s for s in dispatcher.view.nodes if s.info.role.value == "dmp"]
        away = sorted(s.info.node_id for s in states if s.state != "alive")
        return f"pool nodes that do not answer: {', '.join(away)}" if away else ""

    async def disk() -> str:
        return _disk(folder) if folder is not None else ""

    checks: dict[str, Check] = {
        "directory": directory, "nodes": nodes, "pool": pool, "disk": disk,
    }  # fmt: skip
    if (exchange := dispatcher.exchange) is not None:

        async def shared_state() -> str:
            return exchange.trouble

        checks["shared state"] = shared_state
    return checks


def _disk(folder: Path) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    return "" if free >= LEAST_FREE_BYTES else f"{free} bytes are free in {folder}"
