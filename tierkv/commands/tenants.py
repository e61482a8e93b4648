"""``tierkv namespace`` and ``tierkv key``, on the cluster that ``tierkv status`` would show.

The views ``tierkv.namespaces`` and ``tierkv.audit_log`` show what was changed. A change leaves a
namespace's remaining values as they were. Fronts let a new key in, and a revoked one out, within a
second; what a revoked key has begun ends.
"""

from __future__ import annotations

import getpass
import os
import platform
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pydantic import ByteSize

from tierkv.commands.status import find_cluster
from tierkv.dbfront.contracts import Column
from tierkv.dbfront.statement.namespace_change import DEFAULT_CODEC, NamespaceChange
from tierkv.kvcore.api_keys import RECORD_KIND, ApiKey, digest_of, keys_of, new_key
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError, NoNodeError, UserError
from tierkv.metaserver.client import ClusterRecord, KvLimits, MetaClient, Namespace
from tierkv.metaserver.several_meta import connect_meta
from tierkv.output import OutputFormat, render_rows
from tierkv.parts.access import cluster_access
from tierkv.parts.audit_writer import AuditWriter
from tierkv.settings import Settings
from tierkv.sql.text.suggest import did_you_mean

NAMESPACE_COLUMNS = (
    Column("name", "VARCHAR"),
    Column("tenants", "VARCHAR"),
    Column("cache", "BOOLEAN"),
    Column("kv_codec", "VARCHAR"),
    Column("blend", "BOOLEAN"),
    Column("recompute_ratio", "DOUBLE"),
    Column("selector", "VARCHAR"),
    Column("gradual", "BOOLEAN"),
    Column("capacity", "VARCHAR"),
    Column("ttl_s", "DOUBLE"),
    Column("on_full", "VARCHAR"),
)


async def print_namespaces(settings: Settings, output: OutputFormat, name: str = "") -> None:
    """Print one row per namespace, or only the row of namespace ``name``.

    Raises:
        UserError: the namespace does not exist.
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        known = await meta.list_namespaces()
    chosen = [namespace for namespace in known if name in ("", namespace.name)]
    if name and not chosen:
        raise UserError(
            f"there is no namespace {name!r}",
            hint=did_you_mean(name, [namespace.name for namespace in known])
            if known
            else f"Make it with `tierkv namespace set {name}`.",
        )
    sys.stdout.write(
        render_rows(NAMESPACE_COLUMNS, [_namespace_row(namespace) for namespace in chosen], output)
    )


async def set_namespace(
    settings: Settings, name: str, change: NamespaceChange, output: OutputFormat
) -> None:
    """Create or change a namespace and print the result.

    Raises:
        UserError: a name, tenant or value is invalid.
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        known = {namespace.name: namespace for namespace in await meta.list_namespaces()}
        wanted = change.applied_to(known.get(name, Namespace(name)))
        stored = await meta.put_namespace(wanted)
        await audit(meta, "tierkv namespace set", name, _text(change))
    sys.stdout.write(render_rows(NAMESPACE_COLUMNS, [_namespace_row(stored)], output))


