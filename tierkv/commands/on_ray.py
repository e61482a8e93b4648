"""The verbs of a cluster on Ray: ``up --ray``, ``scale`` and ``down``; and its rows of ``status``.

Ray is an extra (``tierkv[ray]``); it is imported here, when one of these verbs runs.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.commands.options import ConfigOption, RayOption, SetOption, load
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


def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="ROLE=NUMBER...", help="Such as compute=8 front=2.")
    ],
    on_ray: RayOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Change the number of nodes of a cluster on Ray.

    Ray places the new nodes, and its autoscaler adds machines for those that find no room.

    Example: tierkv scale compute=8
    """
    wanted, given = read_scale(counts), load(config, settings).settings
    _require_ray()
    from tierkv.on_ray import driver

    raise typer.Exit(driver.scale(given, on_ray or _known_address(given), wanted))


def down(on_ray: RayOption = None, config: ConfigOption = None, settings: SetOption = None) -> None:
    """End a cluster that `tierkv up --ray` started; the pool's KV stays in memory."""
    given = load(config, settings).settings
    _require_ray()
    from tierkv.on_ray import driver

    raise typer.Exit(driver.down(given, on_ray or _known_address(given)))


def reports(address: str) -> tuple[str, Sequence[RoleReport]]:
    """Return where the meta servers are now, and what Ray says of each role.

    Both are empty, with a warning, if Ray or its controller is away.

    Args:
        address: of Ray, as ``up --ray`` left it in run_dir.
    """
    try:
        _require_ray()
        from tierkv.on_ray import driver

        with redirect_stdout(sys.stderr):  # Ray may print warnings, where rows are read.
            return driver.report(address)
    except TierKVError as error:
        typer.echo(f"Ray says nothing of the nodes: {error.message}. {error.hint}", err=True)
        return "", ()


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
