"""Our decoder against transformers on tiny random models, in every chunking and mix."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import transformers

from compute.architecture import parse_architecture
from compute.batch import ChunkInput, build_batch
from compute.model import Decoder
from compute.pages import L1Pages
from compute.weights import load_weights
from kvcore.layout import BlockLayout, KvDtype
from storage.model_folder import inspect_model_folder
from tests.fix_model import tiny_config

torch.set_num_threads(1)
CPU = torch.device("cpu")
BLOCK = 8

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLD_LLAMA3 = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
CASES = {
    "llama": tiny_config("llama"),
    "llama-tied-bias": tiny_config(
        "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama3-rope": tiny_config("llama", rope_parameters=LLAMA3),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3"),
}


class Pair:
    """A transformers model and ours, from the same files."""

    def __init__(self, config, folder, shard="5GB") -> None:
        torch.manual_seed(0)
        kind = getattr(transformers, config["architectures"][0])
        fields = {k: v for k, v in config.items() if k != "architectures"}
        model = kind(kind.config_class(**fields)).eval()
        for parameter in model.parameters():  # Biases and norms that are not at their defaults.
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder, max_shard_size=shard)
        self.theirs = model
        saved = json.loads((folder / "config.json").read_text())
        self.arch = parse_architecture(saved)
        tensors = inspect_model_folder(folder).tensors
        weights = load_weights(self.arch, tensors, dtype=torch.float32, device=CPU)
        layout = BlockLayout(
            self.arch.layers, self.arch.kv_heads, self.arch.head_dim, KvDtype.FLOAT32, BLOCK
        )
        self.pages = L1Pages(layout, 64, device=CPU)
        self.ours = Decoder(self.arch, weights, self.pages)

    def reference(self, ids):
        with torch.inference_mode():
            return self.theirs(torch.tensor([ids])).logits[0]

    def step(self, chunks):
        """Run [(ids, start, count, table)] and return logits by chunk."""
        inputs = [
            ChunkInput(np.array(ids[start : start + count]), start, table, True)
            for ids, start, count, table in chunks
        ]
        batch = build_batch(inputs, block_tokens=BLOCK, device=CPU)
        with torch.inference_mode():
            logits = self.ours.forward(batch)
        return {chunk: logits[row] for row, chunk in enumerate(batch.logit_chunks)}


def close(ours, theirs) -> None:
    # float32; matrix products of other shapes round differently in the last digits.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


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
