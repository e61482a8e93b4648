"""``tierkv up``: a whole cluster on one machine, as supervised child processes.

The command picks ports, starts all processes in parallel (tierkv/processes/start_order.py), prints
addresses and next commands, and stops all processes on Ctrl-C. With several dmp nodes each node
acts as a host of its own, so L3 is real.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import typer

from tierkv.config import LoadedConfig, dump_toml
from tierkv.kvcore.errors import ConfigError
from tierkv.kvwire.credentials import shown
from tierkv.parts.access import cluster_access, token_or_new
from tierkv.parts.served_models import (
    model_folder,
    model_name,
    split_by_model,
    with_default_model,
)
from tierkv.processes.cluster_files import (
    CONFIG_FILE,
    CURE,
    STATE_FILE,
    keep_passwords,
    keep_token,
    kept_text,
    orphans_text,
    require_memory,
)
from tierkv.processes.own_process import keep_files_private
from tierkv.processes.supervisor import START_S, STOP_S, ChildSpec, Supervisor, exit_text
from tierkv.processes.worker_group import require_shareable
from tierkv.settings import ComputeSettings, Settings
from tierkv.storage.modelfiles.model_folder import read_model_config

SCRAM: Final = "SCRAM-SHA-256$"
"""Prefix of a SCRAM verifier, whose password is unknown here."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Number of nodes of each role in ``tierkv up``."""

    dmp: int = 1
    compute: int = 1
    prefill: int = 0
    decode: int = 0

    @property
    def hosts(self) -> int:
        """Hosts simulated by this machine: one per dmp node."""
        return max(1, self.dmp)


_ANSWERING: Final = ("compute", "prefill")
"""Beginnings of the names of nodes that take AI calls."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One child process: role, name, and differences from the cluster's settings."""

    role: str
    node_id: str
    overrides: tuple[str, ...] = ()


def plan_nodes(
    shape: ClusterShape, hostname: str, models: Sequence[ComputeSettings]
) -> list[NodePlan]:
    """List the dmp and compute children in start order; hosts are assigned in turn."""
    names = [hostname if shape.hosts == 1 else f"{hostname}-{i}" for i in range(shape.hosts)]
    plans = [NodePlan("dmp", f"dmp-{i}", (f"cluster.host={names[i]}",)) for i in range(shape.dmp)]
    hosts = cycle(names)
    for role, count in (
        ("prefill", shape.prefill),
        ("decode", shape.decode),
        ("compute", shape.compute),
    ):
        # Each model has ``count`` nodes; a single model needs no override.
        for i, model in enumerate(model for model in models for _ in range(count)):
            overrides = (f"cluster.host={next(hosts)}", *_model_overrides(model, models))
            plans.append(NodePlan(role, f"{role}-{i}", overrides))
    return plans


def _model_overrides(model: ComputeSettings, models: Sequence[ComputeSettings]) -> tuple[str, ...]:
    if len(models) == 1:
        return ()
    return (f"compute.model={model.model}", f"compute.model_name={model_name(model)}")


async def run_cluster(loaded: LoadedConfig, shape: ClusterShape) -> int:
    """Run a cluster until SIGINT or SIGTERM; return the exit status."""
    models = split_by_model(loaded.settings.compute)
    settings = with_default_model(loaded).settings
    if shape.compute or shape.prefill or shape.decode:
        for each in models:
            read_model_config(model_folder(each))  # Fail before anything is started.
    for name, port in (("pg", settings.front.pg_port), ("http", settings.front.http_port)):
        _require_free(settings.front.bind, port, flag=f"--{name}-port")
    if settings.front.postgres:
        from tierkv.dbfront.postgres.install import install  # only with PostgreSQL behind
        from tierkv.dbfront.postgres.wire.login import parse_dsn

        parse_dsn(settings.front.postgres)
        await install(settings.front.postgres)  # The front would do so, after all other processes.
    run_dir = settings.cluster.run_dir.expanduser()
    keep_files_private()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(on_restart=_tell_restart)
    with ExitStack() as stack:
        stack.enter_context(_own(run_dir))
        settings = _complete(settings, run_dir)
        require_shareable(settings.front)
        require_memory(settings, shape.dmp)
        hostname = settings.cluster.host or socket.gethostname()
        plans = plan_nodes(shape, hostname, models)
        starting = asyncio.create_task(_start_all(supervisor, settings, plans, run_dir))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                _write_state(run_dir, settings, starting.result(), shape)
                _tell_ready(settings, starting.result(), run_dir)
            await stopping
        finally:
            starting.cancel()
            stopping.cancel()
            typer.echo("stopping ...", err=True)
            await supervisor.stop()
            (run_dir / STATE_FILE).unlink(missing_ok=True)
            typer.echo(kept_text(settings), err=True)
    return 0


