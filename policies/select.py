"""Eviction policies by name, for caches and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierkv.policies.eviction import EvictionPolicy, LeafLru
from tierkv.policies.learned import LearnedValue

PolicyMaker = Callable[[int, int], EvictionPolicy]
"""Makes a policy from a capacity in blocks and a seed."""

PRODUCTION_POLICIES: Final[dict[str, PolicyMaker]] = {
    "default": lambda capacity_blocks, seed: LearnedValue(capacity_blocks),
    "leaf_lru": lambda capacity_blocks, seed: LeafLru(),
}
"""Policies for caches that offer leaves only."""


def make_policy(name: str, capacity_blocks: int, *, seed: int = 0) -> EvictionPolicy:
    """Return a new policy.

    Args:
        name: one of PRODUCTION_POLICIES.
        capacity_blocks: capacity of the cache in blocks; bounds the memory of the policy.
        seed: seed of the policy's random numbers.

    Raises:
        ValueError: no policy has this name.
    """
    maker = PRODUCTION_POLICIES.get(name)
    if maker is None:
        known = ", ".join(sorted(PRODUCTION_POLICIES))
        raise ValueError(f"unknown eviction policy {name!r}; known: {known}")
    return maker(max(1, capacity_blocks), seed)
