"""Tiny random models of the supported families, and how to run them page by page."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from tests.fix_pool import MemoryPoolNode
from tierkv.commands.calibrate import measure_prompts, tables_from
from tierkv.compute.codec.entropy import save_calibration
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.loading import load_model
from tierkv.compute.node import ComputeNode
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, new_request_id
from tierkv.kvcore.request import GenerateEvent, GenerateRequest, SamplingParams
from tierkv.metaserver.client import MetaClient
from tierkv.storage.block_store import BlockStore
from tierkv.storage.modelfiles.model_folder import CALIBRATION_NAME

DEVICE = os.environ.get("KV_TEST_DEVICE", "cpu")
"""Device of all nodes without an explicit device: ``make test-gpu`` runs the numeric tests on CUDA.
"""

FAMILY_EXTRAS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "head_dim": 24,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24},
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a model with three layers and grouped query heads."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return sizes | FAMILY_EXTRAS[family] | changes


def node_config(**changes: Any) -> ComputeConfig:
    """Return settings of a tiny node with 8-token blocks and a random Llama."""
    settings: dict[str, Any] = {
        "node_id": NodeId("c1"),
        "host": HostId("here"),
        "random_model": RandomModelSpec(tiny_config(), seed=3),
        "model_name": "tiny",
        "block_tokens": 8,
        "l1_pages": 65,
        "max_batch_tokens": 64,
        "max_running": 16,
        "load_policy": LoadPolicy.ALWAYS,
        "load_threads": 2,
        "threads": 1,
        "device": DEVICE,
        "dtype": "float32",  # On CUDA ``auto`` is bfloat16, which is not exact.
    }
    return ComputeConfig(**(settings | changes))


@asynccontextmanager
async def running_node(
    *pool_nodes: PoolNode,
    meta: MetaClient | None = None,
    archive: BlockStore | None = None,
    **changes: Any,
) -> AsyncIterator[ComputeNode]:
    """Start a node; at the end check its books, unless the test stopped it, and stop it."""
    node = ComputeNode(
        node_config(**changes), incarnation=Incarnation(1), meta=meta, archive=archive
    )
    node.set_pool_nodes(pool_nodes)
    for pool_node in pool_nodes:
        if isinstance(pool_node, MemoryPoolNode):
            pool_node.stats()  # Starts it: the first lookup would seem slow, and the next be saved.
    await node.start()
    try:
        yield node
        if node.is_running:
            await node.check_invariants()
    finally:
        await node.stop()


def layerwise_node(*pool_nodes: PoolNode, **more: Any) -> AbstractAsyncContextManager[ComputeNode]:
    """Start a node that reads layer by layer, however small they are: tests look in between."""
    return running_node(*pool_nodes, load_read_bytes=0, **more)


def write_calibration(folder: Path, *, seed: int = 1) -> str:
    """Calibrate the tiny model on random tokens; returns the file."""
    loaded = load_model(node_config())
    random = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 128, (64,), generator=random).tolist() for _ in range(8)]
    tables = tables_from(measure_prompts(loaded.decoder, prompts))
    file = folder / CALIBRATION_NAME
    save_calibration(tables, file, revision=loaded.info.revision)
    return str(file)


def make_request(token_ids: Sequence[int], **changes: Any) -> GenerateRequest:
    """Return a greedy request for 12 tokens that ignores eos."""
    sampling = {"max_tokens": 12, "ignore_eos": True} | changes.pop("sampling", {})
    fields: dict[str, Any] = {
        "request_id": new_request_id(),
        "model": "tiny",
        "token_ids": tuple(token_ids),
        "namespace_key": NamespaceKey(b"n" * 32),
        "sampling": SamplingParams(**sampling),
    }
    return GenerateRequest(**(fields | changes))


async def answer(node: ComputeNode, request: GenerateRequest) -> tuple[list[int], GenerateEvent]:
    """Run a request to its end; returns all tokens and the last event."""
    tokens: list[int] = []
    event = GenerateEvent()
    async for event in node.generate(request):
        tokens.extend(event.token_ids)
    return tokens, event
