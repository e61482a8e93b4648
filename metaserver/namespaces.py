"""Durable namespaces, records and the cluster secret, in a SQLite file or in PostgreSQL.

Called by metaserver/local.py, from any thread. Reads come from memory; only writes wait for the
database, and callers write off the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, fields, replace

from tierkv.kvcore import audit, block, limits
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError, UserError
from tierkv.kvcore.ids import scope_of_version, tenant_of
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.metaserver.client import ClusterRecord, KvLimits, Namespace, NamespaceGrant
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.database_file import DatabaseFile
from tierkv.metaserver.namespace_database import (
    POSTGRES_SCHEMES,
    NamespaceDatabase,
    NamespaceRow,
    Stored,
    StoredRecord,
)
from tierkv.policies.select import NAMESPACE_POLICIES

_SECRET_BYTES = 32
_MAX_TENANTS = 10_000
_LONGEST_TTL_S = 10 * 365 * 86_400.0
_MOST_AMOUNT = 1 << 62
_NAME = re.compile(limits.NAME_PATTERN)
_SHARED_DOMAIN = "shared {}"
_VERSION = " version {}"
"""A space never occurs in a name, so no tenant name can equal the domain of a shared namespace, or
one with a version."""


class NamespaceStore:
    """Which tenants share blocks.

    At most one namespace lists a tenant, and at most one more for each model; an unlisted tenant
    shares with no other tenant. A namespace without tenants is the policy of the tenant with the
    same name.

    Attributes:
        version: differs after a change of a namespace.
        _namespaces, _records: mirrors of the tables; the tables are written first.
        _namespace_of: the namespace that applies to each tenant and model; with an empty model, to
            all models without a namespace of their own.
    """

    def __init__(
        self,
        database: str,
        *,
        cluster_secret: bytes | None = None,
        default_policy: ReusePolicy | None = None,
    ) -> None:
        """Open or make the database.

        Args:
            database: a path, ``:memory:``, or a PostgreSQL URL.
            cluster_secret: 16 to 64 bytes; None takes the secret of the database, made at the first
                start.
            default_policy: policy of tenants without a namespace; exact reuse if None.

        Raises:
            ConfigError: the file can't be opened, is not a namespace database, or is in use by
                another process.
        """
        self.version = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._default_policy = default_policy or ReusePolicy()
        self._database = _database(database)
        self._database.open()
        try:
            fresh = secrets.token_bytes(_SECRET_BYTES)
            self._secret = cluster_secret or self._database.secret(fresh)
            self._take(self._database.stored())
        except ConfigError:
            self._database.close()
            raise
        self._database.follow(self._take)

    @property
    def trouble(self) -> str:
        """Return what is wrong with the database, for people; empty without trouble."""
        return self._database.trouble

    def resolve(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes, model: str = ""
    ) -> NamespaceGrant:
        """Return the key of a tenant's blocks.

        Raises:
            UserError: the tenant's name has invalid characters.
        """
        _check_name(tenant, "tenant")
        namespace = self._of(tenant, model)
        shared = namespace is not None and bool(namespace.tenants)
        domain = namespace.name if namespace is not None else tenant
        policy = namespace.policy if namespace is not None else self._default_policy
        version = self._version(tenant, model)
        if policy.kv_codec is not None:  # Blocks of different codecs have different names.
            layout_fingerprint += policy.kv_codec.encode()
        return NamespaceGrant(
            namespace_key=block.namespace_key(
                self._secret,
                tenant=(_SHARED_DOMAIN.format(domain) if shared else tenant)
                + (_VERSION.format(version) if version else ""),
                model_revision=model_revision,
                layout_fingerprint=layout_fingerprint,
            ),
            domain=domain,
            cache_enabled=namespace is None or namespace.cache_enabled,
            policy=policy,
            version=version,
        )

    def _of(self, tenant: str, model: str) -> Namespace | None:
        known = self._namespace_of
        return known.get((tenant, model)) or known.get((tenant, ""))

    def _version(self, scope: str, model: str) -> str:
        namespace = self._of(tenant_of(scope), model)
        return "" if namespace is None or namespace.limits is None else namespace.limits.version

    def namespaces(self) -> tuple[Namespace, ...]:
        """Return all namespaces, sorted by name."""
        with self._lock:
            return tuple(ns for _, ns in sorted(self._namespaces.items()))

    def put(self, namespace: Namespace) -> Namespace:
        """Make or replace a namespace; durable on return.

        Raises:
            UserError: a malformed name, too many tenants, or a tenant listed by another namespace.
            DirectoryUnavailableError: the database refused (disk full, closed).
        """
        changed = _normalised(namespace)

        def check(stored: Stored) -> NamespaceRow:
            known = _namespaces(stored)
            kept = _with_limits(changed, known)
            self._check(kept, known)
            return _row(kept)

        with self._writing:
            stored = self._database.write(check)
            self._take(stored)
        return _namespaces(stored)[changed.name]

    def drop(self, name: str) -> bool:
        """Remove a namespace; its tenants have the defaults again. Return whether there was one.

        Raises:
            DirectoryUnavailableError: the database refused.
        """
        with self._writing:
            there = name in self._namespaces
            self._take(self._database.remove(name))
        return there

    def records(self, kind: str) -> tuple[ClusterRecord, ...]:
        """Return the records of a kind, by name."""
        with self._lock:
            return tuple(each for each in self._records.values() if each.kind == kind)

    def put_record(self, record: ClusterRecord) -> bool:
        """Make, replace or remove a record; return whether there was one. Durable on return.

        Raises:
            UserError: a malformed name, too long a body, or too many records.
            DirectoryUnavailableError: the database refused.
        """
        _check_name(record.kind, "record kind")
        _check_name(record.name, "record")
        with self._writing:
            there = (record.kind, record.name) in self._records
            if not record.body:
                self._take(self._database.remove_record(record.kind, record.name))
                return there
            _check_size(record, sum(1 for kind, _ in self._records if kind != audit.RECORD_KIND))
            self._take(self._database.write_record(StoredRecord(*astuple(record))))
            if record.kind == audit.RECORD_KIND:
                for old in self.records(record.kind)[: -limits.MAX_AUDIT_RECORDS]:
                    self._take(self._database.remove_record(old.kind, old.name))
        return there

    def close(self) -> None:
        """Close the database; the object can't be used afterwards."""
        with self._writing:
            self._database.close()

    def _take(self, stored: Stored) -> None:
        """Take the tables over; also called after writes of other servers, in another thread."""
        namespaces = _namespaces(stored)
        digest = hashlib.blake2b(repr(stored.namespaces).encode(), digest_size=8).digest()
        with self._lock:
            self._records = {(row.kind, row.name): ClusterRecord(*row) for row in stored.records}
            self._namespaces = namespaces
            self._namespace_of = _index(namespaces)
            self.version = int.from_bytes(digest, "little") | 1  # Of all servers the same.

    @staticmethod
    def _check(namespace: Namespace, known: dict[str, Namespace]) -> None:
        namespace_of = _index(known)
        model = namespace.model
        _check_name(namespace.name, "namespace")
        if model:
            _check_name(model, "model")
        if len(namespace.tenants) > _MAX_TENANTS:
            raise UserError(f"a namespace has at most {_MAX_TENANTS} tenants")
        for tenant in namespace.tenants:
            _check_name(tenant, "tenant")
            other = namespace_of.get((tenant, model))
            if other is not None and other.tenants and other.name != namespace.name:
                raise UserError(
                    f"tenant {tenant} already belongs to namespace {other.name}",
                    hint=f"Remove {tenant} from {other.name} first.",
                )


