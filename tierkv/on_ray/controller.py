"""The actor that keeps a cluster on Ray as it should be: creates, restarts and removes role actors.

Created by on_ray/driver.py, one per cluster, detached: the actor outlives its command, and Ray
moves the actor when a machine is lost. It keeps nothing that it can't find again: the settings are
its arguments, the actors have names, and the numbers of nodes are in Ray's key-value store.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tierkv.on_ray.placement import Machine, RolePlan, plan_roles
from tierkv.on_ray.role_actor import RoleActor, RoleState
from tierkv.settings import Settings

log = logging.getLogger("tierkv.ray")

NAMESPACE: Final = "tierkv"
"""Ray's namespace of the actors: one cluster of TierKV on a cluster of Ray."""

CONTROLLER: Final = "controller"
_COUNTS: Final = b"counts"
_STORE: Final = b"tierkv"
LOOK_S: Final = 1.0
RETRY_S: Final = 10.0
"""Time between two starts of a role that does not start."""

ANSWER_S: Final = 5.0
"""An actor without an answer after this time counts as not placed yet."""


@dataclass(frozen=True, slots=True)
class RoleReport:
    """A row of ``tierkv status``: a role, as reported by Ray and the role's actor.

    Attributes:
        name: name of the node.
        role: its role.
        ray_node: Ray's name of its machine; empty while it has none.
        state: ``pending``, or as RoleState.
        restarts: of the process, and of the actor.
        why: why it does not run; empty if it does.
        ready: its addresses.
    """

    name: str
    role: str
    ray_node: str
    state: str
    restarts: int
    why: str
    ready: Mapping[str, Any]


@dataclass(slots=True)
class Kept:
    """An actor of this controller.

    Attributes:
        handle: Ray's handle.
        plan: what it was created for.
        looked: what it said last; None before its first answer, and while it does not answer.
        moves: how often Ray has started it again.
        told_s: when it was told to run.
    """

    handle: Any
    plan: RolePlan
    looked: RoleState | None = None
    moves: int = 0
    told_s: float = 0.0


