"""Attention that reads a shared beginning once gives what reading it for each row gives.

float32: the two sum in another order, so the last digits may differ.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.compute.model.attention import PagedAttention
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.pages import L1Pages
from tierkv.kvcore.layout import BlockLayout, KvDtype

torch.set_num_threads(1)
BLOCK, PAGES, HEAD_DIM = 4, 40, 16
CPU = torch.device("cpu")


def pages_of(kv_heads: int, dtype: KvDtype) -> L1Pages:
    pages = L1Pages(BlockLayout(1, kv_heads, HEAD_DIM, dtype, BLOCK), PAGES, device=CPU)
    pages.kv.normal_(generator=torch.Generator().manual_seed(4))
    return pages


def attend(pages: L1Pages, chunks: list[ChunkInput], heads: int, least: int):
    """Return attention by chunk, and how many keys are read."""
    batch = build_batch(chunks, block_tokens=BLOCK, device=CPU, least_saved_tokens=least)
    starts = [c.start for c in chunks]
    query = torch.Generator().manual_seed(9)
    by_place = {
        (i, p): torch.randn(heads, HEAD_DIM, generator=query, dtype=torch.float32)
        for i, c in enumerate(chunks)
        for p in range(starts[i], starts[i] + len(c.token_ids))
    }
    owners = list(zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True))
    q = torch.stack([by_place[owner] for owner in owners]).to(pages.kv.dtype)
    out = PagedAttention(pages).attend(0, batch.attention, q)
    read = sum(
        len(g.gather) + (0 if g.shared is None else len(g.shared)) for g in batch.attention.groups
    )
    return dict(zip(owners, out, strict=True)), read


def chunk(number: int, pages: list[int], start: int, queries: int) -> ChunkInput:
    """A chunk whose token ids tell whose it is."""
    ids = np.full(queries, number, dtype=np.int64)
    return ChunkInput(ids, start, np.array(pages, dtype=np.int64), queries)


def same(pages: L1Pages, chunks: list[ChunkInput], heads: int) -> tuple[int, int]:
    plain, many = attend(pages, chunks, heads, 1 << 40)
    cascade, few = attend(pages, chunks, heads, 1)
    tolerance = 2e-5 if pages.kv.dtype is torch.float32 else 2e-2
    for owner, want in plain.items():
        torch.testing.assert_close(cascade[owner], want, rtol=tolerance, atol=tolerance)
    return many, few


@pytest.mark.parametrize("dtype", [KvDtype.FLOAT32, KvDtype.BFLOAT16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_shared_beginning_is_read_once(heads, kv_heads, queries, dtype) -> None:
    head = [1, 2, 3, 4, 5]
    chunks = [chunk(i, [*head, 10 + 3 * i, 11 + 3 * i], 20 + i, queries) for i in range(5)]
    many, few = same(pages_of(kv_heads, dtype), chunks, heads)
    assert few < many / 2


def test_what_ends_on_a_page_border_has_a_rest() -> None:
    chunks = [chunk(i, [1, 2, 10 + i], 8, 1) for i in range(4)]
    many, few = same(pages_of(2, KvDtype.FLOAT32), chunks, 4)
    assert few < many


ROW = st.tuples(st.sampled_from([[1, 2, 3, 4], [1, 2, 5, 6], [7, 8]]), st.integers(0, 4),
                st.integers(0, 30), st.sampled_from([1, 1, 2, 5]))  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=st.lists(ROW, min_size=1, max_size=9))
def test_random_page_tables(rows) -> None:
    chunks = []
    for number, (head, kept, start, queries) in enumerate(rows):
        kept = min(kept, len(head), start // BLOCK)
        own = range(9 + 3 * number, 40)
        needed = -(-(start + queries) // BLOCK)
        table = [*head[:kept], *own][:needed]
        chunks.append(chunk(number, table, start, queries))
    many, few = same(pages_of(2, KvDtype.FLOAT32), chunks, 4)
    assert few <= many
