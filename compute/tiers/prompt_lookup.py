"""A question to the tiers about one prompt, and the search for a partly matching block.

The engine's side (compute/transfers/prefetch.py) builds a lookup from a sequence; worker
threads of the tiers read the lookup. No value here changes or refers to a sequence: a worker thread
never sees a sequence in the middle of a change.

Where a prompt's chain of whole blocks ends, the beginning of a pool block may match. A block is one
range per layer with one checksum. A partly matching block is therefore read whole, into a page
owned by the sequence, and counts as far as the tokens agree; the rest of the page is computed over.
This costs one more lookup per prompt, made only where it spares more than its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.compute.l1.part_index import TOKEN_BYTES, KnownBlocks, scope_of
from tierkv.compute.tiers.finder import Source
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.kvcore.block import ROOT_PARENT
from tierkv.kvcore.ids import BlockKey, NamespaceKey
from tierkv.kvcore.layout import KvCodec


@dataclass(frozen=True, slots=True)
class PartWanted:
    """The rest of a prompt, for a search of blocks with the same first tokens.

    Attributes:
        namespace: namespace of the prompt's blocks.
        keys: keys of the prompt's usable full blocks.
        first_block: index of the first block missing from L1.
        tokens: the prompt's tokens from the first missing block on, without the last token, encoded
            as in compute/l1/part_index.py.
        block_tokens: tokens per block.
        l1_tokens: leading tokens of the first missing block in L1.
    """

    namespace: NamespaceKey
    keys: tuple[BlockKey, ...]
    first_block: int
    tokens: bytes
    block_tokens: int
    l1_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """A question to the pool: which blocks behind a prompt's L1 pages exist below L1?

    Attributes:
        keys: keys of the blocks missing from L1, in prompt order; the last block may be partial.
        start: tokens before the first missing block.
        codec: how the prompt's KV is stored; None if KV of this prompt is not stored below L1.
        arrived_s: the engine's clock when the request arrived; None if no caller waits.
        thorough: as in BlockFinder.find.
        part: search for a partly matching block; None: only whole blocks are looked up.
    """

    keys: tuple[BlockKey, ...]
    start: int
    codec: KvCodec | None
    arrived_s: float | None = None
    thorough: bool = False
    part: PartWanted | None = None


Find = Callable[[Sequence[BlockKey], int], list[tuple[Source, ...]]]
"""Looks up a chain in the pool; the number is the position of the chain's first token."""


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Copies of a block that matches a prompt's next ``tokens`` tokens."""

    copies: tuple[Source, ...]
    tokens: int


def find_part(
    wanted: PartWanted,
    found: int,
    *,
    known: KnownBlocks,
    find: Find,
    worth_asking: Callable[[int, int], bool],
) -> PoolPart | None:
    """Look for a block that begins like the rest of the prompt behind ``found`` whole blocks.

    Args:
        wanted: the prompt.
        found: number of whole blocks found in the pool.
        known: blocks whose tokens are known here.
        find: asks the pool; called at most once.
        worth_asking: says whether this many tokens, from this position, pay for a lookup.
    """
    block = wanted.first_block + found
    if block > len(wanted.keys):
        return None  # A tail was found; nothing is left behind it.
    parent = wanted.keys[block - 1] if block else ROOT_PARENT
    width = TOKEN_BYTES * wanted.block_tokens
    tokens = wanted.tokens[found * width : (found + 1) * width]
    part = known.find(scope_of(wanted.namespace, parent), tokens) if tokens else None
    if part is None:
        return None
    count = min(part.tokens, wanted.block_tokens - 1)
    gain = count - (wanted.l1_tokens if found == 0 else 0)
    if gain <= 0 or not worth_asking(gain, block * wanted.block_tokens):
        return None
    copies = find([part.item], block * wanted.block_tokens)
    return PoolPart(copies[0], count) if copies else None


def worth_loading(
    part: PoolPart, codec: KvCodec, figures: LoadFigures, *, start: int, alone: bool
) -> bool:
    """Return whether reading a block is faster than computing its common part with a prompt.

    Args:
        part: the block.
        codec: how the block is stored.
        figures: costs of reading and computing.
        start: tokens before the block.
        alone: no other block is loaded, so the latency counts for this block.
    """
    cost = figures.steps.cost
    if cost is None:
        return True
    (run,) = figures.runs([part.copies])
    level = figures.level(codec, [part.copies])
    size = figures.stored_bytes(part.copies[0])
    load = run.seconds(size, level, reads=float(alone))
    return cost.spared_s(load.total_s, start=start, tokens=part.tokens) > 0.0
