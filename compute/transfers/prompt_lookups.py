"""Describes sequences to the tiers, which know no sequences.

Pure functions, called by the loads and prefetches in the engine's thread. The tiers' side of the
values is compute/tiers/prompt_lookup.py.
"""

from __future__ import annotations

from tierkv.compute.batching.sequence import Sequence
from tierkv.compute.tiers.prompt_lookup import PartWanted, PromptLookup
from tierkv.kvcore.layout import KvCodec


def lookup_of(
    seq: Sequence, codec: KvCodec | None, *, part: PartWanted | None = None
) -> PromptLookup:
    """Ask for the blocks that follow a sequence's L1 pages.

    Args:
        seq: the sequence.
        codec: how the KV of the sequence is stored below L1; None: not at all, and no block is
            asked for.
        part: what may be found in part (``part_wanted``).
    """
    return PromptLookup(
        keys=tuple(seq.missing_keys()) if codec is not None else (),
        start=seq.num_pages * seq.block_tokens,
        codec=codec,
        arrived_s=seq.arrival_s or None,  # 0.0: loaded ahead or computed in the background.
        # The directory may not know yet a block that was saved a moment ago.
        thorough=seq.request.resumed_tokens > 0 or seq.hits_final,
        part=part if codec is not None else None,
    )


def part_wanted(seq: Sequence, l1_tokens: int) -> PartWanted | None:
    """Describe what a sequence could take in part; None if its chunks may be blended.

    Args:
        seq: the sequence.
        l1_tokens: leading tokens of the next block, held by L1.
    """
    if seq.blend is not None or seq.is_background or not seq.request.use_cache:
        return None
    start = seq.num_pages * seq.block_tokens
    return PartWanted(
        seq.request.namespace_key,
        tuple(seq.keys[: seq.usable_blocks]),
        seq.num_pages,
        seq.token_bytes(start, seq.reusable_tokens),
        seq.block_tokens,
        l1_tokens,
    )
