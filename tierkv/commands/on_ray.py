"""The verbs of a cluster on Ray: ``up --ray``, ``scale`` and ``down``; and its rows of ``status``.

Ray is an extra (``tierkv[ray]``); it is imported here, when one of these verbs runs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from tierkv.config import LoadedConfig
from tierkv.kvcore.errors import ConfigError, TierKVError
from tierkv.on_ray.placement import read_scale
from tierkv.processes.cluster_files import STATE_FILE
from tierkv.settings import Settings

if TYPE_CHECKING:
    from tierkv.on_ray.controller import RoleReport


def start(loaded: LoadedConfig, address: str, counts: Mapping[str, int]) -> int:
    """Start a cluster on Ray; return the exit status.

    Raises:
        TierKVError: Ray is missing, or a role does not start.
    """
    _require_ray()
    from tierkv.on_ray import driver

    return driver.up(loaded, address, {role: n for role, n in counts.items() if n})


def scale(settings: Settings, address: str | None, words: Sequence[str]) -> int:
    """Change numbers of nodes, written ROLE=NUMBER; return the exit status.

    Raises:
        TierKVError: as ``start``; or a word that is no ROLE=NUMBER.
    """
    counts = read_scale(words)
    _require_ray()
    from tierkv.on_ray import driver

    return driver.scale(settings, address or _known_address(settings), counts)


def end(settings: Settings, address: str | None) -> int:
    """End a cluster on Ray; return the exit status.

    Raises:
        TierKVError: as ``start``.
    """
    _require_ray()
    from tierkv.on_ray import driver

    return driver.down(settings, address or _known_address(settings))


def reports(address: str) -> Sequence[RoleReport]:
    """Return what Ray says of each role; empty, with a warning, if Ray or its controller is away.

    Args:
        address: of Ray, as ``up --ray`` left it in run_dir.
    """
    try:
        _require_ray()
        from tierkv.on_ray import driver

        return driver.report(address)
    except TierKVError as error:
        typer.echo(f"Ray says nothing of the nodes: {error.message}. {error.hint}", err=True)
        return ()


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed", hint="Run pip install 'tierkv[ray]'.")


def _known_address(settings: Settings) -> str:
    """Return the address that ``up --ray`` left in run_dir."""
    file = settings.cluster.run_dir.expanduser() / STATE_FILE
    state = json.loads(file.read_text()) if file.exists() else {}
    if "ray" not in state:
        raise ConfigError(
            f"no cluster on Ray was started from {file.parent}",
            hint="Give --ray ADDRESS, or start one with `tierkv up --ray ADDRESS`.",
        )
    return str(state["ray"])
