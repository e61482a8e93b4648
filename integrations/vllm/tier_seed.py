"""Whether vLLM's hashes mean the same in every process.

vLLM hashes chunks from a seed on. Where that is random a restarted engine finds nothing of what it
stored, and where engines were given different seeds or algorithms none finds what another stored:
both look like a cache that never hits. So the first engine of a model leaves its seed in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from tierkv.dmp.client.pool import Pool
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NamespaceKey

PERIOD_S: Final = 6 * 3600.0
"""A pool deletes nothing: values are named by period, so old seeds are forgotten."""

_MADE_UP_CHARS: Final = 64
_PERSON: Final = b"tierkv-vllmseed1"


@dataclass(frozen=True, slots=True)
class Seed:
    """From what vLLM's hashes begin.

    Attributes:
        value: its ``NONE_HASH``; follows from algorithm and seed.
        is_random: whether another process of the same configuration has another one.
    """

    value: bytes
    is_random: bool


def is_random(text: str) -> bool:
    """Whether vLLM made a seed up: PYTHONHASHSEED is a number, its own fixed seed a name."""
    return len(text) == _MADE_UP_CHARS


def seed_key(base: NamespaceKey, period: int) -> BlockKey:
    """Name the value that says by which seed the first engine of a period names chunks."""
    mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON)
    mac.update(period.to_bytes(8, "little"))
    return BlockKey(mac.digest())


def agree_on_seed(pool: Pool, base: NamespaceKey, seed: bytes, *, wall_s: float) -> bool:
    """Leave our seed in the pool for this period, unless there is one.

    Returns:
        Whether all seeds of this period and the one before are ours.
    """
    mark = blake2b(seed, key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON).digest()
    period = int(wall_s // PERIOD_S)
    pool.put(seed_key(base, period), mark)
    there = pool.get_many([seed_key(base, period), seed_key(base, period - 1)])
    return all(value in (None, mark) for value in there)
