"""Prompts that share beginnings, and what is computed from them: the oracle of the simulation.

The "KV" of a block is a digest of its own tokens and of the KV before it, as in a transformer: who
continues from a wrong block gets a wrong answer, and the answer shows it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tests.fix_scheduler import LAYOUT, NAMESPACE
from tierkv.kvcore.block import ROOT_PARENT, block_keys
from tierkv.kvcore.ids import BlockKey

BLOCK_TOKENS = LAYOUT.block_tokens
MAX_BLOCKS = 7


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, cut into blocks; ``tail`` is what fills none."""

    blocks: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]
    keys: tuple[BlockKey, ...]

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + len(self.tail)

    def parent(self, block: int) -> BlockKey:
        return self.keys[block - 1] if block else ROOT_PARENT


def draw_prompt(rng: random.Random) -> Prompt:
    """Draw a path in a small forest, so that many prompts begin alike."""
    path = [rng.randrange(3)]
    for _ in range(max(rng.randrange(MAX_BLOCKS), rng.randrange(MAX_BLOCKS))):
        path.append(0 if rng.random() < 0.7 else rng.randrange(1, 3))
    blocks = tuple((10 * at + branch + 2,) * BLOCK_TOKENS for at, branch in enumerate(path))
    tail = tuple(rng.randrange(100, 110) for _ in range(rng.randrange(1, BLOCK_TOKENS)))
    ids = [token for block in blocks for token in block] + list(tail)
    return Prompt(blocks, tail, tuple(block_keys(NAMESPACE, ids, block_tokens=BLOCK_TOKENS)))


def next_kv(before: bytes, block: Sequence[int]) -> bytes:
    """Compute a block's KV from the KV before it."""
    return blake2b(before + repr(block).encode(), digest_size=8).digest()


def answer_from(kv: Sequence[bytes], tail: Sequence[int]) -> bytes:
    """Answer a prompt from the KV of all its blocks."""
    return blake2b(b"".join(kv) + repr(tail).encode(), digest_size=8).digest()


def expected_kv(prompt: Prompt) -> list[bytes]:
    """Compute every block's KV from nothing."""
    kv: list[bytes] = []
    for block in prompt.blocks:
        kv.append(next_kv(kv[-1] if kv else b"", block))
    return kv


def expected_answer(prompt: Prompt) -> bytes:
    """Answer without any cache."""
    return answer_from(expected_kv(prompt), prompt.tail)