class LocalRecords:
    """Implements the durable methods of MetaClient.

    Writes wait for the disk, so writes run in a thread, under the store's own lock.

    Attributes:
        namespaces: the durable state; its ``trouble`` is the damage found at the start.
    """

    def __init__(self, config: MetaConfig) -> None:
        """Open the durable state; raise ConfigError when the database can't be used."""
        self.namespaces = NamespaceStore(
            config.database,
            cluster_secret=config.cluster_secret,
            default_policy=config.default_policy,
        )
        self._lock = threading.Lock()
        self._closed = False

    async def resolve_namespace(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes, model: str = ""
    ) -> NamespaceGrant:
        with self._open():
            return self.namespaces.resolve(
                tenant,
                model_revision=model_revision,
                layout_fingerprint=layout_fingerprint,
                model=model,
            )

    async def list_namespaces(self) -> tuple[Namespace, ...]:
        with self._open():
            return self.namespaces.namespaces()

    async def put_namespace(self, namespace: Namespace) -> Namespace:
        with self._open():
            pass
        return await asyncio.to_thread(self.namespaces.put, namespace)

    async def drop_namespace(self, name: str) -> bool:
        with self._open():
            pass
        return await asyncio.to_thread(self.namespaces.drop, name)

    async def list_records(self, kind: str) -> tuple[ClusterRecord, ...]:
        with self._open():
            return self.namespaces.records(kind)

    async def put_record(self, record: ClusterRecord) -> bool:
        with self._open():
            pass
        return await asyncio.to_thread(self.namespaces.put_record, record)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock; refuse after ``close``."""
        with self._lock:
            if self._closed:
                raise DirectoryUnavailableError("the meta server in this process is closed")
            yield


def _database(database: str) -> NamespaceDatabase:
    if not database.startswith(POSTGRES_SCHEMES):
        return DatabaseFile(database)
    try:
        from tierkv.metaserver.database_postgres import PostgresDatabase  # psycopg: only for a URL
    except ImportError:
        raise ConfigError(
            "meta.database in PostgreSQL needs psycopg",
            hint="Run `pip install 'tierkv[postgres]'`.",
        ) from None
    return PostgresDatabase(database)


def _check_size(record: ClusterRecord, count: int) -> None:
    if len(record.body) > limits.MAX_RECORD_CHARS or count > limits.MAX_RECORDS:
        raise UserError(
            f"a record has at most {limits.MAX_RECORD_CHARS} characters, and there are at most "
            f"{limits.MAX_RECORDS}",
            hint="Remove limits or keys that nobody uses.",
        )


def _namespaces(stored: Stored) -> dict[str, Namespace]:
    return {
        row.name: Namespace(
            row.name,
            tuple(json.loads(row.tenants)),
            row.cache_enabled,
            _policy(row.name, row.policy),
            _limits(row.name, row.limits),
        )
        for row in stored.namespaces
    }


def _with_limits(changed: Namespace, known: dict[str, Namespace]) -> Namespace:
    """Return a change with limits: those of before, where it names none."""
    if changed.limits is None:
        before = known.get(changed.name)
        return replace(changed, limits=before.limits if before is not None else KvLimits())
    kept = changed.limits
    amounts = (
        *(kept.capacity_bytes, kept.disk_capacity_bytes),
        *(kept.read_bytes_per_s, kept.write_bytes_per_s, kept.requests_per_s, kept.weight),
    )
    fits = all(0 <= amount < _MOST_AMOUNT for amount in amounts)
    if not fits or not 0.0 <= kept.ttl_s <= _LONGEST_TTL_S:
        raise UserError(
            "a namespace's capacities, rates, weight and time to live can't be negative, and a "
            "time is at most ten years"
        )
    if kept.media not in ("", "memory", "disk"):
        raise UserError(f"there is no medium {kept.media[:40]!r}", hint="Use memory, disk or both.")
    if changed.limits.eviction not in ("", *NAMESPACE_POLICIES):
        raise UserError(
            f"there is no eviction policy {changed.limits.eviction[:40]!r}",
            hint=f"Use one of {', '.join(NAMESPACE_POLICIES)}.",
        )
    _check_version(changed.limits.version, changed.members)
    return changed


def _check_version(version: str, members: Sequence[str]) -> None:
    if not version:
        return
    _check_name(version, "version")
    longest = max(members, key=len)
    if len(scope_of_version(longest, version)) > limits.MAX_NAME_CHARS:
        raise UserError(
            f"tenant {longest[:40]}... has too long a name for a namespace with a version",
            hint=f"Use at most {limits.MAX_NAME_CHARS - len(scope_of_version('', version))} "
            "characters.",
        )


def _row(namespace: Namespace) -> NamespaceRow:
    return NamespaceRow(
        namespace.name,
        json.dumps(namespace.tenants),
        namespace.cache_enabled,
        json.dumps(asdict(namespace.policy)),
        json.dumps(asdict(namespace.limits or KvLimits())),
    )


def _limits(name: str, text: str) -> KvLimits | None:
    """Read limits; those that a later release added are left alone. None if there are none."""
    known = {field.name for field in fields(KvLimits)}
    try:
        found = {key: value for key, value in json.loads(text).items() if key in known}
        kept = KvLimits(**found)
        return None if kept == KvLimits() else kept
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the limits of namespace {name} can't be read: {error}") from error


def _index(namespaces: dict[str, Namespace]) -> dict[tuple[str, str], Namespace]:
    """Map each tenant and model to a namespace; a namespace listing the tenant wins over its own.

    The model is empty for a namespace of all models.
    """
    own = {(ns.name, ns.model): ns for ns in namespaces.values() if not ns.tenants}
    shared = {(tenant, ns.model): ns for ns in namespaces.values() for tenant in ns.tenants}
    return own | shared


def _normalised(namespace: Namespace) -> Namespace:
    tenants = tuple(sorted(set(namespace.tenants)))
    return replace(namespace, tenants=tenants)


def _policy(name: str, text: str) -> ReusePolicy:
    try:
        fields = json.loads(text)
        codec = fields.pop("kv_codec", None)
        selector = fields.pop("selector", BlendSelector.HKVD)
        return ReusePolicy(
            kv_codec=None if codec is None else KvCodec(codec),
            selector=BlendSelector(selector),
            **fields,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the policy of namespace {name} can't be read: {error}",
            hint="A newer version of TierKV may have written it: use that one.",
        ) from error


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name[:40]!r} is not a {what} name: use 1 to {limits.MAX_NAME_CHARS} letters, digits "
            "and _ . : - /, beginning with a letter, digit or _"
        )
