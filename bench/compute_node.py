"""Shared by the compute benchmarks: a model of more than 100 M parameters and a timed request.

Used by bench.compute and its parts.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, new_request_id
from tierkv.kvcore.request import Blend, GenerateRequest, SamplingParams, Usage

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
NAMESPACE = NamespaceKey(bytes(range(32)))
HERE, THERE = HostId("here"), HostId("there")
BLOCK_TOKENS = 64
_KV_BYTES_PER_TOKEN = 12 * 2 * 4 * 64 * 4


@dataclass(frozen=True, slots=True)
class Timed:
    """A greedy answer and its timing.

    Attributes:
        tokens: all tokens of the answer.
        ttft_s: seconds from the request to the first token.
        decode_s: seconds from the first to the last token.
        usage: the usage reported by the node.
    """

    tokens: tuple[int, ...]
    ttft_s: float
    decode_s: float
    usage: Usage


def make_node(l1_tokens: int, **changes: Any) -> ComputeNode:
    """Return a node with pages for ``l1_tokens`` tokens that loads all KV found in the pool."""
    settings: dict[str, Any] = {
        "random_model": None if "model_folder" in changes else RandomModelSpec(MODEL, seed=1),
        "l1_bytes": l1_tokens * _KV_BYTES_PER_TOKEN,
        "block_tokens": BLOCK_TOKENS,
        "load_policy": LoadPolicy.ALWAYS,
        "load_timeout_s": 300.0,
    }
    config = ComputeConfig(NodeId("compute"), HERE, **(settings | changes))
    return ComputeNode(config, incarnation=Incarnation(1))


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Return token ids of the model."""
    return [rng.randrange(10, MODEL["vocab_size"]) for _ in range(count)]


async def ask(
    node: ComputeNode,
    prompt: list[int],
    new_tokens: int,
    *,
    use_cache: bool = True,
    blend: Blend | None = None,
) -> Timed:
    """Answer a prompt with exactly ``new_tokens`` tokens."""
    request = GenerateRequest(
        new_request_id(), "model", tuple(prompt), NAMESPACE,
        sampling=SamplingParams(max_tokens=new_tokens, ignore_eos=True),
        use_cache=use_cache, blend=blend,
    )  # fmt: skip
    started, first = time.perf_counter(), 0.0
    tokens: list[int] = []
    usage: Usage | None = None
    async for event in node.generate(request):
        if event.token_ids and not first:
            first = time.perf_counter()
        tokens += event.token_ids
        usage = event.usage or usage
    assert usage is not None
    return Timed(tuple(tokens), first - started, time.perf_counter() - first, usage)
