"""Which roles a cluster on Ray should have, and where each is pinned. Pure.

# The controller (on_ray/controller.py) compares the result with the actors that exist.
# - One pool node per machine, named after the machine: when a machine or its actor comes back, the
#   pool node finds the segment of its earlier life.
# - Meta servers and fronts are pinned to a machine each, because clients know their addresses.
#   Ray's placement groups would spread them, too, but can't grow: a front added later could land
#   beside an earlier one that has the ports.
# - Compute nodes are not pinned: Ray finds a machine with the CPUs or GPUs, and moves them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.errors import UserError

SCALABLE: Final = ("meta", "compute", "prefill", "decode", "front")
"""Roles with a number of nodes; pool nodes follow the machines."""

MOST_NODES: Final = 1_000
"""Nodes of one role, at most."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A live node of the Ray cluster; in tests several are on one machine.

    Attributes:
        ray_id: Ray's name of the node, new after a restart.
        address: IP address.
        total: resources of the machine, such as ``{"CPU": 16.0}``.
    """

    ray_id: str
    address: str
    total: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One process to keep up.

    Attributes:
        name: name of the node and of its actor.
        role: as in ``tierkv serve``.
        ray_id: the machine it is pinned to; empty: any.
        needs: resources that Ray sets aside, such as ``{"CPU": 1.0}``.
        trouble: why it can't be placed; empty if it can.
    """

    name: str
    role: str
    ray_id: str = ""
    needs: Mapping[str, float] | None = None
    trouble: str = ""


def pool_name(address: str) -> str:
    """Return the name of a machine's pool node."""
    return "dmp-" + re.sub(r"[^0-9A-Za-z]+", "-", address).strip("-")


def plan_roles(
    counts: Mapping[str, int],
    machines: Sequence[Machine],
    pinned: Mapping[str, str],
    needs: Mapping[str, float],
    free: Mapping[str, float],
) -> list[RolePlan]:
    """List what should run.

    Args:
        counts: number of nodes of each role in ``SCALABLE``; missing: none.
        machines: the live machines.
        pinned: machine of each meta server and front so far; those of lost machines are moved.
        needs: resources of a compute, prefill or decode node.
        free: resources of all machines together that no actor has.

    Returns:
        plans: in the order of starting.
    """
    ordered = sorted(machines, key=lambda machine: machine.address)
    live = {machine.ray_id for machine in ordered}
    plans = _spread("meta", counts.get("meta", 0), ordered, pinned, live)
    plans += [RolePlan(pool_name(m.address), "dmp", m.ray_id) for m in ordered]
    for role in ("prefill", "decode", "compute"):
        for number in range(counts.get(role, 0)):
            trouble = _why_pending(needs, ordered, free)
            plans.append(RolePlan(f"{role}-{number}", role, needs=needs, trouble=trouble))
    return plans + _spread("front", counts.get("front", 0), ordered, pinned, live)


def _spread(
    role: str,
    count: int,
    machines: Sequence[Machine],
    pinned: Mapping[str, str],
    live: set[str],
) -> list[RolePlan]:
    """Give each node of a role a machine of its own; who has a live one keeps it."""
    names = [f"{role}-{number}" for number in range(count)]
    kept = {name: pinned[name] for name in names if pinned.get(name) in live}
    used = Counter(kept.values())
    plans = []
    for name in names:
        at = kept.get(name)
        if at is None:
            at = next((m.ray_id for m in machines if not used[m.ray_id]), "")
            used[at] += 1
        trouble = "" if at else f"every machine has a {role} already; add a machine to Ray"
        plans.append(RolePlan(name, role, at, trouble=trouble))
    return plans


def _why_pending(
    needs: Mapping[str, float], machines: Iterable[Machine], free: Mapping[str, float]
) -> str:
    """Say why a node that Ray has not placed waits; used only while it waits."""
    wanted = " and ".join(f"{count:g} {name}" for name, count in sorted(needs.items()))
    fits = any(
        all(machine.total.get(name, 0.0) >= count for name, count in needs.items())
        for machine in machines
    )
    if not fits:
        return f"needs {wanted}, which no machine has"
    if any(free.get(name, 0.0) < count for name, count in needs.items()):
        return f"needs {wanted}; nothing is free, so it waits for another machine"
    return f"needs {wanted}; Ray is placing it"


def read_scale(words: Sequence[str]) -> dict[str, int]:
    """Read ``compute=8 front=2``.

    Raises:
        UserError: not ROLE=NUMBER, an unknown role, or a number out of range.
    """
    counts: dict[str, int] = {}
    for word in words:
        role, _, number = word.partition("=")
        if role not in SCALABLE:
            raise UserError(
                f"{word!r}: {role!r} is no role that can be scaled",
                hint=f"Write ROLE=NUMBER; roles are {', '.join(SCALABLE)}. Each machine of Ray has "
                "one pool node.",
            )
        if not number.isdecimal() or int(number) > MOST_NODES:
            raise UserError(f"{word!r}: a number of nodes is from 0 to {MOST_NODES}")
        counts[role] = int(number)
    if counts.get("meta") == 0:
        raise UserError("a cluster needs a meta server", hint="Write meta=1 or meta=3.")
    return counts
