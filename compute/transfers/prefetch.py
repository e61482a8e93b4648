"""Blocks loaded ahead of an expected request, while another node still computes the prompt.

Used by the engine only, in the engine's thread. Prefetching is best effort at the lowest priority:
a prefetch takes at most half of the spare pages, leaves the blocks behind as cached pages, and
loads no blocks if anything fails. ``lookup_of`` and ``part_wanted`` describe sequences to the
tiers, which know no sequences (compute/tiers/prompt_lookup.py), for prefetches and loads alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.inbox import Inbox
from tierkv.compute.batching.reuse_facts import block_of, prompt_blocks
from tierkv.compute.batching.sequence import Sequence, make_sequence
from tierkv.compute.config import ComputeConfig, LoadPolicy
from tierkv.compute.tiers.finder import Source
from tierkv.compute.tiers.loader import LoadJob
from tierkv.compute.tiers.prompt_lookup import PartWanted, PromptLookup
from tierkv.compute.tiers.tiers import Tiers
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import GenerateRequest


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


_MAX_PREFETCHES = 4
"""Prefetches under way at once. More are refused; their requests load blocks for themselves."""

Answer = Callable[[int], None]
"""Takes the number of leading prompt tokens that L1 holds now."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """One prompt to prefetch; ``seq`` never enters the batch.

    Attributes:
        hits: pages of leading blocks that L1 had; one reference each.
    """

    seq: Sequence
    hits: list[int]
    answer: Answer

    @property
    def hit_tokens(self) -> int:
        """Tokens that need no loading."""
        return len(self.hits) * self.seq.block_tokens


class Prefetches:
    """Prompts whose blocks are being loaded ahead."""

    def __init__(self, batcher: Batcher, tiers: Tiers, inbox: Inbox, config: ComputeConfig) -> None:
        self._batcher = batcher
        self._tiers = tiers
        self._inbox = inbox
        self._policy = config.load_policy
        self._block_tokens = config.block_tokens
        self._open: set[_Prefetch] = set()

    def begin(self, request: GenerateRequest, answer: Answer) -> None:
        """Load the full blocks before the prompt's last token; ``answer`` comes exactly once."""
        seq = make_sequence(0, request, arrival_s=0.0, block_tokens=self._block_tokens)
        pool = self._batcher.pool
        hits = pool.lookup(seq.keys[: seq.usable_blocks])
        prefetch = _Prefetch(seq, hits, answer)
        wanted = self._policy is not LoadPolicy.NEVER and self._tiers.reachable
        wanted = wanted and self._tiers.codec_of(request) is not None
        if not wanted or len(hits) == seq.usable_blocks or len(self._open) >= _MAX_PREFETCHES:
            answer(prefetch.hit_tokens)
            return
        pool.acquire(hits)
        seq.add_pages(hits)
        self._open.add(prefetch)
        self._tiers.locate(
            lookup_of(seq, self._tiers.codec_of(request)),
            lambda found, part: self._inbox.post(lambda: self._located(prefetch, found)),
        )

    def give_up(self) -> None:
        """Answer every open prefetch; blocks that are still loading are dropped."""
        for prefetch in self._open:
            prefetch.answer(prefetch.hit_tokens)
        self._open.clear()

    def _located(self, prefetch: _Prefetch, found: list[tuple[Source, ...]]) -> None:
        seq, pool = prefetch.seq, self._batcher.pool
        found = found[: seq.usable_blocks - seq.num_pages]  # L1 takes no tail ahead of a request.
        blocks = min(len(found), self._batcher.spare_pages // 2)
        pages = pool.allocate(blocks, over_leases=False) if blocks > 0 else None
        if not pages:
            self._end(prefetch, [])
            return
        self._tiers.load(
            seq.request,
            pages,
            found[:blocks],
            arrived=lambda: None,
            ended=lambda job: self._inbox.post(lambda: self._loaded(prefetch, pages, job)),
            ahead=True,
        )

    def _loaded(self, prefetch: _Prefetch, pages: list[int], job: LoadJob) -> None:
        """Make the arrived blocks findable; a block already in L1 by then keeps its page."""
        seq, pool = prefetch.seq, self._batcher.pool
        pool.release(pages[job.good :])
        kept = []
        for block, page in enumerate(pages[: job.good], len(prefetch.hits)):
            spec = block_of(seq, block)
            kept.append(pool.commit(page, spec, prompt_blocks=prompt_blocks(seq)))
            self._batcher.parts.committed(seq, block, kept[-1])
        self._end(prefetch, kept)

    def _end(self, prefetch: _Prefetch, loaded: list[int]) -> None:
        self._batcher.pool.release([*prefetch.hits, *loaded])
        if prefetch in self._open:
            self._open.remove(prefetch)
            prefetch.answer(prefetch.hit_tokens + len(loaded) * self._block_tokens)
