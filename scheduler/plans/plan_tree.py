"""The prefix tree of a statement's prompts, in blocks.

Built once per statement by scheduler/plans/statement_run.py, read by scheduler/plans/plan_runs.py
and scheduler/plans/plan_state.py. Pure. Only blocks shared by at least two prompts become a stem;
the unshared rest of a prompt is only counted.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.kvcore.request import GenerateRequest

ROOT = 0
"""The stem above all others: no blocks, every call."""


@dataclass(frozen=True, slots=True)
class Stem:
    """Blocks shared by the same calls.

    Attributes:
        parent: the previous stem on the way from the root; the root is its own parent.
        start_block: first block, counted from the beginning of the prompt.
        end_block: one past the last block.
        first: first position (in PrefixTree.order) of a call with these blocks.
        stop: one past the last position.
        block_tokens: tokens per block.
    """

    parent: int
    start_block: int
    end_block: int
    first: int
    stop: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Count the blocks of this stem alone, without parents."""
        return self.end_block - self.start_block

    @property
    def end_tokens(self) -> int:
        """Count the tokens from the beginning of the prompt to the end of the stem."""
        return self.end_block * self.block_tokens


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """All prompts, depth first. A position is an index into ``order``.

    Attributes:
        order: indexes of the prompts; prompts with a common prefix are neighbours.
        stems: shared parts of prompts, parents before children; the root is first.
        deepest: per position the longest stem of the prompt.
        tokens: per position the length of the prompt.
        block_tokens: per position the tokens per block.
        common: per position the leading tokens shared with the previous position; no earlier
            position shares more. A node that computed the previous prompt copies these tokens, even
            up to the middle of a block.
    """

    order: tuple[int, ...]
    stems: tuple[Stem, ...]
    deepest: tuple[int, ...]
    tokens: tuple[int, ...]
    block_tokens: tuple[int, ...]
    common: tuple[int, ...]

    def path(self, position: int) -> list[int]:
        """Return the stems of a call, from the deepest stem up, without the root."""
        return self.up(self.deepest[position])

    def up(self, stem: int) -> list[int]:
        """Return the stem and all stems above, without the root."""
        found: list[int] = []
        while stem != ROOT:
            found.append(stem)
            stem = self.stems[stem].parent
        return found

    def own_tokens(self, position: int) -> int:
        """Count the tokens after the deepest stem, shared with no prompt of the statement."""
        return self.tokens[position] - self.stems[self.deepest[position]].end_tokens

    def own_blocks(self, position: int) -> int:
        """Count the blocks of the own tokens, including the partial last block."""
        return -(-self.own_tokens(position) // self.block_tokens[position])

    @property
    def shared_tokens(self) -> int:
        """Count the tokens computed by another call already."""
        return sum(self.common)


def build_tree(prompts: Sequence[GenerateRequest], block_tokens: Sequence[int]) -> PrefixTree:
    """Sort prompts by prefix and find the shared parts.

    Costs one comparison of each shared block, and sorting by memory comparison.

    Args:
        prompts: requests with the whole prompts. Blocks of different namespaces or models are never
            shared, and a request with ``use_cache`` False neither reads nor leaves KV.
        block_tokens: tokens per block of each request's model.
    """
    raw = [_comparable(prompt.token_ids) for prompt in prompts]

    def rank(at: int) -> tuple[bool, bytes, str, bytes]:
        prompt = prompts[at]
        return prompt.use_cache, prompt.namespace_key, prompt.prepared_for, raw[at]

    order = sorted(range(len(prompts)), key=rank)
    shared, common = [0] * len(order), [0] * len(order)
    for at in range(1, len(order)):
        left, right = order[at - 1], order[at]
        if _may_share(prompts[left], prompts[right]):
            width = 4 * block_tokens[right]
            shared[at] = _shared_blocks(raw[left], raw[right], width)
            common[at] = _common_tokens(raw[left], raw[right], shared[at] * width)
    in_order = tuple(block_tokens[i] for i in order)
    stems = _stems(shared, in_order)
    return PrefixTree(
        order=tuple(order),
        stems=stems,
        deepest=_deepest(stems, len(order)),
        tokens=tuple(len(prompts[i].token_ids) for i in order),
        block_tokens=in_order,
        common=tuple(common),
    )


def _comparable(token_ids: Sequence[int]) -> bytes:
    """Return big-endian bytes, whose order equals the order of the tokens but compares faster."""
    numbers = array("I", token_ids)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def _may_share(left: GenerateRequest, right: GenerateRequest) -> bool:
    return (
        left.use_cache
        and right.use_cache
        and left.namespace_key == right.namespace_key
        and left.prepared_for == right.prepared_for
    )


def _shared_blocks(left: bytes, right: bytes, width: int) -> int:
    blocks = min(len(left), len(right)) // width
    if left[: blocks * width] == right[: blocks * width]:
        return blocks
    for block in range(blocks):
        if left[block * width : (block + 1) * width] != right[block * width : (block + 1) * width]:
            return block
    raise AssertionError("unequal prompts without an unequal block")


def _common_tokens(left: bytes, right: bytes, at: int) -> int:
    """Count equal leading tokens of prompts that are equal up to byte ``at``."""
    while at < min(len(left), len(right)) and left[at : at + 4] == right[at : at + 4]:
        at += 4
    return at // 4


@dataclass(slots=True, eq=False)
class _Open:
    """A stem whose calls are still being counted."""

    end_block: int
    first: int
    stop: int = 0
    parent: _Open | None = None


def _stems(shared: Sequence[int], block_tokens: Sequence[int]) -> tuple[Stem, ...]:
    """Make the tree from blocks shared by neighbours (LCP intervals), parents before children."""
    root = _Open(0, 0)
    path, found = [root], [root]
    for at, blocks in enumerate([*shared[1:], 0], start=1):
        last: _Open | None = None
        while path[-1].end_block > blocks:
            last = path.pop()
            last.stop = at
            last.parent = path[-1]
        if path[-1].end_block < blocks:
            opened = _Open(blocks, last.first if last else at - 1, parent=path[-1])
            if last is not None:
                last.parent = opened
            path.append(opened)
            found.append(opened)
    root.stop = len(shared)
    return _numbered(found, block_tokens)


def _numbered(found: list[_Open], block_tokens: Sequence[int]) -> tuple[Stem, ...]:
    found.sort(key=lambda s: (s.end_block > 0, s.first, s.end_block))
    number = {id(stem): i for i, stem in enumerate(found)}
    stems: list[Stem] = []
    for stem in found:
        above = stem.parent or found[ROOT]
        stems.append(
            Stem(
                number[id(above)],
                above.end_block,
                stem.end_block,
                stem.first,
                stem.stop,
                block_tokens[stem.first] if block_tokens else 1,
            )
        )
    return tuple(stems)


def _deepest(stems: Sequence[Stem], count: int) -> tuple[int, ...]:
    """Find the deepest stem per position in a single pass over positions and stems."""
    deepest: list[int] = []
    coming, current = 1, ROOT
    for position in range(count):
        while stems[current].stop <= position:
            current = stems[current].parent
        while coming < len(stems) and stems[coming].first == position:
            current, coming = coming, coming + 1
        deepest.append(current)
    return tuple(deepest)
