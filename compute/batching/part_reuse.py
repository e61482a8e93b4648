"""Token-exact reuse in L1: a prompt takes over the common part of a partly equal block.

Used by the batcher only, in the engine's thread. Whole blocks are shared, parts of blocks are
copied: the first tokens of a known page go to a page owned by the sequence, and the sequence then
fills the page. Pages can be large, and a prompt still reuses most of the first block that differs
from all known blocks:

    known   |aaaaaaaa|bbbbbbbb|        an earlier prompt
    prompt  |aaaaaaaa|bbbbbcc          shares the first page, copies 5 tokens, computes from c on

A known page is a full block, the beginning of a running sequence's last block once the prompt is
computed (``open_end``), or the unfinished last block of an ended sequence (``keep_end``). A prompt
is announced while its blocks are computed (``BlockClaims``); a prompt with the same next block, or
much of the same block, waits.
"""

from __future__ import annotations

from collections.abc import Collection

from tierkv.compute.batching.batch_plan import PageCopy
from tierkv.compute.batching.reuse_facts import end_of, prompt_blocks
from tierkv.compute.batching.sequence import Sequence
from tierkv.compute.l1.page_pool import PagePool
from tierkv.compute.l1.part_index import Item, KnownBlocks, Part, PartIndex, scope_of
from tierkv.kvcore.block import ROOT_PARENT, Tier
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import NO_FACTS

_WORTH_WAITING = 4
"""A sequence waits for an announced block if waiting spares at least this part (a quarter) of a
block.
"""


class PartReuse:
    """The parts of blocks exchanged between the sequences of one page pool."""

    def __init__(self, pool: PagePool, known: KnownBlocks | None = None) -> None:
        """Begin with nothing.

        Args:
            pool: the pages.
            known: records full blocks, to find parts of blocks evicted from L1.
        """
        self._pool = pool
        self._known = known

    def take(self, seq: Sequence) -> PageCopy | None:
        """Take over the known part of a sequence's next block, for which it has a page.

        The taken tokens count as computed from now on: the copy must be made before anything reads
        the page.

        Returns:
            the copy to make into the sequence's next page, which then needs no clearing; None if no
            part is known.
        """
        seq.part_sought = True
        block = seq.computed // seq.block_tokens
        part = _find(self._pool.parts, seq, block)
        if part is None:
            return None
        tokens = min(part.tokens, seq.block_tokens - 1)  # At least one token is computed here.
        copy = PageCopy(part.item, int(seq.page_table[block]), tokens)
        facts = self._pool.facts([part.item])
        if facts[0] is not NO_FACTS:
            self._pool.use([part.item], facts)
        seq.computed += tokens
        if not seq.hits_final:
            seq.part_tier, seq.part_tokens = Tier.L1, tokens
        return copy

    def known_tokens(self, seq: Sequence, block: int) -> int:
        """Return how many leading tokens of a sequence's block L1 has."""
        part = _find(self._pool.parts, seq, block)
        return part.tokens if part is not None else 0

    def below_l1(self, seq: Sequence) -> int:
        """Return how many tokens behind a sequence's whole pages only the pool may have."""
        block, wanted = seq.num_pages, len(seq.missing_keys())
        if wanted:
            return seq.loaded_tokens(block + wanted) - seq.computed - self.known_tokens(seq, block)
        if self._known is None or not seq.wants_part or seq.blend is not None:
            return 0
        stop = min(seq.reusable_tokens, seq.computed + seq.block_tokens)
        part = self._known.find(_scope(seq, block), seq.token_bytes(seq.computed, stop))
        return part.tokens - self.known_tokens(seq, block) if part is not None else 0

    def committed(self, seq: Sequence, block: int, page: int) -> None:
        """Offer parts of a newly findable full block."""
        start = block * seq.block_tokens
        stop = start + seq.block_tokens
        self._add(seq, block, page, stop)
        if self._known is not None:
            key, _ = seq.key_and_parent(block)
            self._known.note(_scope(seq, block), seq.token_bytes(start, stop), key)

    def open_end(self, seq: Sequence) -> None:
        """Offer parts of a computed prompt's last block, in which the answer continues."""
        stop = min(seq.computed, seq.prompt_length, seq.findable_tokens)
        if seq.request.use_cache and stop > seq.committed * seq.block_tokens:
            self._add(seq, seq.committed, int(seq.page_table[seq.committed]), stop)

    def keep_end(self, seq: Sequence) -> None:
        """Make the unfinished last block of a leaving sequence findable.

        A block that is being saved is left out: the saved page would keep the preceding blocks from
        eviction, and their pages may be needed at once.
        """
        block = seq.committed
        start, stop = block * seq.block_tokens, min(seq.computed, seq.findable_tokens)
        if not seq.request.use_cache or seq.is_background or stop <= start:
            return
        tokens, page = seq.token_bytes(start, stop), int(seq.page_table[block])
        if self._pool.is_shared(page):
            return
        self._pool.parts.remove(page)
        known = self._pool.parts.find(_scope(seq, block), tokens)
        if known is not None and known.tokens == stop - start:
            return  # Another page has as much.
        seq.page_table[block] = self._pool.commit(
            page, end_of(seq, stop), prompt_blocks=prompt_blocks(seq), partial=True
        )
        self._add(seq, block, int(seq.page_table[block]), stop)

    def _add(self, seq: Sequence, block: int, page: int, stop: int) -> None:
        """Make a page findable by its tokens; a page with fewer of the same tokens is replaced."""
        scope, tokens = _scope(seq, block), seq.token_bytes(block * seq.block_tokens, stop)
        parts = self._pool.parts
        if page in parts and parts.tokens_of(page) == tokens:
            return
        parts.add(scope, tokens, page)
        shorter = parts.shortened(scope, tokens)
        if shorter is not None and self._pool.is_spare_part(shorter):
            self._pool.give_up(shorter)


