"""What is deployed: the given settings, completed with what several processes must agree on.

Pure but for the random secrets. The settings file holds only what was given and what is added
here; each role's addresses come from its own environment, which overrides the file.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from tierkv.config import LoadedConfig, changed_toml
from tierkv.kvcore.errors import ConfigError
from tierkv.parts.access import token_or_new
from tierkv.processes.worker_group import require_several
from tierkv.settings import Settings

PLACED = ("cluster.run_dir", "cluster.host", "cluster.advertise", "cluster.meta_address")
"""Settings that each target gives to each process."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One cluster to be deployed.

    Attributes:
        settings: the completed settings.
        toml: the settings file of all processes, with secrets.
        counts: number of nodes by role.
        image: container image of all roles.
        version: of TierKV.
        made: secrets that were made up here, by setting, for people.
    """

    settings: Settings
    toml: str
    counts: Mapping[str, int]
    image: str
    version: str
    made: tuple[str, ...]


def plan_deployment(
    loaded: LoadedConfig,
    *,
    counts: Mapping[str, int],
    image: str = "",
    is_open: bool,
) -> Deployment:
    """Complete the settings.

    Args:
        loaded: the settings given by file, environment and flags.
        counts: number of nodes of ``meta``, ``compute`` and ``front``.
        image: container image; empty: ``tierkv:VERSION``.
        is_open: the front's ports are reached from outside its machine, so clients need passwords.

    Raises:
        ConfigError: the settings can't work for several processes.
    """
    settings, release = loaded.settings, version("tierkv")
    _check(settings, counts)
    more: dict[str, Any] = {}
    if not settings.cluster.token_file and not settings.cluster.token:
        more["cluster.token"] = token_or_new(settings.cluster)
    if not settings.cluster.secret and "://" not in settings.meta.database:
        more["cluster.secret"] = secrets.token_hex(16)
    if is_open and not settings.front.postgres and not settings.front.users:
        more["front.users"] = {"tierkv": secrets.token_urlsafe(18)}
    if is_open and not settings.front.api_keys:
        more["front.api_keys"] = {"sk-" + secrets.token_urlsafe(24): "default"}
    return Deployment(
        settings,
        changed_toml(loaded, more, leave_out=PLACED),
        counts,
        image or f"tierkv:{release}",
        release,
        tuple(more),
    )


def _check(settings: Settings, counts: Mapping[str, int]) -> None:
    require_several(settings.meta, counts["meta"])
    if counts["front"] > 1 and not settings.front.postgres:
        raise ConfigError(
            "several fronts share tables only in PostgreSQL",
            hint="Give front.postgres, or --front 1.",
        )
    if settings.compute.more_models:
        raise ConfigError(
            "a deployment has one model",
            hint="Deploy the nodes of another model as a second release, with the same "
            "cluster.meta_address.",
        )


def quoted(text: object) -> str:
    """Write a value so that YAML reads it as the same text, number or truth value."""
    return json.dumps(text)
