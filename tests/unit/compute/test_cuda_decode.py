"""A decode step in fixed, padded buffers gives what the step itself gives."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from tests.fix_logits import BLOCK, CASES, Pair, close
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.cuda_decode import (
    StaticDecode,
    Trial,
    attach_decode_graphs,
    rounded_up,
)
from tierkv.compute.model.pages import NULL_PAGE

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


def test_a_graph_may_differ_as_much_as_rounding_explains() -> None:
    assert Trial(graphed=1e-5, rounding=0.0).refusal(1e-4) == ""
    assert Trial(graphed=0.031, rounding=0.028).refusal(0.03) == ""
    assert "over 0.03" in Trial(graphed=0.031, rounding=0.001).refusal(0.03)
    assert "over 0.2" in Trial(graphed=0.3, rounding=0.3).refusal(0.03)
    assert "nan" in Trial(graphed=math.nan, rounding=0.0).refusal(0.03)
    assert "nan" in Trial(graphed=math.nan, rounding=math.nan).refusal(0.03)
    assert "does not fit" in Trial(graphed=None, rounding=0.0).refusal(0.03)


def test_pages_are_rounded_up_by_a_quarter_at_most() -> None:
    rounded = [rounded_up(pages) for pages in range(1, 5_000)]
    assert rounded[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 10]
    assert all(pages <= size for pages, size in enumerate(rounded, 1))
    assert all(size < 1.25 * pages for pages, size in enumerate(rounded, 1) if pages > 8)
    assert rounded == sorted(rounded) and len(set(rounded)) < 45
