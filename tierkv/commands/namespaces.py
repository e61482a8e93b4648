"""``tierkv namespace``: which tenants share KV, and how far answers may depart from exact ones.

The command uses the same cluster as ``tierkv status``. The view ``tierkv.namespaces`` has the same
rows. A change leaves the namespace's remaining values as they were.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from pydantic import ByteSize

from tierkv.commands.meta import audit, cluster_meta
from tierkv.dbfront.contracts import Column
from tierkv.dbfront.statement.namespace_change import DEFAULT_CODEC, NamespaceChange
from tierkv.kvcore.errors import UserError
from tierkv.metaserver.client import KvLimits, Namespace
from tierkv.output import OutputFormat, render_rows
from tierkv.settings import Settings
from tierkv.sql.text.suggest import did_you_mean

COLUMNS = (
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
    sys.stdout.write(render_rows(COLUMNS, [_row(namespace) for namespace in chosen], output))


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
    sys.stdout.write(render_rows(COLUMNS, [_row(stored)], output))


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


def _row(namespace: Namespace) -> tuple[Any, ...]:
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