class Controller:
    """Compares what should be with what is, once a second."""

    def __init__(self, settings: Settings, counts: dict[str, int]) -> None:
        """Take over the actors of an earlier life, if there are any.

        Args:
            settings: settings of the cluster; ``meta.port`` is fixed.
            counts: number of nodes of each role, for the first life.
        """
        self._settings = settings
        self._kept: dict[str, Kept] = {}
        self._plans: list[RolePlan] = []
        self._meta = ""
        self._stopping = False
        self._earlier = _existing()
        self._counts = _kept_counts() or dict(counts)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="look")

    async def _run(self) -> None:
        """Look and act until stopped."""
        await self._take_over(self._earlier)
        while not self._stopping:
            try:
                await self._look()
            except Exception:  # The controller must outlive any fault of one look.
                log.exception("could not look at the cluster")
            await asyncio.sleep(LOOK_S)

    async def settings(self) -> Settings:
        """Return the settings of the cluster, with its secrets."""
        return self._settings

    async def scale(self, counts: dict[str, int]) -> dict[str, int]:
        """Change the number of nodes of some roles; return all numbers."""
        self._counts |= counts
        _keep_counts(self._counts)
        return dict(self._counts)

    async def report(self) -> tuple[str, list[RoleReport]]:
        """Return the meta servers' addresses, and a row per role that is or should be."""
        return self._meta, [self._row(plan) for plan in self._plans]

    async def stop(self) -> None:
        """End all roles, fronts first, and their actors."""
        self._stopping = True
        await asyncio.wait([self._task])
        _keep_counts({})
        for role in reversed(("meta", "dmp", "prefill", "decode", "compute", "front")):
            names = [name for name, kept in self._kept.items() if kept.plan.role == role]
            await asyncio.gather(*(self._remove(name) for name in names))

    # -- one look

    async def _look(self) -> None:
        machines = _machines()
        pinned = {name: kept.plan.ray_id for name, kept in self._kept.items()}
        needs = compute_needs(self._settings)
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        self._plans = plan_roles(self._counts, machines, pinned, needs, free)
        live = {machine.ray_id: machine for machine in machines}
        wanted = {plan.name: plan for plan in self._plans}
        for name, kept in list(self._kept.items()):
            plan = wanted.get(name)
            if plan is None or plan.ray_id != kept.plan.ray_id:
                await self._remove(name)
        for plan in self._plans:
            if plan.name not in self._kept and (plan.ray_id or plan.needs):
                self._create(plan, live.get(plan.ray_id))
        await asyncio.gather(*map(self._ask, self._kept.values()))
        await self._start_idle(live)

    def _create(self, plan: RolePlan, machine: Machine | None) -> None:
        needs = dict(plan.needs or {})
        where = NodeAffinitySchedulingStrategy(machine.ray_id, soft=False) if machine else "SPREAD"
        handle = _ROLE.options(
            name=plan.name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=needs.pop("CPU", 0.0),
            num_gpus=needs.pop("GPU", 0.0),
            scheduling_strategy=where,
        ).remote(plan.name, plan.role, self._settings)
        self._kept[plan.name] = Kept(handle, plan)

    async def _take_over(self, names: set[str]) -> None:
        """Find the actors of this controller's earlier life, each where it is."""
        for name in names:
            with suppress(ValueError):
                plan = RolePlan(name, name.split("-")[0])
                self._kept[name] = Kept(ray.get_actor(name, NAMESPACE), plan)
        await asyncio.gather(*map(self._ask, self._kept.values()))
        for kept in self._kept.values():
            if kept.looked is not None and kept.plan.role not in _MOVING:
                kept.plan = replace(kept.plan, ray_id=kept.looked.ray_node)

    async def _ask(self, kept: Kept) -> None:
        before = kept.looked
        try:
            async with asyncio.timeout(ANSWER_S):
                kept.looked = await kept.handle.look.remote()
        except (TimeoutError, RayError):
            kept.looked = None
            return
        if before is not None and kept.looked is not None and before.pid != kept.looked.pid:
            kept.moves += 1

    async def _start_idle(self, live: Mapping[str, Machine]) -> None:
        """Start what is idle, and restart one role at a time that has an old list of meta servers.

        A role is told all meta servers, so the first roles wait until each meta server has an
        actor.
        """
        metas = [plan for plan in self._plans if plan.role == "meta"]
        if any(plan.trouble for plan in metas) and not self._meta:
            return
        port = self._settings.meta.port
        placed = (live.get(plan.ray_id) for plan in metas)
        addresses = [f"{machine.address}:{port}" for machine in placed if machine is not None]
        self._meta = ",".join(addresses) or self._meta
        now, known = asyncio.get_running_loop().time(), list(self._kept.values())
        for kept in known:
            state = kept.looked.state if kept.looked is not None else ""
            if state == "idle" or (state == "failed" and now - kept.told_s > RETRY_S):
                await self._tell(kept)
        # One after the other: a role that can't be placed, or can't start, holds up no other.
        if not any(kept.looked is not None and kept.looked.state == "starting" for kept in known):
            outdated = (kept for kept in known if self._is_outdated(kept))
            for kept in islice(outdated, 1):
                await self._tell(kept)

    def _is_outdated(self, kept: Kept) -> bool:
        """Return whether a process was told other meta servers; meta servers know no others."""
        looked = kept.looked
        return kept.plan.role != "meta" and looked is not None and looked.meta != self._meta

    async def _tell(self, kept: Kept) -> None:
        kept.told_s = asyncio.get_running_loop().time()
        with suppress(RayError):
            await kept.handle.run.remote(self._meta)

    async def _remove(self, name: str) -> None:
        kept = self._kept.pop(name)
        longest_s = 30.0 + self._settings.front.drain_s
        with suppress(TimeoutError, RayError):
            if kept.looked is not None:
                async with asyncio.timeout(longest_s):
                    await kept.handle.stop.remote()
        with suppress(RayError):
            ray.kill(kept.handle, no_restart=True)

    def _row(self, plan: RolePlan) -> RoleReport:
        kept = self._kept.get(plan.name)
        looked = kept.looked if kept is not None else None
        if kept is None or looked is None:
            moves = kept.moves if kept is not None else 0
            why = plan.trouble or "its actor does not answer yet"
            return RoleReport(plan.name, plan.role, plan.ray_id, "pending", moves, why, {})
        restarts = looked.restarts + kept.moves
        return RoleReport(
            plan.name, plan.role, looked.ray_node, looked.state, restarts, looked.trouble,
            looked.ready,
        )  # fmt: skip


_ROLE: Any = ray.remote(RoleActor)
_MOVING: Final = ("prefill", "decode", "compute")
"""Roles that Ray places."""


def compute_needs(settings: Settings) -> dict[str, float]:
    """Return what a compute node asks of Ray: a GPU, or as many CPUs as it has threads."""
    if settings.compute.device.startswith("cuda"):
        return {"GPU": 1.0}
    return {"CPU": float(settings.compute.threads or 1)}


def _machines() -> list[Machine]:
    return [
        Machine(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _existing() -> set[str]:
    """Return the names of role actors of this controller's earlier life."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return {
        actor["name"]
        for actor in named
        if actor["namespace"] == NAMESPACE and actor["name"] != CONTROLLER
    }


def _keep_counts(counts: Mapping[str, int]) -> None:
    """Keep the numbers of nodes for the controller's next life; empty: forget them."""
    internal_kv._internal_kv_put(_COUNTS, json.dumps(dict(counts)), namespace=_STORE)


def _kept_counts() -> dict[str, int]:
    """Return the numbers that an earlier life kept; empty if there was none."""
    kept = internal_kv._internal_kv_get(_COUNTS, namespace=_STORE)
    found: dict[str, int] = json.loads(kept) if kept else {}
    return found
