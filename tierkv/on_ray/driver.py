"""``tierkv up --ray``, ``tierkv scale`` and ``tierkv down``: the commands' side of the controller.

The driver connects to an existing Ray, creates or finds the controller, and leaves the cluster
running. It keeps the cluster's addresses in run_dir, where ``tierkv status`` and other verbs find
them as after ``tierkv up``.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import ray
import typer
from ray.exceptions import RayError

from tierkv.config import LoadedConfig, dump_toml
from tierkv.kvcore.errors import ConfigError, NoNodeError
from tierkv.kvwire.credentials import shown
from tierkv.on_ray.controller import CONTROLLER, NAMESPACE, Controller, RoleReport
from tierkv.on_ray.placement import SCALABLE
from tierkv.on_ray.role_actor import front_bind
from tierkv.parts.access import cluster_access, token_or_new
from tierkv.processes.cluster_files import CONFIG_FILE, STATE_FILE, keep_token
from tierkv.processes.own_process import keep_files_private
from tierkv.processes.supervisor import START_S
from tierkv.processes.worker_group import require_several
from tierkv.settings import Settings

META_PORT: Final = 7400
"""Port of meta servers, unless ``meta.port`` says another: clients must know it beforehand."""

ANSWER_S: Final = 60.0
"""Ray may take half a minute to move the controller from a lost machine."""

CONNECT_S: Final = 5.0
LOOK_AT_S: Final = 5.0
"""For an answer to ``tierkv status``, which shows the rest without it."""

LOOK_S: Final = 0.5


def up(loaded: LoadedConfig, address: str, counts: Mapping[str, int]) -> int:
    """Start a cluster on Ray, or show the running cluster; return when the cluster answers.

    Args:
        loaded: the settings.
        address: of Ray: ``auto`` (this machine's), or HOST:PORT.
        counts: number of nodes of each role that can be scaled.

    Raises:
        ConfigError: no Ray there, or settings that can't work on several machines.
        NoNodeError: a role does not start.
    """
    keep_files_private()
    with connected(address):
        controller = _find()
        if controller is None:
            settings = _complete(loaded.settings, counts)
            actor: Any = ray.remote(Controller)
            controller = actor.options(
                name=CONTROLLER, namespace=NAMESPACE, lifetime="detached", max_restarts=-1,
                num_cpus=0,
            ).remote(settings, dict(counts))  # fmt: skip
        else:
            typer.echo("TierKV runs on this Ray already; `tierkv scale` changes it.", err=True)
        settings = _ask(controller.settings.remote())
        rows = _await_running(controller)
        meta, _ = _ask(controller.report.remote())
        _write_state(settings, address, meta, rows)
        _tell_ready(settings, rows)
    return 0


def scale(settings: Settings, address: str, counts: Mapping[str, int]) -> int:
    """Change the number of nodes, and wait until Ray has placed those that it can place."""
    with connected(address):
        controller = _required()
        _ask(controller.scale.remote(dict(counts)))
        rows = _await_running(controller, counts)
        for role in counts:
            there = [row for row in rows if row.role == role]
            running = sum(row.state == "running" for row in there)
            typer.echo(f"{role}: {running} of {len(there)} run")
        _tell_waiting(rows)
        meta, _ = _ask(controller.report.remote())
        _write_state(_ask(controller.settings.remote()), address, meta, rows)
    return 0


def down(settings: Settings, address: str) -> int:
    """End the cluster; the pool's memory stays for the next start, as after ``tierkv up``."""
    with connected(address):
        controller = _required()
        typer.echo("stopping ...", err=True)
        ray.get(controller.stop.remote(), timeout=120.0 + settings.front.drain_s)
        ray.kill(controller, no_restart=True)
    (settings.cluster.run_dir.expanduser() / STATE_FILE).unlink(missing_ok=True)
    return 0


def report(address: str) -> tuple[str, list[RoleReport]]:
    """Return the meta servers' addresses now, and a row per role of the cluster on Ray.

    Raises:
        ConfigError: no Ray answers, or TierKV does not run there.
        NoNodeError: the controller does not answer.
    """
    with connected(address):
        told: tuple[str, list[RoleReport]] = _ask(_required().report.remote(), LOOK_AT_S)
        return told


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of Ray until the block ends.

    Raises:
        ConfigError: no Ray answers.
    """
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False,
            logging_level=logging.ERROR, _node_ip_address=host or None,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"no Ray answers at {address}: {str(error).splitlines()[0]}",
            hint="Start it on each machine: `ray start --head`, then `ray start "
            "--address=HOST:6379`.",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _find() -> Any:
    """Return the controller; None if there is none."""
    try:
        return ray.get_actor(CONTROLLER, NAMESPACE)
    except ValueError:
        return None


def _required() -> Any:
    controller = _find()
    if controller is None:
        raise ConfigError(
            "TierKV does not run on this Ray", hint="Start it with `tierkv up --ray ADDRESS`."
        )
    return controller


def _ask(answer: Any, timeout_s: float = ANSWER_S) -> Any:
    try:
        return ray.get(answer, timeout=timeout_s)
    except RayError as error:
        raise NoNodeError(
            f"the cluster's controller does not answer: {type(error).__name__}",
            hint="Ray may be moving it from a lost machine; try again in a minute.",
        ) from None


def _complete(settings: Settings, counts: Mapping[str, int]) -> Settings:
    """Fill in what all machines must agree on: token, secret and the meta servers' port."""
    require_several(settings.meta, counts.get("meta", 1))
    if counts.get("front", 1) > 1 and settings.front.database and not settings.front.postgres:
        raise ConfigError(
            "several fronts can't share a DuckDB file (front.database)",
            hint="Give --postgres, or leave front.database empty: each front has its own tables.",
        )
    cluster = settings.cluster.model_copy(
        update={
            "token": token_or_new(settings.cluster),
            "secret": settings.cluster.secret or secrets.token_hex(16),
        }
    )
    meta = settings.meta.model_copy(update={"port": settings.meta.port or META_PORT})
    return settings.model_copy(update={"cluster": cluster, "meta": meta})


def _await_running(controller: Any, counts: Mapping[str, int] | None = None) -> list[RoleReport]:
    """Wait until all roles run, except those that Ray can't place; tell what starts."""
    end = time.monotonic() + START_S
    told: set[str] = set()
    while True:
        _, rows = _ask(controller.report.remote())
        for row in rows:
            if row.state == "running" and row.name not in told:
                told.add(row.name)
                typer.echo(f"{row.name} runs", err=True)
        failed = [row for row in rows if row.state == "failed"]
        if failed:
            raise NoNodeError(
                f"{failed[0].name} did not start: {failed[0].why}",
                hint="The controller tries again; `tierkv status` shows it, `tierkv down` ends it.",
            )
        numbers = {role: sum(row.role == role for row in rows) for role in SCALABLE}
        seen = all(numbers[role] == number for role, number in (counts or {}).items())
        waiting = [row for row in rows if row.state != "running"]
        hopeless = all(row.state == "pending" and _cannot(row) for row in waiting)
        if rows and seen and hopeless:
            return list(rows)
        if time.monotonic() > end:
            raise NoNodeError(
                f"{waiting[0].name} does not run: {waiting[0].why}", hint="See `tierkv status`."
            )
        time.sleep(LOOK_S)


def _cannot(row: RoleReport) -> bool:
    """Return whether only another machine lets a role start."""
    return "no machine has" in row.why or "another machine" in row.why or "every machine" in row.why


def _write_state(settings: Settings, address: str, meta: str, rows: Sequence[RoleReport]) -> None:
    """Leave the addresses for ``tierkv status`` and other verbs."""
    run_dir = settings.cluster.run_dir.expanduser()
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    cluster = settings.cluster.model_copy(update={"meta_address": meta})
    config = run_dir / CONFIG_FILE
    config.touch(mode=0o600)
    config.write_text(dump_toml(settings.model_copy(update={"cluster": cluster})))
    keep_token(run_dir, shown(cluster_access(settings.cluster).token))
    nodes = {row.name: dict(row.ready) for row in rows if row.ready}
    state = {"ray": address, "meta": meta, "nodes": nodes}
    (run_dir / STATE_FILE).write_text(json.dumps(state, indent=2))


def _tell_waiting(rows: Sequence[RoleReport]) -> None:
    for row in rows:
        if row.state != "running":
            typer.echo(f"{row.name} is {row.state}: {row.why}")


def _tell_ready(settings: Settings, rows: Sequence[RoleReport]) -> None:
    running = [row for row in rows if row.state == "running"]
    machines = len({row.ray_node for row in running})
    typer.echo(f"\nTierKV is up on Ray: {len(running)} processes on {machines} machines")
    for row in running:
        if row.role == "front":
            typer.echo(f"  {row.name}  SQL {row.ready['pg']}  REST http://{row.ready['http']}/v1")
    _tell_waiting(rows)
    addresses = {row.ready["pg"].rpartition(":")[0] for row in running if row.role == "front"}
    if front_bind(settings, "0.0.0.0") == "127.0.0.1" and "127.0.0.1" in addresses and machines > 1:
        typer.echo(
            "Fronts listen on loopback of their machine: set front.users (or --postgres) and "
            "front.api_keys to open them."
        )
    typer.echo(
        "`tierkv status` shows it, `tierkv scale compute=4` changes it, `tierkv down` ends it."
    )