def _complete(settings: Settings, run_dir: Path) -> Settings:
    """Fill in required settings not chosen by the user: token, meta port, files."""
    port = settings.meta.port or _free_port(settings.meta.bind)
    meta = settings.meta.model_copy(
        update={"port": port, "database": settings.meta.database or str(run_dir / "meta.sqlite")}
    )
    cluster = settings.cluster.model_copy(
        update={
            "token": token_or_new(settings.cluster),
            "meta_address": f"{settings.meta.bind}:{port}",
            "run_dir": run_dir,
        }
    )
    database = settings.front.database or str(run_dir / "tables.duckdb")
    statistics = settings.front.stats_path or str(run_dir / "statistics.sqlite")
    front = settings.front.model_copy(update={"database": database, "stats_path": statistics})
    return settings.model_copy(update={"cluster": cluster, "meta": meta, "front": front})


async def _start_all(
    supervisor: Supervisor, settings: Settings, plans: Sequence[NodePlan], run_dir: Path
) -> dict[str, dict[str, Any]]:
    config = run_dir / CONFIG_FILE
    config.touch(mode=0o600)
    config.write_text(dump_toml(settings))
    keep_token(run_dir, shown(cluster_access(settings.cluster).token))
    ready: dict[str, dict[str, Any]] = {}
    plans = [NodePlan("meta", "meta"), *plans, NodePlan("front", "front")]
    computing = sum(plan.role not in ("meta", "dmp", "front") for plan in plans)
    waits = (
        "--set",
        f"cluster.start_wait_s={START_S}",
        "--set",
        f"cluster.start_nodes={computing}",
    )

    async def start(plan: NodePlan) -> None:
        typer.echo(f"starting {plan.node_id} ...", err=True)
        spec = ChildSpec(
            plan.node_id,
            _argv(plan, config),
            run_dir / "logs" / f"{plan.node_id}.log",
            stop_timeout_s=STOP_S + (settings.front.drain_s if plan.role == "front" else 0.0),
            first=waits,
        )
        ready[plan.node_id] = await supervisor.start(spec, timeout_s=START_S)

    await asyncio.gather(*(start(plan) for plan in plans))
    return ready


def _argv(plan: NodePlan, config: Path) -> tuple[str, ...]:
    argv = [sys.executable, "-m", "tierkv", "serve", plan.role, "--node-id", plan.node_id]
    argv += ["--config", str(config), "--supervised"]
    for override in plan.overrides:
        argv += ["--set", override]
    return tuple(argv)


@contextmanager
def _own(run_dir: Path) -> Iterator[None]:
    """Lock the run directory, so two clusters never share a directory."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = (run_dir / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"cluster.run_dir {run_dir} can't be used: {error.strerror}",
            hint="Give a folder that this account may write to: --set cluster.run_dir=FOLDER.",
        ) from None
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"a cluster already runs from {run_dir}",
                hint="See `tierkv status`, or start another with --set cluster.run_dir=FOLDER.",
            ) from None
        yield


def _require_free(host: str, port: int, *, flag: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} can't be used: {error.strerror}", hint=f"Choose another {flag}."
            ) from None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _write_state(
    run_dir: Path, settings: Settings, ready: dict[str, dict[str, Any]], shape: ClusterShape
) -> None:
    """Write the addresses for ``tierkv status``."""
    state = {"pid": os.getpid(), "meta": settings.cluster.meta_address, "nodes": ready}
    (run_dir / STATE_FILE).write_text(json.dumps(state, indent=2))


def _tell_restart(name: str, code: int, delay_s: float, by_memory: bool) -> None:
    why = exit_text(code, by_memory=by_memory)
    typer.secho(f"{name} ended {why}; starting it again in {delay_s:.1f} s", err=True)


def dialable(address: str) -> tuple[str, str]:
    """Split ``host:port`` into an address for local clients: loopback for a wildcard host."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(host, host), port


