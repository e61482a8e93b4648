"""A decode step in fixed, padded buffers gives what the step itself gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.fix_logits import BLOCK, CASES, Pair, close
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.cuda_decode import (
    StaticDecode,
    attach_decode_graphs,
    rounded_up,
    tolerated,
)
from tierkv.compute.model.pages import NULL_PAGE
from tierkv.kvcore.layout import KvDtype

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("starts", [(5,), (3, 30, 8), (8, 15, 16, 17, 40)])
def test_padding_changes_no_logits_and_no_other_page(starts, tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path)
    rng = random.Random(1)
    tables = [np.arange(1 + 7 * i, 8 + 7 * i) for i in range(len(starts))]
    prompts = [rng.choices(range(128), k=start + 1) for start in starts]
    for prompt, table in zip(prompts, tables, strict=True):
        pair.step([(prompt, 0, len(prompt) - 1, table)])
    chunks = [
        ChunkInput(np.array(prompt[-1:]), len(prompt) - 1, table, 1)
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    step = build_batch(chunks, block_tokens=BLOCK, device=CPU)
    static = StaticDecode(8, 16, block_tokens=BLOCK, device=CPU)
    before = pair.pages.kv.clone()
    with torch.inference_mode():
        static.fill(step)
        padded = pair.ours.compute_plainly(static.batch).logits[step.logit_rows]
        after = pair.pages.kv.clone()
        pair.pages.kv.copy_(before)
        plain = pair.ours.forward(step)
    close(padded, plain)
    torch.testing.assert_close(after, pair.pages.kv, rtol=1e-4, atol=2e-5)
    assert not after[:, NULL_PAGE].any()
    for row, chunk in enumerate(step.logit_chunks):
        close(padded[row], pair.reference(prompts[chunk])[-1])


def test_there_are_no_graphs_without_cuda(tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path)
    assert attach_decode_graphs(pair.ours) == "not on CUDA" and pair.ours.graphs is None


@pytest.mark.parametrize("layers", [3, 24])
def test_rounding_is_tolerated_and_a_wrong_mask_is_not(layers, tmp_path) -> None:
    config = CASES["llama"] | {"num_hidden_layers": layers}
    pair = Pair(config, tmp_path, dtype=KvDtype.BFLOAT16)
    pair.pages.kv[:, 1:].normal_(generator=torch.Generator().manual_seed(1))
    table = np.arange(1, 7)
    chunks = [ChunkInput(np.array([start]), start, table, 1) for start in (1, 8, 47)]
    step = build_batch(chunks, block_tokens=BLOCK, device=CPU)
    static = StaticDecode(4, 8, block_tokens=BLOCK, device=CPU)
    limit = tolerated(torch.bfloat16, layers)
    with torch.inference_mode():
        plain = pair.ours.compute_plainly(step).logits
        static.fill(step)
        assert _apart(plain, pair.ours.compute_plainly(static.batch).logits[:3]) <= limit
        mask = static.batch.attention.groups[0].mask
        assert mask is not None
        mask[..., 1:] = mask[..., :-1].clone()  # Every row sees one key more.
        assert _apart(plain, pair.ours.compute_plainly(static.batch).logits[:3]) > 2 * limit


def _apart(logits: torch.Tensor, others: torch.Tensor) -> float:
    return float((logits - others).abs().max() / logits.abs().max())


def test_pages_are_rounded_up_by_a_quarter_at_most() -> None:
    rounded = [rounded_up(pages) for pages in range(1, 5_000)]
    assert rounded[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 10]
    assert all(pages <= size for pages, size in enumerate(rounded, 1))
    assert all(size < 1.25 * pages for pages, size in enumerate(rounded, 1) if pages > 8)
    assert rounded == sorted(rounded) and len(set(rounded)) < 45
