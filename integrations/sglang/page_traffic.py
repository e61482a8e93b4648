"""Moving SGLang's pages between its host memory and the pool; runs in the door's threads.

Called by integrations/sglang/page_store.py with a Pool and windows into host memory. The windows
come from host_pages.py. The result is False for each page that the pool could not move. This
module keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tierkv.dmp.client.arguments import PutNotes
from tierkv.dmp.client.pool import Pool
from tierkv.kvcore.block_key import ROOT_PARENT
from tierkv.kvcore.ids import BlockKey


@dataclass(frozen=True, slots=True)
class Page:
    """One page and where its bytes are.

    Attributes:
        key: its name in the pool.
        pieces: its bytes, equally long parts.
    """

    key: BlockKey
    pieces: Sequence[memoryview]

    @property
    def size(self) -> int:
        """Bytes of the whole page."""
        return sum(piece.nbytes for piece in self.pieces)


def chain_notes(
    keys: Sequence[BlockKey], before: Sequence[BlockKey], *, tokens: int, tenant: str
) -> list[PutNotes]:
    """Say what is known of pages that follow one another.

    Args:
        keys: their names.
        before: names of the pages before them, as far as they are known.
        tokens: of one page.
        tenant: whose.
    """
    parents = [before[-1] if before else ROOT_PARENT, *keys]
    return [
        PutNotes(parent=parent, tokens=tokens, tenant=tenant, depth=len(before) + i)
        for i, parent in enumerate(parents[: len(keys)])
    ]


def store(pool: Pool, pages: Sequence[Page], notes: Sequence[PutNotes]) -> list[bool]:
    """Put pages; which of them are in the pool now."""
    if all(len(page.pieces) == 1 for page in pages):
        return pool.put_many([(page.key, page.pieces[0]) for page in pages], notes=notes)
    sizes = [(page.key, page.size, page.pieces[0].nbytes) for page in pages]
    puts = pool.open_puts(sizes, notes=notes)
    opened = [(put, page) for put, page in zip(puts, pages, strict=True) if put is not None]
    try:
        pool.write_ranges(
            [(put, i, piece) for put, page in opened for i, piece in enumerate(page.pieces)]
        )
        sealed = pool.seal_puts([put for put, _ in opened])
    finally:
        pool.abort_puts([put for put, _ in opened])  # Those that are sealed have ended.
    stored = {page.key for (_, page), done in zip(opened, sealed, strict=True) if done}
    others = [page.key for put, page in zip(puts, pages, strict=True) if put is None]
    stored.update(_there(pool, others))
    return [page.key in stored for page in pages]


def load(pool: Pool, pages: Sequence[Page]) -> list[bool]:
    """Read pages into their places; of those that are False the memory may hold garbage."""
    reads = [(page.key, i, piece) for page in pages for i, piece in enumerate(page.pieces)]
    numbers = [number for number, page in enumerate(pages) for _ in page.pieces]
    done = pool.get_ranges_into(reads)
    whole = {
        number: all(got for _, got in group)
        for number, group in groupby(zip(numbers, done, strict=True), key=lambda pair: pair[0])
    }
    return [whole.get(number, False) for number in range(len(pages))]


def _there(pool: Pool, keys: Sequence[BlockKey]) -> set[BlockKey]:
    """Return those that somebody had stored before."""
    if not keys:
        return set()
    return {key for key, is_there in zip(keys, pool.exists_many(keys), strict=True) if is_there}
