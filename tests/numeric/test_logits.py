"""Our decoder against transformers on tiny random models, in every chunking and mix."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.fix_logits import CASES, LLAMA3, OLD_LLAMA3, Pair, close
from tests.fix_model import tiny_config
from tierkv.compute.model.architecture import parse_architecture
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.kvcore.layout import KvDtype

torch.set_num_threads(1)


@pytest.fixture(params=sorted(CASES))
def pair(request, tmp_path):
    return Pair(CASES[request.param], tmp_path)


def test_full_prefill_equals_transformers(pair) -> None:
    ids = random.Random(1).choices(range(128), k=61)
    table = np.arange(1, 9)
    close(pair.step([(ids, 0, 61, table)])[0], pair.reference(ids)[-1])


def test_any_chunking_and_mix_equals_transformers(pair) -> None:
    rng = random.Random(2)
    prompts = [rng.choices(range(128), k=n) for n in (50, 9, 33, 1)]
    free = list(range(1, 64))
    rng.shuffle(free)
    tables = [np.array([free.pop() for _ in range(8)]) for _ in prompts]
    done = [0] * len(prompts)
    want = [pair.reference(p) for p in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        chunks, owners = [], []
        for i, prompt in enumerate(prompts):
            left = len(prompt) - done[i]
            count = min(left, rng.choice([0, 1, 1, 5, 8, 17]))
            if count:
                chunks.append((prompt, done[i], count, tables[i]))
                owners.append((i, count))
        if not chunks:
            continue
        logits = pair.step(chunks)
        for c, (i, count) in enumerate(owners):
            done[i] += count
            close(logits[c], want[i][done[i] - 1])


def test_sharded_folder_and_old_style_rope(tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path, shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = list(range(40))
    close(pair.step([(ids, 0, 40, np.arange(1, 9))])[0], pair.reference(ids)[-1])
    old = tiny_config("llama", rope_theta=500_000.0, rope_scaling=OLD_LLAMA3)
    del old["rope_parameters"]
    assert (
        parse_architecture(old).rope
        == parse_architecture(tiny_config("llama", rope_parameters=LLAMA3)).rope
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_stays_as_near_to_float32_as_theirs(family, tmp_path) -> None:
    ids = random.Random(3).choices(range(128), k=61)
    table = np.arange(1, 9)
    (tmp_path / "exact").mkdir()
    exact = Pair(CASES[family], tmp_path / "exact").reference(ids)[-1]
    pair = Pair(CASES[family], tmp_path, dtype=KvDtype.BFLOAT16)
    pair.step([(ids, 0, 40, table)])
    ours, theirs = pair.step([(ids, 40, 21, table)])[0], pair.reference(ids)[-1]
    # bfloat16 has 8 bits of mantissa: both err, ours not more than theirs by much.
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-3 * exact.norm()
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * float(exact.abs().max()))


def test_logits_of_several_last_tokens_belong_to_their_chunk(tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path)
    ids = [random.Random(seed).choices(range(128), k=21) for seed in (1, 2, 3)]
    tables = [np.arange(1 + 3 * i, 4 + 3 * i) for i in range(3)]
    chunks = [
        ChunkInput(np.array(prompt), 0, table, wanted)
        for prompt, table, wanted in zip(ids, tables, (3, 0, 1), strict=True)
    ]
    batch = build_batch(chunks, block_tokens=8, device=torch.device("cpu"))
    with torch.inference_mode():
        logits = pair.ours.forward(batch)
    assert sorted(batch.logit_chunks) == [0, 0, 0, 2]
    rows = {i: [r for r, owner in enumerate(batch.logit_chunks) if owner == i] for i in (0, 2)}
    close(logits[rows[0]], pair.reference(ids[0])[-3:])
    close(logits[rows[2]], pair.reference(ids[2])[-1:])


@pytest.mark.parametrize("wanted", [(0, 0, 0), (1, 0, 2), (9, 1, 3), (9, 9, 9)])
def test_rows_without_outputs_leave_kv_behind_and_no_more(wanted, tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path)
    ids = [random.Random(seed).choices(range(128), k=21) for seed in (1, 2, 3)]
    tables = [np.arange(1 + 3 * i, 4 + 3 * i) for i in range(3)]
    first = [
        ChunkInput(np.array(prompt[:9]), 0, table, count)
        for prompt, table, count in zip(ids, tables, wanted, strict=True)
    ]
    batch = build_batch(first, block_tokens=8, device=torch.device("cpu"))
    assert (batch.last is None) == (wanted == (9, 9, 9))
    with torch.inference_mode():
        logits = pair.ours.forward(batch)
    assert len(logits) == sum(wanted)
    for i, prompt in enumerate(ids):
        rows = [row for row, owner in enumerate(batch.logit_chunks) if owner == i]
        close(logits[rows], pair.reference(prompt[:9])[9 - wanted[i] :])
    got = pair.step([(prompt, 9, 12, table) for prompt, table in zip(ids, tables, strict=True)])
    for i, prompt in enumerate(ids):
        close(got[i], pair.reference(prompt)[-1])


@pytest.mark.parametrize("start", [0, 17])
def test_wide_matrices_and_long_prefixes_give_the_logits_of_transformers(start, tmp_path) -> None:
    wide = {"hidden_size": 768, "intermediate_size": 1024, "vocab_size": 1024}
    pair = Pair(tiny_config("llama", tie_word_embeddings=True, **wide), tmp_path)
    ids = random.Random(4).choices(range(1024), k=150)
    table = np.arange(1, 20)
    if start:
        pair.step([(ids, 0, start, table)])
    close(pair.step([(ids, start, 149 - start, table)])[0], pair.reference(ids[:-1])[-1])
    close(pair.step([(ids, 149, 1, table)])[0], pair.reference(ids)[-1])
