"""The prefix tree of a statement's prompts, in blocks.

Built once per statement by scheduler/plans/statement_run.py, read by scheduler/plans/plan_runs.py
and scheduler/plans/plan_state.py. Pure. Only what two prompts share becomes a stem; what a prompt
has for itself is a number.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = 0
"""The stem above all: no blocks, every call."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """One call's prompt, as far as sharing goes.

    Attributes:
        token_ids: the whole prompt.
        domain: names whose KV it is (tenant, model, layout); others' blocks are never shared.
        block_tokens: tokens per block of its model.
        shares: False for a prompt that neither reads nor leaves KV.
    """

    token_ids: Sequence[int]
    domain: bytes
    block_tokens: int
    shares: bool = True


@dataclass(frozen=True, slots=True)
class Stem:
    """Blocks that the same calls share.

    Attributes:
        parent: the stem before it on the way from the root; the root is its own.
        start_block: first block, counted from the beginning of the prompt.
        end_block: behind its last block.
        first: first position (in PrefixTree.order) of a call that has these blocks.
        stop: behind the last such position.
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
        """Its own blocks, without those before."""
        return self.end_block - self.start_block

    @property
    def end_tokens(self) -> int:
        """Tokens from the beginning of the prompt to the end of the stem."""
        return self.end_block * self.block_tokens


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """All prompts, depth first. A position is a place in ``order``.

    Attributes:
        order: the prompts' indexes, so that prompts with a common prefix are neighbours.
        stems: what several prompts share, parents before children; the root is first.
        deepest: per position the longest stem it has a part in.
        tokens: per position the prompt's length.
        block_tokens: per position.
        common: per position how many leading tokens the one before has, too: no earlier one has
            more. A node that computed that one copies them, also where they end inside a block.
    """

    order: tuple[int, ...]
    stems: tuple[Stem, ...]
    deepest: tuple[int, ...]
    tokens: tuple[int, ...]
    block_tokens: tuple[int, ...]
    common: tuple[int, ...]

    def path(self, position: int) -> list[int]:
        """Stems of a call, from its deepest one up, without the root."""
        return self.up(self.deepest[position])

    def up(self, stem: int) -> list[int]:
        """The stem and those above it, without the root."""
        found: list[int] = []
        while stem != ROOT:
            found.append(stem)
            stem = self.stems[stem].parent
        return found

    def own_tokens(self, position: int) -> int:
        """Tokens that no other prompt of the statement has at this place."""
        return self.tokens[position] - self.stems[self.deepest[position]].end_tokens

    def own_blocks(self, position: int) -> int:
        """Blocks for them, the last and partial one included."""
        return -(-self.own_tokens(position) // self.block_tokens[position])

    @property
    def shared_tokens(self) -> int:
        """Tokens that need not be computed, because another call of the statement does."""
        return sum(self.common)


def build_tree(prompts: Sequence[PlannedPrompt]) -> PrefixTree:
    """Sort prompts so that common prefixes meet, and find what is shared.

    Costs one comparison of each shared block, and sorting by memory comparison.
    """
    raw = [_comparable(p.token_ids) for p in prompts]
    order = sorted(
        range(len(prompts)), key=lambda i: (prompts[i].shares, prompts[i].domain, raw[i])
    )
    shared, common = [0] * len(order), [0] * len(order)
    for at in range(1, len(order)):
        left, right = order[at - 1], order[at]
        if _may_share(prompts[left], prompts[right]):
            width = 4 * prompts[right].block_tokens
            shared[at] = _shared_blocks(raw[left], raw[right], width)
            common[at] = _common_tokens(raw[left], raw[right], shared[at] * width)
    block_tokens = tuple(prompts[i].block_tokens for i in order)
    stems = _stems(shared, block_tokens)
    return PrefixTree(
        order=tuple(order),
        stems=stems,
        deepest=_deepest(stems, len(order)),
        tokens=tuple(len(prompts[i].token_ids) for i in order),
        block_tokens=block_tokens,
        common=tuple(common),
    )


def _comparable(token_ids: Sequence[int]) -> bytes:
    """Big-endian bytes: comparing them is comparing the tokens one by one, but faster."""
    numbers = array("I", token_ids)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def _may_share(left: PlannedPrompt, right: PlannedPrompt) -> bool:
    return left.shares and right.shares and left.domain == right.domain


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
    """Make the tree out of what neighbours share (LCP intervals), parents before children."""
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
    """Walk the positions and the stems side by side; both are depth first."""
    deepest: list[int] = []
    coming, current = 1, ROOT
    for position in range(count):
        while stems[current].stop <= position:
            current = stems[current].parent
        while coming < len(stems) and stems[coming].first == position:
            current, coming = coming, coming + 1
        deepest.append(current)
    return tuple(deepest)
