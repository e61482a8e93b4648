"""A decode step in fixed, padded buffers gives what the step itself gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.fix_logits import BLOCK, CASES, Pair, close
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.cuda_decode import StaticDecode, attach_decode_graphs
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
