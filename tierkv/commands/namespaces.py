"""``tierkv namespace``: which tenants share KV, and how far answers may depart from exact ones.

The command uses the same cluster as ``tierkv status``. The view ``tierkv.namespaces`` has the same
rows. A change leaves the namespace's remaining values as they were.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ByteSize, TypeAdapter, ValidationError

from tierkv.commands.status import find_cluster
from tierkv.dbfront.contracts import Column
from tierkv.kvcore.errors import DirectoryUnavailableError, NoNodeError, UserError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.metaserver.client import KvLimits, MetaClient, Namespace
from tierkv.metaserver.several_meta import connect_meta
from tierkv.output import OutputFormat, render_rows
from tierkv.parts.access import cluster_access
from tierkv.settings import Settings
from tierkv.sql.text.suggest import did_you_mean

G = TypeVar("G")
T = TypeVar("T")

_UNITS = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
DEFAULT_CODEC = "default"
"""The value of ``--kv-codec`` for "each node's own"."""

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


@dataclass(frozen=True, slots=True)
class NamespaceChange:
    """The changes of ``tierkv namespace set``; None leaves a value unchanged."""

    tenants: tuple[str, ...] | None = None
    cache: bool | None = None
    blend: bool | None = None
    recompute_ratio: float | None = None
    selector: str | None = None
    gradual: bool | None = None
    kv_codec: str | None = None
    capacity_bytes: int | None = None
    ttl_s: float | None = None
    evicts: bool | None = None

    def applied_to(self, namespace: Namespace) -> Namespace:
        """Return the namespace with the changes applied.

        Raises:
            UserError: a ratio is out of range, or a selector or codec is unknown.
        """
        old = namespace.policy
        try:
            policy = ReusePolicy(
                kv_codec=_given(self.kv_codec, _codec, old.kv_codec),
                blend=_given(self.blend, bool, old.blend),
                recompute_ratio=_given(self.recompute_ratio, float, old.recompute_ratio),
                selector=_given(self.selector, _selector, old.selector),
                gradual=_given(self.gradual, bool, old.gradual),
            )
        except ValueError as error:
            raise UserError(str(error), hint="The default is 0.15; 1 is exact.") from error
        return Namespace(
            name=namespace.name,
            tenants=_given(self.tenants, tuple, namespace.tenants),
            cache_enabled=_given(self.cache, bool, namespace.cache_enabled),
            policy=policy,
            limits=self._limits(namespace.limits),
        )

    def _limits(self, old: KvLimits | None) -> KvLimits | None:
        """Return the changed limits; None, which changes nothing, if none is given."""
        if self.capacity_bytes is None and self.ttl_s is None and self.evicts is None:
            return old
        kept = old or KvLimits()
        return KvLimits(
            capacity_bytes=_given(self.capacity_bytes, int, kept.capacity_bytes),
            ttl_s=_given(self.ttl_s, float, kept.ttl_s),
            evicts=_given(self.evicts, bool, kept.evicts),
        )


async def print_namespaces(settings: Settings, output: OutputFormat, name: str = "") -> None:
    """Print one row per namespace, or only the row of namespace ``name``.

    Raises:
        UserError: the namespace does not exist.
        NoNodeError: the meta server does not answer.
    """
    async with _meta(settings) as meta:
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
    async with _meta(settings) as meta:
        known = {namespace.name: namespace for namespace in await meta.list_namespaces()}
        wanted = change.applied_to(known.get(name, Namespace(name)))
        stored = await meta.put_namespace(wanted)
    sys.stdout.write(render_rows(COLUMNS, [_row(stored)], output))


async def drop_namespace(settings: Settings, name: str) -> None:
    """Remove a namespace; its tenants have the defaults again, and keys of their own.

    Raises:
        UserError: there is no such namespace.
        NoNodeError: the meta server does not answer.
    """
    async with _meta(settings) as meta:
        if not await meta.drop_namespace(name):
            known = [namespace.name for namespace in await meta.list_namespaces()]
            raise UserError(f"there is no namespace {name!r}", hint=did_you_mean(name, known))


def read_size(text: str | None) -> int | None:
    """Return the bytes of a text such as ``4GiB``; None of None.

    Raises:
        UserError: the text is no size.
    """
    if text is None:
        return None
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as error:
        raise UserError(
            f"{text!r} is no size", hint="Write 512MiB or 4GiB; 0: no limit."
        ) from error


def read_duration(text: str | None) -> float | None:
    """Return the seconds of ``30s``, ``15min``, ``12h`` or ``7d``; ``0`` is none; None of None.

    Raises:
        UserError: the text is no duration.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|min|h|d)?", text.strip())
    if found is None:
        raise UserError(f"{text!r} is no duration", hint="Write 30s, 15min, 12h or 7d; 0: none.")
    return float(found[1]) * _UNITS[found[2] or "s"]


@asynccontextmanager
async def _meta(settings: Settings) -> AsyncIterator[MetaClient]:
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


def _given(value: G | None, read: Callable[[G], T], old: T) -> T:
    return old if value is None else read(value)


def _selector(name: str) -> BlendSelector:
    if name not in tuple(BlendSelector):
        raise UserError(f"there is no selector {name!r}", hint=did_you_mean(name, BlendSelector))
    return BlendSelector(name)


def _codec(name: str) -> KvCodec | None:
    if name == DEFAULT_CODEC:
        return None
    if name not in tuple(KvCodec):
        known = [DEFAULT_CODEC, *KvCodec]
        raise UserError(f"there is no KV codec {name!r}", hint=did_you_mean(name, known))
    return KvCodec(name)


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
