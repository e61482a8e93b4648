"""Several worker processes of one front, on the same two ports.

``tierkv serve front`` with ``front.workers`` above 1 runs a WorkerGroup in place of a front. The
group binds both ports but never listens. Each worker listens on both ports with SO_REUSEPORT, and
the kernel gives each new connection to a worker. A worker that dies is started again, while the
others go on. All workers write statistics to one file and answer each other's questions
(dbfront/siblings.py).

Each worker is a whole front, with a scheduler, limits of connections and a SQL engine. DuckDB
allows one process per database file, so workers share tables only through PostgreSQL.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import Final

import structlog

from tierkv.config import LoadedConfig, dump_toml, plain_environment
from tierkv.dbfront.accepting import bound_sockets
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.siblings import Siblings
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ConfigError
from tierkv.processes.supervisor import ChildSpec, Supervisor, exit_text
from tierkv.settings import IN_MEMORY, ClusterSettings, FrontSettings, MetaSettings, Settings

log = structlog.get_logger(__name__)

_START_S: Final = 120.0
_STOP_S: Final = 9.0
"""Longest stop of a worker; ``tierkv up`` waits 10 s for the whole group."""


def require_shareable(front: FrontSettings) -> None:
    """Refuse several workers where they can't share the tables.

    Raises:
        ConfigError: the tables are in a DuckDB file.
    """
    if front.workers > 1 and not front.postgres and front.database not in ("", IN_MEMORY):
        raise ConfigError(
            f"front.workers = {front.workers} can't share the database file {front.database}: "
            "DuckDB allows one process per file",
            hint="Keep the tables in PostgreSQL (--postgres DSN), or run one worker. Without "
            "tables, --set front.database=:memory: gives each worker a database of its own.",
        )


def require_several(meta: MetaSettings, count: int) -> None:
    """Refuse several meta servers where they can't share the namespaces.

    Raises:
        ConfigError: the namespaces are in a SQLite file.
    """
    if count > 1 and meta.database and "://" not in meta.database:
        raise ConfigError(
            "several meta servers can't share a SQLite file (meta.database)",
            hint="Give a PostgreSQL URL, or leave meta.database empty.",
        )


def group_folder(cluster: ClusterSettings, name: str) -> Path:
    """Return the private folder of a front with several workers."""
    return cluster.run_dir.expanduser() / f"{name}.workers"


def siblings(settings: Settings, name: str, worker: int) -> Siblings:
    """Return a worker's way to the other workers of the front ``name``."""
    folder = group_folder(settings.cluster, name)
    return Siblings(folder, index=worker, count=settings.front.workers)


class WorkerGroup:
    """The workers of one front, kept alive until ``stop``."""

    def __init__(self, config: LoadedConfig, name: str) -> None:
        """Check the settings; nothing is started or opened.

        Raises:
            ConfigError: workers can't share these tables.
        """
        require_shareable(config.settings.front)
        self._settings = config.settings
        self._name = name
        self._folder = group_folder(config.settings.cluster, name)
        self._supervisor = Supervisor(_tell_restart)
        self._ports: list[socket.socket] = []
        self._lock = -1

    async def start(self) -> dict[str, str]:
        """Bind the ports and start all workers.

        Returns:
            addresses: as FrontPart.open_doors.

        Raises:
            ConfigError: a port is in use, or another front has this name.
            NoNodeError: a worker did not start.
        """
        front = self._settings.front
        self._own_folder()
        pg_port = await self._hold(front.pg_port, "front.pg_port")
        http_port = await self._hold(front.http_port, "front.http_port")
        config = self._write_config(pg_port, http_port)
        starts = (self._start_worker(number, config) for number in range(front.workers))
        await asyncio.gather(*starts)
        return {
            "pg": f"{front.bind}:{pg_port}",
            "http": f"{front.bind}:{http_port}",
            "workers": str(front.workers),
        }

    async def stop(self) -> None:
        """Drain all workers at once, and free the ports."""
        await self._supervisor.stop(together=True)
        for held in self._ports:
            held.close()
        if self._lock >= 0:
            for left in self._folder.iterdir():
                left.unlink()
            os.close(self._lock)

    def _own_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self._folder, os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise ConfigError(
                f"a front named {self._name} already runs from {self._folder.parent}",
                hint="Give --node-id NAME, or --set cluster.run_dir=FOLDER.",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cluster.run_dir {self._folder.parent} can't be used: {error.strerror}",
                hint="Several workers need a folder that this account may write to: "
                "--set cluster.run_dir=FOLDER.",
            ) from None
        for left in self._folder.iterdir():  # Of a group that was killed.
            left.unlink()

    async def _hold(self, port: int, setting: str) -> int:
        """Reserve a port for the workers; return its number."""
        bind = self._settings.front.bind.strip("[]")
        try:
            # Without SO_REUSEPORT first, which would share the port with another front.
            probes = await bound_sockets(bind, port)
            port = probes[0].getsockname()[1]
            for probe in probes:
                probe.close()
            self._ports += await bound_sockets(bind, port, reuse_port=True)
        except OSError as error:
            raise ConfigError(
                f"{setting}: {bind}:{port} can't be used: {error.strerror or error}",
                hint=f"Choose another {setting}.",
            ) from None
        return port

    def _write_config(self, pg_port: int, http_port: int) -> Path:
        """Write the settings of the workers; a worker started again reads the same settings."""
        front, cluster = self._settings.front, self._settings.cluster
        statistics = front.stats_path or str(self._folder / "statistics.sqlite")
        now_s = SystemClock().wall()
        # One process creates or repairs the file before several open it.
        StatisticStore(str(Path(statistics).expanduser()), now_s=now_s).close(now_s)
        changed = {"pg_port": pg_port, "http_port": http_port, "stats_path": statistics}
        settings = self._settings.model_copy(
            update={
                "front": front.model_copy(update=changed),
                "cluster": cluster.model_copy(update={"start_wait_s": 0.0, "start_nodes": 0}),
            }
        )
        path = self._folder / "front.toml"
        path.touch(mode=0o600)
        path.write_text(dump_toml(settings))
        return path

    async def _start_worker(self, number: int, config: Path) -> None:
        cluster = self._settings.cluster
        argv = [sys.executable, "-m", "tierkv", "serve", "front", "--config", str(config)]
        argv += ["--node-id", self._name, "--worker", str(number), "--supervised"]
        waits = ["--set", f"cluster.start_wait_s={cluster.start_wait_s}"]
        waits += ["--set", f"cluster.start_nodes={cluster.start_nodes}"]
        spec = ChildSpec(
            f"{self._name}.{number}",
            tuple(argv),
            log_path=None,
            stop_timeout_s=_STOP_S + self._settings.front.drain_s,
            first=tuple(waits),
            environment=plain_environment(),
        )
        await self._supervisor.start(spec, timeout_s=_START_S + cluster.start_wait_s)


def _tell_restart(name: str, code: int, delay_s: float, by_memory: bool) -> None:
    why = exit_text(code, by_memory=by_memory)
    log.warning(f"{name} ended {why}; starting it again in {delay_s:.1f} s")
