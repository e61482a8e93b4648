"""A transformers model and ours from the same files, for comparing logits of each family."""

from __future__ import annotations

import json

import numpy as np
import torch
import transformers

from tests.fix_model import tiny_config
from tierkv.compute.codec.layer_codec import TORCH_DTYPES
from tierkv.compute.model.architecture import parse_architecture
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.model.weights import load_weights
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.storage.modelfiles.model_folder import inspect_model_folder

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
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
OLD_LLAMA3 = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
CASES = {
    "llama": tiny_config("llama"),
    "llama-tied-bias": tiny_config(
        "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama3-rope": tiny_config("llama", rope_parameters=LLAMA3),
    "linear-rope": tiny_config("llama", rope_parameters=LINEAR),
    "mistral": tiny_config("mistral"),
    "qwen2": tiny_config("qwen2"),
    "qwen2-tied": tiny_config("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen3": tiny_config("qwen3"),
    "qwen3-tied-bias": tiny_config("qwen3", tie_word_embeddings=True, attention_bias=True),
}


class Pair:
    """A transformers model and ours, from the same files."""

    def __init__(
        self, config, folder, shard="5GB", dtype=KvDtype.FLOAT32, pages=64, device=CPU
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        kind = getattr(transformers, config["architectures"][0])
        fields = {k: v for k, v in config.items() if k != "architectures"}
        model = kind(kind.config_class(**fields)).eval()
        for parameter in model.parameters():  # Biases and norms that are not at their defaults.
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder, max_shard_size=shard)
        self.theirs = model.to(TORCH_DTYPES[dtype])
        saved = json.loads((folder / "config.json").read_text())
        self.arch = parse_architecture(saved)
        tensors = inspect_model_folder(folder).tensors
        weights = load_weights(self.arch, tensors, dtype=TORCH_DTYPES[dtype], device=device)
        layout = BlockLayout(self.arch.layers, self.arch.kv_heads, self.arch.head_dim, dtype, BLOCK)
        self.pages = L1Pages(layout, pages, device=device)
        self.ours = Decoder(self.arch, weights, self.pages)

    def reference(self, ids):
        with torch.inference_mode():
            return self.theirs(torch.tensor([ids])).logits[0].float()

    def step(self, chunks):
        """Run [(ids, start, count, table)] and return logits by chunk."""
        inputs = [
            ChunkInput(np.array(ids[start : start + count]), start, table, True)
            for ids, start, count, table in chunks
        ]
        batch = build_batch(inputs, block_tokens=BLOCK, device=self.device)
        with torch.inference_mode():
            logits = self.ours.forward(batch).cpu()
        return {chunk: logits[row] for row, chunk in enumerate(batch.logit_chunks)}


def close(ours, theirs) -> None:
    # float32; matrix products of other shapes, and on other processors, round differently in the
    # last digits. A small logit is a sum of large terms: its error grows with the largest logit.
    most = max([1.0, *theirs.abs().flatten().tolist()])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * most)
