"""A change of a namespace: only of the values named by the user.

Pure. Used by ``tierkv namespace`` (tierkv/commands/tenants.py) and by CREATE and ALTER
KV NAMESPACE (tierkv/parts/front_source.py), so that both mean the same by an option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

from pydantic import ByteSize, TypeAdapter, ValidationError

from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlError, SqlSyntaxError, UserError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.kvcore.value_kinds import Flag
from tierkv.metaserver.client import KvLimits, Namespace
from tierkv.policies.select import NAMESPACE_POLICIES
from tierkv.sql.cluster_command import ClusterCommand
from tierkv.sql.command_reader import CommandOption
from tierkv.sql.text.suggest import did_you_mean

G = TypeVar("G")
T = TypeVar("T")
_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_MOST_BYTES: Final = 1 << 60
DEFAULT_CODEC: Final = "default"
"""The codec's name for "each node's own"."""
NODES_POLICY: Final = "node"
"""The eviction policy's name for "each node's own"."""
ALL_MODELS: Final = "all"
"""The model's name for "all models"."""


@dataclass(frozen=True, slots=True)
class NamespaceChange:
    """The values that change; None leaves a value as it was."""

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
    eviction: str | None = None
    version: str | None = None
    disk_capacity_bytes: int | None = None
    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None
    requests_per_s: float | None = None
    weight: float | None = None
    media: str | None = None
    model: str | None = None

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
        given = {
            each.name: value
            for each in fields(KvLimits)
            if (value := getattr(self, each.name)) is not None
        }
        return replace(old or KvLimits(), **given) if given else old


def read_size(text: str | None) -> int | None:
    """Return the bytes of a text such as ``4GiB``; None of None.

    Raises:
        UserError: the text is no size.
    """
    if text is None:
        return None
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
        if size > _MOST_BYTES:
            raise UserError(f"{text!r} is too large", hint="The largest size is 1EiB.")
        return size
    except (ValidationError, OverflowError) as error:
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


def read_options(
    options: Sequence[CommandOption], known: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """Return the values of a statement's options by name.

    Args:
        options: as written.
        known: how to read the text of each option; ValueError has the end of a sentence.

    Raises:
        SqlSyntaxError: an unknown option.
        UserError: a value that the option can't have; the position is the option's.
    """
    found: dict[str, Any] = {}
    for option in options:
        if option.name not in known:
            raise SqlSyntaxError(
                f"unknown option {option.name}",
                position=option.position,
                hint=did_you_mean(option.name, known),
            )
        try:
            found[option.name] = known[option.name](option.value)
        except UserError as error:
            error.position = option.position
            raise
        except ValueError as error:
            raise UserError(
                f"{option.name} = {option.value!r} {error}", position=option.position
            ) from error
    return found


def change_of(options: Sequence[CommandOption]) -> NamespaceChange:
    """Return the change that options of a statement ask for.

    Raises:
        SqlSyntaxError: an unknown option.
        UserError: a value that the option can't have; the position is the option's.
    """
    values = read_options(options, {name: read for name, (_, read) in OPTIONS.items()})
    found: dict[str, Any] = {OPTIONS[name][0]: value for name, value in values.items()}
    return NamespaceChange(**found)


def _tenants(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("is not a number") from None


def _evicts(text: str) -> bool:
    if text not in ("evict", "refuse"):
        raise ValueError("must be evict or refuse")
    return text == "evict"


def read_policy(text: str | None) -> str | None:
    """Return the name of an eviction policy; ``node`` is each node's own; None of None.

    Raises:
        UserError: there is no such policy.
    """
    if text == NODES_POLICY:
        return ""
    if text is not None and text not in NAMESPACE_POLICIES:
        known = [*NAMESPACE_POLICIES, NODES_POLICY]
        raise UserError(
            f"there is no eviction policy {text!r}",
            hint=did_you_mean(text, known) or f"Use one of {', '.join(known)}.",
        )
    return text


def read_bandwidth(text: str | None) -> int | None:
    """Return the bytes per second of a text such as ``200MB/s``; ``0`` is no limit; None of None.

    Raises:
        UserError: the text is no rate.
    """
    try:
        return None if text is None else read_size(text.strip().removesuffix("/s"))
    except UserError as error:
        raise UserError(
            f"{text!r} is no bandwidth", hint="Write '200MB/s' or '1GiB/s'; 0: no limit."
        ) from error


def read_iops(text: str | None) -> float | None:
    """Return the requests per second of a text such as ``5000``; None of None.

    Raises:
        UserError: the text is no number, or is negative.
    """
    return None if text is None else _number(text.strip().removesuffix("/s"), "iops", 0.0, 1e12)


def read_weight(text: str | None) -> float | None:
    """Return a share of transfers relative to others, from 0.01 to 1000; None of None.

    Raises:
        UserError: the text is no such number.
    """
    return None if text is None else _number(text, "weight", 0.01, 1_000.0)


def _number(text: str, name: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise UserError(f"{name} = {text!r} must be a number from {least:g} to {most:g}")
    return value


def read_media(text: str | None) -> str | None:
    """Return where blocks stay; empty for memory and disk; None of None.

    Raises:
        UserError: the text names neither.
    """
    if text not in (None, "memory", "disk", "both"):
        raise UserError(
            f"there is no medium {text!r}",
            hint=did_you_mean(text, ("memory", "disk", "both")) or "Use memory, disk or both.",
        )
    return "" if text == "both" else text


def read_model(text: str | None) -> str | None:
    """Return the name of a model; empty for ``all``; None of None.

    Raises:
        UserError: the text is no name.
    """
    if text == ALL_MODELS:
        return ""
    if text is not None and not re.fullmatch(limits.NAME_PATTERN, text):
        raise UserError(f"{text[:40]!r} is no name of a model", hint="View tierkv.models has them.")
    return text


def _version(text: str) -> str:
    if not re.fullmatch(limits.NAME_PATTERN, text):
        raise ValueError("must be 1 to 128 letters, digits and _ . : - /, such as r2")
    return text


OPTIONS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "tenants": ("tenants", _tenants),
    "cache": ("cache", Flag().from_text),
    "kv_codec": ("kv_codec", str),
    "blend": ("blend", Flag().from_text),
    "recompute_ratio": ("recompute_ratio", _ratio),
    "selector": ("selector", str),
    "gradual": ("gradual", Flag().from_text),
    "capacity": ("capacity_bytes", read_size),
    "disk_capacity": ("disk_capacity_bytes", read_size),
    "read_bandwidth": ("read_bytes_per_s", read_bandwidth),
    "write_bandwidth": ("write_bytes_per_s", read_bandwidth),
    "iops": ("requests_per_s", read_iops),
    "weight": ("weight", read_weight),
    "media": ("media", read_media),
    "model": ("model", read_model),
    "ttl": ("ttl_s", read_duration),
    "on_full": ("evicts", _evicts),
    "eviction": ("eviction", read_policy),
    "version": ("version", _version),
}
"""By name in SQL: the field of a change, and how to read the text."""


def wrong_existence(command: ClusterCommand, known: Iterable[str]) -> SqlError:
    """Return the error of a statement about a namespace that exists already, or does not."""
    if command.verb == "CREATE":
        return SqlError(
            f'KV namespace "{command.name}" already exists',
            sqlstate="42710",
            hint="ALTER KV NAMESPACE changes it.",
        )
    return SqlError(
        f'KV namespace "{command.name}" does not exist',
        sqlstate="42704",
        hint=did_you_mean(command.name, known) if known else "There is no namespace yet.",
    )
