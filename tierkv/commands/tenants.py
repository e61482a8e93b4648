"""``tierkv namespace`` and ``tierkv key``, on the cluster that ``tierkv status`` would show.

The views ``tierkv.namespaces`` and ``tierkv.audit_log`` show changes. A change leaves a
namespace's remaining values as they were. Fronts let a new key in, and a revoked one out, within a
second; what a revoked key has begun ends.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import platform
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize

from tierkv.commands.options import (
    CapacityOption,
    CodecOption,
    ConfigOption,
    DiskCapacityOption,
    EvictionOption,
    GradualOption,
    IopsOption,
    MediaOption,
    OnFull,
    OnFullOption,
    OnlyModelOption,
    ReadBandwidthOption,
    RecomputeRatioOption,
    SelectorOption,
    SetOption,
    Switch,
    TtlOption,
    VersionOption,
    WeightOption,
    WriteBandwidthOption,
    is_on,
    load,
)
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore import call_limits, limits
from tierkv.kvcore.access import KEY_RECORDS, ApiKey, digest_of, keys_of, new_key
from tierkv.kvcore.call_limits import Subject, SubjectKind, record_name
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError, NoNodeError, UserError
from tierkv.metaserver.client import ClusterRecord, KvLimits, MetaClient, Namespace
from tierkv.output import OutputFormat, render_rows
from tierkv.settings import Settings
from tierkv.sql.text.suggest import did_you_mean

if TYPE_CHECKING:
    from tierkv.dbfront.statement.namespace_change import NamespaceChange


namespace_app = typer.Typer(
    help="Set which tenants share KV, and how far answers may depart from exact ones.",
    no_args_is_help=True,
)

key_app = typer.Typer(help="Make, list and revoke keys of REST clients.", no_args_is_help=True)


@key_app.command("create")
def key_create(
    name: Annotated[str, typer.Argument(help="Name of the key, for lists and limits.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="SQL user on whose behalf the key acts; default: NAME."),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Make a key and print it once; the cluster keeps its hash.

    From the first key on, REST clients need one.

    Example: tierkv key create crm --tenant sales
    """
    asyncio.run(create_key(load(config, settings).settings, name, tenant or name))


@key_app.command("list")
def key_list(
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show the keys of the running cluster, without their secrets."""
    asyncio.run(print_keys(load(config, settings).settings, output))


@key_app.command("revoke")
def key_revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Remove a key; fronts refuse it within a second."""
    asyncio.run(revoke_key(load(config, settings).settings, name))


@namespace_app.command("list")
def namespace_list(
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show the namespaces of the running cluster; other tenants use the namespace.* settings."""
    asyncio.run(print_namespaces(load(config, settings).settings, output))


@namespace_app.command("show")
def namespace_show(
    name: Annotated[str, typer.Argument(help="Name of the namespace.")],
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show one namespace."""
    asyncio.run(print_namespaces(load(config, settings).settings, output, name))


@namespace_app.command("set")
def namespace_set(
    name: Annotated[
        str,
        typer.Argument(help="Name of the namespace; without --tenant, also the tenant using it."),
    ],
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            help="Tenant that uses the namespace; may be repeated. '': only the tenant NAME."
        ),
    ] = None,
    cache: Annotated[Switch | None, typer.Option(help="Store and reuse KV.")] = None,
    blend: Annotated[
        Switch | None,
        typer.Option(help="Reuse documents at any position; answers become approximate."),
    ] = None,
    recompute_ratio: RecomputeRatioOption = None,
    selector: SelectorOption = None,
    gradual: GradualOption = None,
    kv_codec: CodecOption = None,
    capacity: CapacityOption = None,
    disk_capacity: DiskCapacityOption = None,
    ttl: TtlOption = None,
    on_full: OnFullOption = None,
    eviction: EvictionOption = None,
    version: VersionOption = None,
    media: MediaOption = None,
    model: OnlyModelOption = None,
    read_bandwidth: ReadBandwidthOption = None,
    write_bandwidth: WriteBandwidthOption = None,
    iops: IopsOption = None,
    weight: WeightOption = None,
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Create a namespace, or change only the given settings.

    Fronts apply changes within a second, pool nodes within 2 s.

    Example: tierkv namespace set default --blend on --recompute-ratio 0.2
    Example: tierkv namespace set red --tenant ann --tenant bob --capacity 4GiB --ttl 12h
    """
    from tierkv.dbfront.statement import namespace_change as options

    change = options.NamespaceChange(
        tenants=None if tenant is None else tuple(filter(None, tenant)),
        cache=is_on(cache),
        blend=is_on(blend),
        recompute_ratio=recompute_ratio,
        selector=selector,
        gradual=is_on(gradual),
        kv_codec=kv_codec,
        capacity_bytes=options.read_size(capacity),
        ttl_s=options.read_duration(ttl),
        evicts=None if on_full is None else on_full is OnFull.EVICT,
        eviction=options.read_policy(eviction),
        version=version,
        disk_capacity_bytes=options.read_size(disk_capacity),
        read_bytes_per_s=options.read_bandwidth(read_bandwidth),
        write_bytes_per_s=options.read_bandwidth(write_bandwidth),
        requests_per_s=options.read_iops(iops),
        weight=options.read_weight(weight),
        media=options.read_media(media),
        model=options.read_model(model),
    )
    asyncio.run(set_namespace(load(config, settings).settings, name, change, output))


@namespace_app.command("drop")
def namespace_drop(
    name: Annotated[str, typer.Argument(help="Name of the namespace.")],
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Remove a namespace. Its tenants share no KV any more, and have no limits."""
    asyncio.run(drop_namespace(load(config, settings).settings, name))


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
    Column("disk_capacity", "VARCHAR"),
    Column("ttl_s", "DOUBLE"),
    Column("on_full", "VARCHAR"),
    Column("eviction", "VARCHAR"),
    Column("version", "VARCHAR"),
    Column("media", "VARCHAR"),
    Column("model", "VARCHAR"),
    Column("read_bandwidth", "VARCHAR"),
    Column("write_bandwidth", "VARCHAR"),
    Column("iops", "DOUBLE"),
    Column("weight", "DOUBLE"),
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
        "default" if policy.kv_codec is None else policy.kv_codec.value,
        policy.blend,
        policy.recompute_ratio,
        policy.selector.value,
        policy.gradual,
        _size(kept.capacity_bytes),
        _size(kept.disk_capacity_bytes),
        kept.ttl_s or None,
        "evict" if kept.evicts else "refuse",
        kept.eviction or None,
        kept.version or None,
        kept.media or None,
        kept.model or None,
        _rate(kept.read_bytes_per_s),
        _rate(kept.write_bytes_per_s),
        kept.requests_per_s or None,
        kept.weight or None,
    )


