"""The actor that runs the process of one role on a machine of Ray, and starts it again.

Created by on_ray/controller.py. The actor only watches: the role is a process of its own
(``tierkv serve``), as under ``tierkv up``, and ends with the actor.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from tierkv.config import dump_toml
from tierkv.dbfront.http.config import is_loopback
from tierkv.kvcore.errors import TierKVError
from tierkv.processes.own_process import keep_files_private
from tierkv.processes.supervisor import START_S, STOP_S, ChildSpec, Supervisor
from tierkv.settings import Settings

ZONE_LABEL: Final = "ray.io/availability-zone"
"""Label of a Ray node that Ray's autoscalers set; becomes ``cluster.zone``."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """What an actor says of its process.

    Attributes:
        state: ``idle`` before ``run``, then ``starting``, ``running``, or ``failed``.
        ray_node: Ray's name of the machine.
        pid: the actor's process: differs after Ray has moved or restarted the actor.
        meta: the addresses of meta servers that the process was told.
        restarts: how often the process ended and was started again.
        ready: the process's own words: its addresses.
        trouble: why it does not run.
    """

    state: str
    ray_node: str
    pid: int
    meta: str = ""
    restarts: int = 0
    ready: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""


class RoleActor:
    """Runs one role; all methods are asynchronous, as Ray wants it."""

    def __init__(self, name: str, role: str, settings: Settings) -> None:
        """Prepare; nothing runs before ``run``.

        Args:
            name: name of the node.
            role: as in ``tierkv serve``.
            settings: settings of the cluster, complete but for the meta servers' addresses.
        """
        self._name, self._role = name, role
        self._address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._ray_node: str = ray.get_runtime_context().get_node_id()
        self._zone = str(ray.get_runtime_context().get_node_labels().get(ZONE_LABEL, ""))
        self._settings = settings
        self._supervisor = Supervisor()
        self._meta = ""
        self._task: asyncio.Task[dict[str, Any]] | None = None

    async def look(self) -> RoleState:
        """Return what the process does."""
        child = self._supervisor.children.get(self._name)
        state = RoleState("idle", self._ray_node, os.getpid(), self._meta)
        if self._task is None:
            return state
        restarts = 0 if child is None else child.restarts
        ready = {} if child is None else child.ready
        trouble = ""
        if self._task.done() and not self._task.cancelled() and self._task.exception() is not None:
            error = self._task.exception()
            trouble = error.message if isinstance(error, TierKVError) else repr(error)
        running = self._task.done() and child is not None and child.is_ready.is_set()
        what = "failed" if trouble else "running" if running else "starting"
        return RoleState(
            what, self._ray_node, os.getpid(), self._meta, restarts, dict(ready), trouble
        )

    async def run(self, meta: str) -> None:
        """Start the process, or restart it with another list of meta servers.

        Args:
            meta: as ``cluster.meta_address``.
        """
        await self.stop()
        self._meta = meta
        self._supervisor = Supervisor()
        self._task = asyncio.create_task(self._start(meta))

    async def stop(self) -> None:
        """End the process and wait for it; a front drains."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._supervisor.stop()

    async def _start(self, meta: str) -> dict[str, Any]:
        keep_files_private()
        settings = self._placed(meta)
        folder = settings.cluster.run_dir
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        config = folder / f"{self._name}.toml"
        config.touch(mode=0o600)
        config.write_text(dump_toml(settings))
        argv = [sys.executable, "-m", "tierkv", "serve", self._role, "--node-id", self._name]
        spec = ChildSpec(
            self._name,
            (*argv, "--config", str(config), "--supervised"),
            folder / "logs" / f"{self._name}.log",
            stop_timeout_s=STOP_S + (settings.front.drain_s if self._role == "front" else 0.0),
        )
        return await self._supervisor.start(spec, timeout_s=START_S)

    def _placed(self, meta: str) -> Settings:
        """Return the settings of this process: its machine, its files, the meta servers."""
        given, here = self._settings, self._address
        folder = given.cluster.run_dir.expanduser()
        cluster = {
            "meta_address": meta, "host": given.cluster.host or f"ray-{here}",
            "zone": given.cluster.zone or self._zone, "advertise": here, "run_dir": folder,
        }  # fmt: skip
        front: dict[str, Any] = {}
        if self._role == "front":
            front = {
                "bind": front_bind(given, here),
                "database": given.front.database or str(folder / f"{self._name}.duckdb"),
                "stats_path": given.front.stats_path or str(folder / f"{self._name}.sqlite"),
            }
        updates = {"cluster": cluster, "front": front}
        updates |= {section: {"bind": here} for section in ("meta", "dmp", "compute")}
        sections = {
            section: getattr(given, section).model_copy(update=changed)
            for section, changed in updates.items()
        }
        return given.model_copy(update=sections)


def front_bind(settings: Settings, address: str) -> str:
    """Return the address a front listens on: loopback, unless clients must log in."""
    front = settings.front
    guarded = bool(front.users or front.postgres) and bool(front.api_keys)
    return address if guarded or is_loopback(address) else "127.0.0.1"
