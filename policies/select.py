"""Eviction policies by name, for caches, namespaces and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierkv.policies.classic import TTL_S, Arc, Fifo, Lfu, Lru, Ttl
from tierkv.policies.eviction import EvictionPolicy, LeafLru
from tierkv.policies.learned import LearnedValue

PolicyMaker = Callable[[int, int], EvictionPolicy]
"""Makes a policy from a capacity in blocks and a seed."""

PRODUCTION_POLICIES: Final[dict[str, PolicyMaker]] = {
    "default": lambda capacity_blocks, seed: LearnedValue(capacity_blocks),
    "leaf_lru": lambda capacity_blocks, seed: LeafLru(),
}
"""Policies for whole caches; these offer leaves only."""

CLASSIC_POLICIES: Final[dict[str, PolicyMaker]] = {
    "lru": lambda capacity_blocks, seed: Lru(),
    "lfu": lambda capacity_blocks, seed: Lfu(),
    "arc": lambda capacity_blocks, seed: Arc(capacity_blocks),
    "fifo": lambda capacity_blocks, seed: Fifo(),
    "ttl": lambda capacity_blocks, seed: Ttl(),
}
"""Policies on single blocks."""

NAMESPACE_POLICIES: Final[dict[str, PolicyMaker]] = PRODUCTION_POLICIES | CLASSIC_POLICIES
"""Policies for a namespace's own blocks on pool nodes."""


def make_policy(
    name: str, capacity_blocks: int, *, seed: int = 0, ttl_s: float = TTL_S
) -> EvictionPolicy:
    """Return a new policy.

    Args:
        name: one of NAMESPACE_POLICIES.
        capacity_blocks: capacity of the cache in blocks; bounds the memory of the policy.
        seed: seed of the policy's random numbers.
        ttl_s: how long ``ttl`` keeps a block that nobody uses.

    Raises:
        ValueError: no policy has this name.
    """
    maker = NAMESPACE_POLICIES.get(name)
    if maker is None:
        known = ", ".join(sorted(NAMESPACE_POLICIES))
        raise ValueError(f"unknown eviction policy {name!r}; known: {known}")
    if name == "ttl":
        return Ttl(ttl_s)
    return maker(max(1, capacity_blocks), seed)