class BlockClaims:
    """Blocks about to be computed by sequences of the batch: waiting sequences wait for them.

    A block is announced once, by the first sequence that lacks the block. The announcement ends
    when the block is findable in L1 or will not be computed after all.
    """

    def __init__(self, parts: PartReuse) -> None:
        self._parts = parts
        self._owner: dict[BlockKey, int] = {}
        self._index: PartIndex[BlockKey] = PartIndex()

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, key: BlockKey | None) -> bool:
        return key in self._owner

    def announce(self, seq: Sequence, first: int) -> None:
        """Announce a prompt's blocks from ``first`` on, including a partial last block."""
        if seq.is_background or not seq.request.use_cache:
            return
        missing = seq.keys[first:]
        if seq.length % seq.block_tokens and len(seq.keys) == seq.length // seq.block_tokens:
            missing.append(seq.tail(seq.length)[0])
        for block, key in enumerate(missing, first):
            if key in self._owner:
                continue
            self._owner[key] = seq.seq_id
            seq.claims.append(key)
            start = block * seq.block_tokens
            stop = min(start + seq.block_tokens, seq.length)
            self._index.add(_scope(seq, block), seq.token_bytes(start, stop), key)

    def withdraw(self, seq: Sequence, key: BlockKey) -> None:
        """Take back an announcement if this sequence made it."""
        if self._owner.get(key) == seq.seq_id:
            del self._owner[key]
            self._index.remove(key)

    def withdraw_all(self, seq: Sequence) -> None:
        """Take back all announcements of a sequence."""
        for key in seq.claims:
            self.withdraw(seq, key)
        seq.claims = []

    def worth_waiting_for(self, seq: Sequence, block: int) -> BlockKey | None:
        """Return an announced block equal to a sequence's next block, or sharing much of it.

        Sharing much means a quarter of a block more than L1 has.
        """
        if block < seq.usable_blocks and seq.keys[block] in self._owner:
            return seq.keys[block]
        if not seq.request.use_cache or not len(self._index):
            return None
        claimed = _find(self._index, seq, block)
        if claimed is None:
            return None
        gain = claimed.tokens - self._parts.known_tokens(seq, block)
        return claimed.item if gain >= max(1, seq.block_tokens // _WORTH_WAITING) else None

    def check_invariants(self, active: Collection[int]) -> None:
        """Assert that only sequences of the batch have announced blocks."""
        assert set(self._owner.values()) <= set(active)
        assert len(self._index) == len(self._owner)


def _scope(seq: Sequence, block: int) -> bytes:
    parent = seq.key_and_parent(block - 1)[0] if block else ROOT_PARENT
    return scope_of(seq.request.namespace_key, parent)


def _find(index: PartIndex[Item], seq: Sequence, block: int) -> Part[Item] | None:
    """Return what shares most of a sequence's block; its last token must be computed anyway."""
    start = block * seq.block_tokens
    stop = min(seq.reusable_tokens, start + seq.block_tokens)
    return index.find(_scope(seq, block), seq.token_bytes(start, stop)) if stop > start else None
