"""A question to the tiers about one prompt: plain values, made in the engine's thread.

The engine's side (compute/transfers/prompt_lookups.py) builds a lookup from a sequence; worker
threads of the tiers read the lookup. No value here changes or refers to a sequence: a worker thread
never sees a sequence in the middle of a change.
"""

from __future__ import annotations

from dataclasses import dataclass

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
