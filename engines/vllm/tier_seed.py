"""Whether vLLM's hashes mean the same in every process.

vLLM hashes chunks from a seed on. Where that is random a restarted engine finds nothing of what it
stored, and where engines were given different seeds or algorithms none finds what another stored:
both look like a cache that never hits. So the first engine of a model leaves its seed in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from dmp.pool import Pool
from kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NamespaceKey

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


def seed_key(base: NamespaceKey) -> BlockKey:
    """Name the value that says by which seed an engine's like names chunks."""
    return BlockKey(blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON).digest())


def agree_on_seed(pool: Pool, base: NamespaceKey, seed: bytes) -> bool:
    """Leave our seed in the pool, unless there is one; whether what is there is ours."""
    mark = blake2b(seed, key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON).digest()
    key = seed_key(base)
    pool.put(key, mark)
    there = pool.get(key)
    return there is None or there == mark