def sql_login(settings: Settings) -> tuple[str, str, str]:
    """Return user, database and password; the password is empty if not needed or unknown."""
    front = settings.front
    if not front.postgres:
        user, password = next(iter(front.users.items()), ("tierkv", ""))
        return user, "main", "" if password.startswith(SCRAM) else password
    from psycopg.conninfo import conninfo_to_dict  # only with a PostgreSQL server behind

    given = conninfo_to_dict(front.postgres)
    user = str(given.get("user") or "postgres")
    return user, str(given.get("dbname") or user), str(given.get("password") or "")


def sql_words(
    user: str, database: str, address: tuple[str, str], passwords: Path | None
) -> tuple[str, str]:
    """Return a URL for drivers and a psql command, quoted for pasting with any names."""
    host, port = address
    argv = ["psql", "-h", host.strip("[]"), "-p", port, "-U", user, database]
    url = f"postgresql://{quote(user, safe='')}@{host}:{port}/{quote(database, safe='')}"
    if passwords is None:
        return url, shlex.join(argv)
    before = f"PGPASSFILE={shlex.quote(str(passwords))} "
    return f"{url}?passfile={quote(str(passwords), safe='/')}", before + shlex.join(argv)


def _tell_no_model(run_dir: Path) -> None:
    """Say how a cluster without compute nodes gets one; AI calls fail until then."""
    add = f"tierkv serve compute --config {shlex.quote(str(run_dir / CONFIG_FILE))}"
    typer.echo("\nNo node answers AI calls yet. Add one, in another terminal:")
    typer.echo(f"  {add}")
    typer.echo("or let a running vLLM answer:")
    typer.echo(f"  {add} --engine vllm --url http://HOST:PORT")


def _tell_ready(settings: Settings, ready: dict[str, dict[str, Any]], run_dir: Path) -> None:
    front = ready["front"]
    pg_host, pg_port = dialable(front["pg"])
    http_host, http_port = dialable(front["http"])
    user, database, password = sql_login(settings)
    file = keep_passwords(run_dir, {user: password}) if password else None
    url, psql = sql_words(user, database, (pg_host, pg_port), file)
    workers = settings.front.workers
    shared = f", {workers} of the front" if workers > 1 else ""
    count = len(ready) + (workers if workers > 1 else 0)  # And the process that starts them.
    typer.echo(f"\nTierKV is up: {count} processes{shared}, logs in {run_dir / 'logs'}")
    typer.echo(f"  SQL   {url}")
    typer.echo(f"  REST  http://{http_host}:{http_port}/v1")
    if len(models := [model_name(each) for each in split_by_model(settings.compute)]) > 1:
        default = settings.front.default_model
        told = (f"{name} (default)" if name == default else name for name in models)
        typer.echo(f"  Models  {', '.join(told)}")
    if any(name.startswith(_ANSWERING) for name in ready):
        statement = "SELECT ai_generate('Jonas Ortiz bought a blender. What did he buy?')"
        typer.echo(f'\nNow type, in another terminal:\n  {psql} -c "{statement}"')
    else:
        _tell_no_model(run_dir)
    typer.echo("Ctrl-C stops everything.")
    if orphans := orphans_text(settings):
        typer.echo(f"\nLeft in memory: {orphans}; `{CURE}` frees it.")
    sys.stdout.flush()
