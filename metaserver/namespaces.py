"""Durable namespaces and the cluster secret, in one SQLite file.

Called by metaserver/local.py, from any thread. Reads come from memory; only ``put`` waits for the
disk, and callers run ``put`` off the event loop.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sqlite3
import threading
from dataclasses import asdict, replace

from tierkv.kvcore import block_key, limits
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError, UserError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.metaserver.client import Namespace, NamespaceGrant
from tierkv.metaserver.database_file import DatabaseFile, is_full

log = logging.getLogger(__name__)

_SECRET_BYTES = 32
_MAX_TENANTS = 10_000
_NAME = re.compile(limits.NAME_PATTERN)
_SHARED_DOMAIN = "shared {}"
"""A space never occurs in a name, so no tenant name can equal the domain of a shared namespace."""


class NamespaceStore:
    """Which tenants share blocks.

    At most one namespace lists a tenant; an unlisted tenant shares with no other tenant. A
    namespace without tenants is the policy of the tenant with the same name.

    Attributes:
        trouble: database damage found at the start, for people; empty without damage.
        _namespaces: mirror of the table; the table is written first.
        _namespace_of: the namespace that applies to each tenant.
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
            database: a path, or ``:memory:``.
            cluster_secret: 16 to 64 bytes; None takes the secret of the database, made at the first
                start.
            default_policy: policy of tenants without a namespace; exact reuse if None.

        Raises:
            ConfigError: the file can't be opened, is not a namespace database, or is in use by
                another process.
        """
        self._lock = threading.Lock()
        self._file = DatabaseFile(database)
        self._default_policy = default_policy or ReusePolicy()
        try:
            self._connection = self._file.open()
            try:
                self._secret = cluster_secret or self._stored_secret()
                self._namespaces = self._stored_namespaces()
            except (sqlite3.Error, ConfigError):
                self._connection.close()
                raise
            self._file.back_up(self._connection)
        except ConfigError:
            self._file.close()
            raise
        except (sqlite3.Error, OSError) as error:
            self._file.close()
            raise ConfigError(
                f"meta.database = {database!r} can't be used: {error}",
                hint="Name a file in a directory this process may write, or :memory:.",
            ) from error
        self._namespace_of = _index(self._namespaces)
        self.trouble = self._file.trouble

    def resolve(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes
    ) -> NamespaceGrant:
        """Return the key of a tenant's blocks.

        Raises:
            UserError: the tenant's name has invalid characters.
        """
        _check_name(tenant, "tenant")
        namespace = self._namespace_of.get(tenant)
        shared = namespace is not None and bool(namespace.tenants)
        domain = namespace.name if namespace is not None else tenant
        policy = namespace.policy if namespace is not None else self._default_policy
        if policy.kv_codec is not None:  # Blocks of different codecs have different names.
            layout_fingerprint += policy.kv_codec.encode()
        return NamespaceGrant(
            namespace_key=block_key.namespace_key(
                self._secret,
                tenant=_SHARED_DOMAIN.format(domain) if shared else tenant,
                model_revision=model_revision,
                layout_fingerprint=layout_fingerprint,
            ),
            domain=domain,
            cache_enabled=namespace is None or namespace.cache_enabled,
            policy=policy,
        )

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
        with self._lock:
            changed = _normalised(namespace)
            self._check(changed)
            try:
                self._write(changed)
            except sqlite3.Error as error:
                raise DirectoryUnavailableError(
                    f"namespace {changed.name} could not be stored: {error}",
                    hint=_storage_hint(error),
                ) from error
            self._file.back_up(self._connection)
            self._namespaces[changed.name] = changed
            self._namespace_of = _index(self._namespaces)
            return changed

    def close(self) -> None:
        """Close the database; the object can't be used afterwards."""
        with self._lock:
            self._connection.close()
            self._file.close()

    def _write(self, namespace: Namespace) -> None:
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO namespaces VALUES (?, ?, ?, ?)",
                (
                    namespace.name,
                    json.dumps(namespace.tenants),
                    namespace.cache_enabled,
                    json.dumps(asdict(namespace.policy)),
                ),
            )

    def _check(self, namespace: Namespace) -> None:
        _check_name(namespace.name, "namespace")
        if len(namespace.tenants) > _MAX_TENANTS:
            raise UserError(f"a namespace has at most {_MAX_TENANTS} tenants")
        for tenant in namespace.tenants:
            _check_name(tenant, "tenant")
            other = self._namespace_of.get(tenant)
            if other is not None and other.tenants and other.name != namespace.name:
                raise UserError(
                    f"tenant {tenant} already belongs to namespace {other.name}",
                    hint=f"Remove {tenant} from {other.name} first.",
                )

    def _stored_namespaces(self) -> dict[str, Namespace]:
        rows = self._connection.execute(
            "SELECT name, tenants, cache_enabled, policy FROM namespaces"
        )
        return {
            name: Namespace(name, tuple(json.loads(tenants)), bool(enabled), _policy(name, policy))
            for name, tenants, enabled, policy in rows
        }

    def _stored_secret(self) -> bytes:
        """Return the secret of the database, of the secret file, or a new one; store it in both."""
        fallback = self._file.read_secret()
        with self._connection:
            self._connection.execute(
                "INSERT OR IGNORE INTO cluster VALUES ('secret', ?)",
                (fallback or secrets.token_bytes(_SECRET_BYTES),),
            )
        row = self._connection.execute("SELECT value FROM cluster WHERE name = 'secret'").fetchone()
        secret = bytes(row[0])
        if self._file.trouble and secret != fallback:
            log.critical("the cluster secret may be another one: blocks of before may not be found")
        if secret != fallback:
            self._file.write_secret(secret)
        return secret


def _storage_hint(error: sqlite3.Error) -> str:
    if is_full(error):
        return "The disk of meta.database is full: free space there, then try again."
    return "The file of meta.database can't be written: see the meta server's log."


def _index(namespaces: dict[str, Namespace]) -> dict[str, Namespace]:
    """Map each tenant to a namespace; a namespace listing the tenant wins over its own."""
    own = {ns.name: ns for ns in namespaces.values() if not ns.tenants}
    shared = {tenant: ns for ns in namespaces.values() for tenant in ns.tenants}
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
