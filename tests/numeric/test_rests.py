"""Short rests attended to together give what each of them gives alone.

The two sum in another order, so the last digits may differ; with float32 and bfloat16.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_logits import CASES, Pair, close
from tierkv.compute.model.attention import PagedAttention
from tierkv.compute.model.attention_plan import AttentionPlan
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.model.row_groups import LONGEST_REST
from tierkv.kvcore.layout import BlockLayout, KvDtype

torch.set_num_threads(1)
BLOCK, PAGES, HEAD_DIM = 8, 160, 16
CPU = torch.device("cpu")


def pages_of(kv_heads: int, dtype: KvDtype) -> L1Pages:
    pages = L1Pages(BlockLayout(1, kv_heads, HEAD_DIM, dtype, BLOCK), PAGES, device=CPU)
    pages.kv.normal_(generator=torch.Generator().manual_seed(4))
    return pages


def rest(number: int, pages: list[int], start: int, count: int, wanted: int = 1) -> ChunkInput:
    """A chunk whose token ids tell whose it is."""
    return ChunkInput(np.full(count, number), start, np.array(pages), wanted)


def queries_of(chunks: list[ChunkInput], heads: int) -> dict[tuple[int, int], torch.Tensor]:
    drawn = torch.Generator().manual_seed(9)
    return {
        (int(c.token_ids[0]), c.start + at): torch.randn(heads, HEAD_DIM, generator=drawn)
        for c in chunks
        for at in range(len(c.token_ids))
    }


def attend(pages: L1Pages, chunks: list[ChunkInput], queries, least: int):
    """Return attention by token, and the plan."""
    batch = build_batch(chunks, block_tokens=BLOCK, device=CPU, least_saved_tokens=least)
    owners = list(zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True))
    q = torch.stack([queries[owner] for owner in owners]).to(pages.kv.dtype)
    out = PagedAttention(pages).attend(0, batch.attention, q)
    return dict(zip(owners, out, strict=True)), batch.attention


def same(pages: L1Pages, chunks: list[ChunkInput], heads: int, least: int = 1) -> AttentionPlan:
    """Compare a step of all chunks with a step for each; return the plan of the former."""
    queries = queries_of(chunks, heads)
    together, plan = attend(pages, chunks, queries, least)
    assert len(together) == len(queries)
    tolerance = 2e-5 if pages.kv.dtype is torch.float32 else 3e-2
    for chunk in chunks:
        alone, _ = attend(pages, [chunk], queries, 1 << 40)
        for owner, want in alone.items():
            torch.testing.assert_close(together[owner], want, rtol=tolerance, atol=tolerance)
    return plan


def calls(plan: AttentionPlan) -> int:
    return sum(len(group.tiles) for group in plan.rests) + len(plan.segments)


@pytest.mark.parametrize("dtype", [KvDtype.FLOAT32, KvDtype.BFLOAT16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_rests_behind_one_beginning_share_its_read_and_their_calls(heads, kv_heads, dtype) -> None:
    head = [1, 2, 3, 4, 5]
    counts = [2, 3, 7, 8, 9, 12]
    chunks = [
        rest(i, [*head, *range(10 + 5 * i, 15 + 5 * i)], 44 + i % 3, count)
        for i, count in enumerate(counts)
    ]
    plan = same(pages_of(kv_heads, dtype), chunks, heads)
    assert calls(plan) == 1
    assert plan.rests[0].shared is not None


@pytest.mark.parametrize("start", [0, 5, 8, 40])
def test_like_rests_behind_own_beginnings_take_one_call(start) -> None:
    chunks = [rest(i, list(range(1 + 7 * i, 8 + 7 * i)), start, 11) for i in range(6)]
    plan = same(pages_of(2, KvDtype.FLOAT32), chunks, 4, least=1 << 40)
    assert calls(plan) == 1
    assert plan.rests[0].tiles[0].slots is None


def test_a_rest_right_behind_the_shared_pages_has_only_itself_left() -> None:
    chunks = [rest(i, [1, 2, 10 + 3 * i, 11 + 3 * i], 16, 3 + i) for i in range(4)]
    chunks.append(rest(9, [1, 2, 40, 41, 42], 30, 4))
    plan = same(pages_of(2, KvDtype.FLOAT32), chunks, 4)
    assert len(plan.rests[0].shared) == 4


def test_one_rest_and_long_ones_stay_alone() -> None:
    chunks = [
        rest(0, list(range(1, 20)), 8, LONGEST_REST),
        rest(1, list(range(20, 40)), 0, LONGEST_REST + 1),
    ]
    plan = same(pages_of(2, KvDtype.FLOAT32), chunks, 4)
    assert (len(plan.rests), len(plan.segments)) == (0, 2)


def test_a_rest_far_behind_the_shared_pages_has_a_call_of_its_own() -> None:
    chunks = [rest(i, [1, 2, 3 + 3 * i, 4 + 3 * i, 5 + 3 * i], 18 + i, 9) for i in range(4)]
    chunks.append(rest(9, [1, 2, *range(20, 100)], 530, 64))
    plan = same(pages_of(2, KvDtype.FLOAT32), chunks, 4)
    assert (calls(plan), [s.start for s in plan.segments]) == (2, [530])


def test_what_pages_two_rests_share_they_both_read() -> None:
    table = list(range(1, 9))
    chunks = [rest(0, table, 40, 6), rest(1, [*table[:4], 20, 21], 37, 6), rest(2, table, 9, 6)]
    same(pages_of(2, KvDtype.FLOAT32), chunks, 4)


TABLES = st.tuples(
    st.sampled_from([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9], [10, 11]]),
    st.integers(0, 6),
    st.integers(0, 70),
    st.sampled_from([1, 1, 2, 3, 5, 8, 9, 30, 64, 65]),
    st.booleans(),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(rows=st.lists(TABLES, min_size=1, max_size=10), least=st.sampled_from([1, 16, 1 << 40]))
def test_random_lengths_pages_and_shared_beginnings(rows, least) -> None:
    chunks = []
    for number, (head, kept, start, count, guesses) in enumerate(rows):
        kept = min(kept, len(head), start // BLOCK)
        own = range(12 + 3 * number, PAGES)
        table = [*head[:kept], *own][: -(-(start + count) // BLOCK)]
        wanted = count if guesses and count < 6 else 1
        chunks.append(rest(number, table, start, count, wanted))
    same(pages_of(2, KvDtype.FLOAT32), chunks, 4, least)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-tied", "qwen3"])
def test_a_step_of_rests_gives_the_logits_of_transformers(family, tmp_path) -> None:
    pair = Pair(CASES[family], tmp_path, pages=129)
    rng = random.Random(5)
    head = rng.choices(range(128), k=72)
    prompts = [head + rng.choices(range(128), k=8 + rng.randrange(30)) for _ in range(10)]
    shared = list(range(1, 10))
    tables = [np.array([*shared, *range(10 + 6 * i, 16 + 6 * i)]) for i in range(10)]
    pair.step([(head, 0, 72, tables[0])])
    starts = [72 + (i % 2) * 5 for i in range(10)]
    pair.step([(p, 72, 5, t) for p, t, s in zip(prompts, tables, starts, strict=True) if s > 72])
    got = pair.step(
        [(p, s, len(p) - s, t) for p, t, s in zip(prompts, tables, starts, strict=True)]
    )
    for i, prompt in enumerate(prompts):
        close(got[i], pair.reference(prompt)[-1])
