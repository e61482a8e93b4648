"""Logits on a device equal transformers' on the CPU, in any chunking and batch mix."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.fix_logits import BLOCK, CASES, Pair, close
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.cuda_decode import DecodeGraphs, attach_decode_graphs
from tierkv.kvcore.layout import KvDtype

torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["llama3-rope", "qwen2-tied", "qwen3"])
def test_any_mix_gives_the_logits_of_transformers(family, device, tmp_path) -> None:
    pair = Pair(CASES[family], tmp_path, pages=65, device=torch.device(device))
    if device == "cuda":
        assert attach_decode_graphs(pair.ours) == ""
    rng = random.Random(5)
    prompts = [rng.choices(range(128), k=k) for k in (3, 17, 40, 64)]
    tables = [np.arange(1 + 16 * i, 9 + 16 * i) for i in range(4)]
    want = [pair.reference(prompt) for prompt in prompts]
    done = [0] * 4
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        some = [i for i in range(4) if done[i] < len(prompts[i]) and rng.random() < 0.8]
        ones = rng.random() < 0.5  # Steps of decodes only, so that graphs are used.
        counts = [
            min(1 if ones else rng.choice([1, 5, 9]), len(prompts[i]) - done[i]) for i in some
        ]
        if not some:
            continue
        chunks = [(prompts[i], done[i], n, tables[i]) for i, n in zip(some, counts, strict=True)]
        logits = pair.step(chunks)
        for row, (i, count) in enumerate(zip(some, counts, strict=True)):
            done[i] += count
            close(logits[row], want[i][done[i] - 1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [KvDtype.FLOAT32, KvDtype.BFLOAT16])
def test_graphs_give_the_plain_pass(dtype, cuda, tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path, dtype=dtype, device=cuda)
    graphs = DecodeGraphs(pair.ours)
    rng = random.Random(2)
    for sequences in (1, 3, 4, 1, 3):
        chunks = [
            ChunkInput(
                np.array([rng.randrange(128)]), rng.randrange(60), np.arange(1, 9) + 8 * i, 1
            )
            for i in range(sequences)
        ]
        step = build_batch(chunks, block_tokens=BLOCK, device=cuda)
        with torch.inference_mode():
            graphed, plain = graphs.run(step), pair.ours.compute_plainly(step).logits
        assert graphed is not None and graphs.refusal == ""
        limit = 1e-4 if dtype is KvDtype.FLOAT32 else 3e-2
        assert float((graphed.logits - plain).abs().max() / plain.abs().max()) <= limit


@pytest.mark.gpu
def test_a_step_with_a_prefill_is_not_for_a_graph(cuda, tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path, device=cuda)
    chunk = ChunkInput(np.array([1, 2]), 0, np.arange(1, 9), 1)
    step = build_batch([chunk], block_tokens=BLOCK, device=cuda)
    assert DecodeGraphs(pair.ours).run(step) is None
