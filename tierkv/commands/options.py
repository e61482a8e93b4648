"""Options that several verbs of the command line share, and their conversion to settings.

Called by tierkv/cli.py. Contradictory options are refused here, before anything is loaded. This
module starts nothing and imports none of the rooms.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.config import LoadedConfig, load_config

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file; default: $TIERKV_CONFIG, else ./tierkv.toml."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any setting, such as dmp.capacity=4GiB."),
]
PostgresOption = Annotated[
    str | None,
    typer.Option(
        "--postgres", metavar="DSN", help="PostgreSQL server that runs the SQL instead of DuckDB."
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model folder (Hugging Face layout, safetensors).")
]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="Model folder; may be repeated. Calls that name no model use the first."
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes of the front, on the same ports.")
]


class Switch(StrEnum):
    """Value of a yes/no setting of a namespace."""

    ON = "on"
    OFF = "off"


class OnFull(StrEnum):
    """What a namespace does with new KV once its capacity is used."""

    EVICT = "evict"
    REFUSE = "refuse"


CapacityOption = Annotated[
    str | None,
    typer.Option(help="Most memory of the pool for its KV, such as 4GiB; 0: no limit."),
]
TtlOption = Annotated[
    str | None,
    typer.Option(help="Remove KV that nobody used for so long, such as 12h; 0: never."),
]
OnFullOption = Annotated[
    OnFull | None,
    typer.Option(help="With the capacity used: evict own KV, or refuse to store more."),
]
SelectorOption = Annotated[
    str | None,
    typer.Option(help="How tokens to recompute are chosen: hkvd, query or boundary."),
]
CodecOption = Annotated[
    str | None,
    typer.Option(help="Encoding of KV below L1: none, fp8, int8 ...; default: each node's."),
]
GradualOption = Annotated[
    Switch | None,
    typer.Option(help="With hkvd: recompute more in early layers, fewer in late ones."),
]
EvictionOption = Annotated[
    str | None,
    typer.Option(help="Which own KV goes first: lru, lfu, arc ...; node: each node's policy."),
]
VersionOption = Annotated[
    str | None,
    typer.Option(help="Name a new version, such as r2: KV of the old one is never used again."),
]
DiskCapacityOption = Annotated[
    str | None,
    typer.Option(help="Most KV on the disks of all pool nodes, such as 40GiB; 0: no limit."),
]
ReadBandwidthOption = Annotated[
    str | None,
    typer.Option(help="Most bytes read from all pool nodes, such as 200MB/s; 0: no limit."),
]
WriteBandwidthOption = Annotated[
    str | None,
    typer.Option(help="Most bytes written to all pool nodes, such as 100MB/s; 0: no limit."),
]
IopsOption = Annotated[
    str | None,
    typer.Option(help="Most requests per second that move bytes, such as 5000; 0: no limit."),
]
WeightOption = Annotated[
    str | None,
    typer.Option(help="Share of a busy pool node's transfers relative to others, such as 4."),
]
RecomputeRatioOption = Annotated[
    float | None,
    typer.Option(
        help="Least share of reused document tokens that is recomputed, in (0, 1]; 1 is exact."
    ),
]
MediaOption = Annotated[
    str | None,
    typer.Option(help="Where KV stays: memory, disk or both."),
]
OnlyModelOption = Annotated[
    str | None,
    typer.Option(help="The only model that the namespace applies to; all: every model."),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="HOST:PORT of a running Ray; auto: this machine's."
    ),
]
AddressOption = Annotated[
    str, typer.Argument(help="HOST:PORT of one or more pool nodes, separated by commas.")
]


class Role(StrEnum):
    """A role that ``tierkv serve`` can start."""

    FRONT = "front"
    META = "meta"
    DMP = "dmp"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPUTE = "compute"


class DeployTarget(StrEnum):
    """What runs the processes of a deployment."""

    HELM = "helm"
    COMPOSE = "compose"
    SYSTEMD = "systemd"


class AnsweringEngine(StrEnum):
    """A foreign engine behind a compute node."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"


def load(config: Path | None, pairs: list[str] | None, **flags: Any) -> LoadedConfig:
    """Load the configuration; ``flags`` are ``section__key`` values, None if not given."""
    given: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set expects KEY=VALUE, got {pair!r}")
        given[key] = value
    given |= {key.replace("__", ".", 1): value for key, value in flags.items() if value is not None}
    return load_config(config, flags=given)


def is_on(switch: Switch | None) -> bool | None:
    """Return the switch as a truth value; None if not given."""
    return None if switch is None else switch is Switch.ON


def model_flags(models: list[str] | None) -> dict[str, Any]:
    """Convert --model, given any number of times, to settings."""
    if not models:
        return {}
    return {"compute__model": models[0], "compute__more_models": models[1:]}


def role_flags(
    role: Role,
    port: int | None,
    capacity: str | None,
    postgres: str | None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Convert --port, --capacity, --postgres and --workers to settings of the role's section."""
    if postgres is not None and role is not Role.FRONT:
        raise typer.BadParameter("--postgres applies only to fronts")
    if workers is not None and role is not Role.FRONT:
        raise typer.BadParameter("--workers applies only to fronts")
    if capacity is not None and role is not Role.DMP:
        raise typer.BadParameter("--capacity applies only to dmp nodes")
    if port is not None and role is Role.FRONT:
        raise typer.BadParameter(
            "a front has two ports: use --set front.pg_port=PORT and --set front.http_port=PORT"
        )
    section = role.value if role in (Role.META, Role.DMP) else "compute"
    flags: dict[str, Any] = {"dmp__capacity": capacity}
    flags |= {"front__postgres": postgres, "front__workers": workers}
    return flags | ({f"{section}__port": port} if port is not None else {})


def engine_flags(
    role: Role, engine: AnsweringEngine | None, url: str | None, key: Path | None, model: str | None
) -> dict[str, Any]:
    """Convert --engine and its options to settings; with --engine, --model is the engine's."""
    if (engine or model) and role not in (Role.COMPUTE, Role.PREFILL, Role.DECODE):
        raise typer.BadParameter(
            "--engine and --model apply only to compute, prefill and decode nodes"
        )
    if engine is None:
        if url is not None or key is not None:
            raise typer.BadParameter("--url and --api-key-file need --engine")
        return {"compute__model": model}
    return {
        "engine__kind": engine.value,
        "engine__url": url,
        "engine__api_key_file": None if key is None else str(key),
        "engine__model": model,
    }