def _rate(bytes_per_s: int) -> str | None:
    return f"{_size(bytes_per_s)}/s" if bytes_per_s else None


def _size(size_bytes: int) -> str | None:
    return ByteSize(size_bytes).human_readable() if size_bytes else None


KEY_COLUMNS = (Column("name", "VARCHAR"), Column("tenant", "VARCHAR"), Column("made", "VARCHAR"))


async def create_key(settings: Settings, name: str, tenant: str) -> None:
    """Make a key and print it, alone on a line; it is shown this once.

    Raises:
        UserError: the name is malformed or taken.
        NoNodeError: the meta server does not answer.
    """
    for what, given in (("key", name), ("tenant", tenant)):
        if not re.fullmatch(limits.NAME_PATTERN, given):
            raise UserError(
                f"{given[:40]!r} is no name of a {what}",
                hint="Use letters, digits and _ . : - /, beginning with a letter, digit or _.",
            )
    secret = new_key()
    key = ApiKey(name, tenant, digest_of(secret), SystemClock().wall())
    async with cluster_meta(settings) as meta:
        if any(
            each.name == name for each in keys_of(await meta.list_records(KEY_RECORDS)).values()
        ):
            raise UserError(
                f"there is a key {name!r} already",
                hint=f"Give the new one another name, or run `tierkv key revoke {name}` first.",
            )
        await meta.put_record(ClusterRecord(KEY_RECORDS, name, key.to_json()))
        await audit(meta, "tierkv key create", f"key {name}", f"tenant = {tenant}")
    sys.stdout.write(f"{secret}\n")
    sys.stderr.write("Keep it: only its hash is stored. Send it as Authorization: Bearer KEY.\n")


async def print_keys(settings: Settings, output: OutputFormat) -> None:
    """Print one row per key, without the secrets.

    Raises:
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        keys = keys_of(await meta.list_records(KEY_RECORDS)).values()
    rows = [_key_row(key) for key in sorted(keys, key=lambda key: key.name)]
    sys.stdout.write(render_rows(KEY_COLUMNS, rows, output))


async def revoke_key(settings: Settings, name: str) -> None:
    """Remove a key.

    Raises:
        UserError: there is no such key.
        NoNodeError: the meta server does not answer.
    """
    async with cluster_meta(settings) as meta:
        if not await meta.put_record(ClusterRecord(KEY_RECORDS, name, "")):
            known = [key.name for key in keys_of(await meta.list_records(KEY_RECORDS)).values()]
            raise UserError(f"there is no key {name!r}", hint=did_you_mean(name, known))
        limit = record_name(Subject(SubjectKind.KEY, name))  # Not for a later key of the name.
        await meta.put_record(ClusterRecord(call_limits.RECORD_KIND, limit, ""))
        await audit(meta, "tierkv key revoke", f"key {name}")


def _key_row(key: ApiKey) -> tuple[Any, ...]:
    made = datetime.fromtimestamp(key.made_unix_s, UTC).isoformat(sep=" ", timespec="seconds")
    return key.name, key.tenant, made


async def audit(meta: MetaClient, action: str, subject: str, detail: str = "") -> None:
    """Append a line to the audit log, on behalf of the user of this machine."""
    from tierkv.parts.audit_writer import AuditWriter

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
    from tierkv.commands.status import find_cluster
    from tierkv.metaserver.several_meta import connect_meta
    from tierkv.parts.access import cluster_access  # as the others: gRPC

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