async def drop_namespace(settings: Settings, name: str) -> None:
    """Remove a namespace; its tenants have the defaults again, and keys of their own.

    Raises:
        UserError: there is no such namespace.
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        if not await meta.drop_namespace(name):
            known = [namespace.name for namespace in await meta.list_namespaces()]
            raise UserError(f"there is no namespace {name!r}", hint=did_you_mean(name, known))
        await audit(meta, "tierkv namespace drop", name)


def _text(change: NamespaceChange) -> str:
    given = {k: value for k, value in asdict(change).items() if value is not None}
    return ", ".join(f"{name} = {value}" for name, value in given.items())


def _namespace_row(namespace: Namespace) -> tuple[Any, ...]:
    policy, kept = namespace.policy, namespace.limits or KvLimits()
    return (
        namespace.name,
        ", ".join(namespace.tenants or (namespace.name,)),
        namespace.cache_enabled,
        DEFAULT_CODEC if policy.kv_codec is None else policy.kv_codec.value,
        policy.blend,
        policy.recompute_ratio,
        policy.selector.value,
        policy.gradual,
        ByteSize(kept.capacity_bytes).human_readable() if kept.capacity_bytes else None,
        kept.ttl_s or None,
        "evict" if kept.evicts else "refuse",
    )


KEY_COLUMNS = (Column("name", "VARCHAR"), Column("tenant", "VARCHAR"), Column("made", "VARCHAR"))


async def create_key(settings: Settings, name: str, tenant: str) -> None:
    """Make a key and print it, alone on a line; it is shown this once.

    Raises:
        UserError: the name is malformed or taken.
        NoNodeError: the meta server does not answer.
    """
    secret = new_key()
    key = ApiKey(name, tenant, digest_of(secret), SystemClock().wall())
    async with cluster_meta(settings) as meta:
        if any(
            each.name == name for each in keys_of(await meta.list_records(RECORD_KIND)).values()
        ):
            raise UserError(
                f"there is a key {name!r} already",
                hint=f"Give the new one another name, or run `tierkv key revoke {name}` first.",
            )
        await meta.put_record(ClusterRecord(RECORD_KIND, name, key.to_json()))
        await audit(meta, "tierkv key create", f"key {name}", f"tenant = {tenant}")
    sys.stdout.write(f"{secret}\n")
    sys.stderr.write("Keep it: only its hash is stored. Send it as Authorization: Bearer KEY.\n")


async def print_keys(settings: Settings, output: OutputFormat) -> None:
    """Print one row per key, without the secrets.

    Raises:
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        keys = keys_of(await meta.list_records(RECORD_KIND)).values()
    rows = [_key_row(key) for key in sorted(keys, key=lambda key: key.name)]
    sys.stdout.write(render_rows(KEY_COLUMNS, rows, output))


async def revoke_key(settings: Settings, name: str) -> None:
    """Remove a key.

    Raises:
        UserError: there is no such key.
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        if not await meta.put_record(ClusterRecord(RECORD_KIND, name, "")):
            known = [key.name for key in keys_of(await meta.list_records(RECORD_KIND)).values()]
            raise UserError(f"there is no key {name!r}", hint=did_you_mean(name, known))
        await audit(meta, "tierkv key revoke", f"key {name}")


def _key_row(key: ApiKey) -> tuple[Any, ...]:
    made = datetime.fromtimestamp(key.made_unix_s, UTC).isoformat(sep=" ", timespec="seconds")
    return key.name, key.tenant, made


async def audit(meta: MetaClient, action: str, subject: str, detail: str = "") -> None:
    """Append a line to the audit log, on behalf of the user of this machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # A container's user may have no name.
        user = f"uid {os.getuid()}"
    await AuditWriter(meta).write(f"{user}@{platform.node()}", action, subject, detail=detail)


@asynccontextmanager
async def cluster_meta(settings: Settings) -> AsyncIterator[MetaClient]:
    """Yield a client of the meta server of the cluster that ``tierkv status`` would show.

    Raises:
        NoNodeError: the meta server does not answer, or could not store a change.
    """
    settings, _ = find_cluster(settings)
    address = settings.cluster.meta_address
    access = cluster_access(settings.cluster)
    meta = connect_meta(address, token=access.token, tls=access.tls)
    try:
        yield meta
    except DirectoryUnavailableError as error:
        if error.hint:  # The server answered but refused, for example with a full disk.
            raise NoNodeError(error.message, hint=error.hint) from error
        raise NoNodeError(
            f"no meta server answers at {address}",
            detail=error.message,
            hint="See `tierkv status`, or start a cluster with `tierkv up`.",
        ) from error
    finally:
        await meta.close()
