"""Conversion of command line options to settings of the roles: nodes, engines, models.

Called by tierkv/cli.py. Contradictory options are refused here, before anything is loaded.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import typer


class Role(StrEnum):
    """A role that ``tierkv serve`` can start."""

    FRONT = "front"
    META = "meta"
    DMP = "dmp"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPUTE = "compute"


class AnsweringEngine(StrEnum):
    """A foreign engine behind a compute node."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"


def model_flags(models: list[str] | None) -> dict[str, Any]:
    """Convert --model, given any number of times, to settings."""
    if not models:
        return {}
    return {"compute__model": models[0], "compute__more_models": models[1:]}


def role_flags(
    role: Role, port: int | None, capacity: str | None, postgres: str | None
) -> dict[str, Any]:
    """Convert --port, --capacity and --postgres to settings of the role's section."""
    if postgres is not None and role is not Role.FRONT:
        raise typer.BadParameter("--postgres is for fronts")
    if capacity is not None and role is not Role.DMP:
        raise typer.BadParameter("--capacity is for dmp nodes")
    if port is not None and role is Role.FRONT:
        raise typer.BadParameter("a front has two ports: --set front.pg_port, front.http_port")
    section = role.value if role in (Role.META, Role.DMP) else "compute"
    flags = {"dmp__capacity": capacity, "front__postgres": postgres}
    return flags | ({f"{section}__port": port} if port is not None else {})


def engine_flags(
    role: Role, engine: AnsweringEngine | None, url: str | None, key: Path | None, model: str | None
) -> dict[str, Any]:
    """Convert --engine and its options to settings; with --engine, --model is the engine's."""
    if (engine or model) and role not in (Role.COMPUTE, Role.PREFILL, Role.DECODE):
        raise typer.BadParameter("--engine and --model are for compute, prefill and decode nodes")
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
