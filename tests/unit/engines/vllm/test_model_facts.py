"""What makes KV another one, and whose KV can't be shared."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tierkv.integrations.vllm.kv_memory import open_memory
from tierkv.integrations.vllm.model_facts import (
    WorkerFacts,
    engine_identity,
    kv_facts,
    order_name,
    same_layout,
    why_unsupported,
    worker_facts,
)
from tierkv.kvcore import limits
from tierkv.kvcore.layout import BlockLayout, KvDtype

BLOCKS, HEADS, TOKENS, CHANNELS = 4, 2, 8, 16
NAMES = ["layers.0", "layers.1"]


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = TOKENS
    num_kv_heads: int = HEADS
    head_size: int = CHANNELS
    head_size_v: int = CHANNELS
    dtype: str = "torch.float32"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    pass


def config(**changes: Any) -> Any:
    """What is read of vLLM's configuration."""
    model = {
        "model": "/nowhere", "revision": "a" * 40, "quantization": None, "hf_overrides": {},
        "max_model_len": 100, "hf_config_path": None, "quantization_config": None,
        "dtype": "torch.float32", "hf_config": SimpleNamespace(architectures=["Llama"]),
    }  # fmt: skip
    layer = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa=changes.get("isa", "vec")
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **model | {k: v for k, v in changes.items() if k in model},
            get_num_layers=lambda parallel: 2,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=changes.get("pp", 1),
            use_ubatching=changes.get("ubatching", False),
        ),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        speculative_config=changes.get("speculative"),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, layer)),
    )


def plan(*specs: Any, layers: int = 2) -> Any:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{i}" for i in range(layers)])
        for spec in specs or (FullAttentionSpec(),)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def memory(content: int = 2 * CHANNELS) -> Any:
    tensors = {name: torch.zeros(BLOCKS, HEADS, TOKENS, content) for name in NAMES}
    return open_memory(tensors, blocks=BLOCKS, block_tokens=TOKENS)


def facts(given: Any, kept: Any = None) -> WorkerFacts:
    return worker_facts(given, plan(), kept or memory(), version="0.32.1", processor="x86_64-AVX2")


def test_a_plain_model_is_shared_by_its_layout() -> None:
    assert why_unsupported(config(), plan()) is None
    order = "vllm-0.32-hnc-cpu_attn-vec-x86_64-avx2"
    layout = BlockLayout(2, HEADS, CHANNELS, KvDtype.FLOAT32, TOKENS, order=order)
    assert facts(config()) == WorkerFacts(layout)
    identity = engine_identity(config(), layout, version="0.32.1", rank=0, revision=None)
    assert identity.revision == "/nowhere@" + "a" * 40
    assert identity.fingerprint() == layout.fingerprint()


@pytest.mark.parametrize(
    ("changes", "specs", "why"),
    [
        ({"load_format": "dummy"}, (), "made up"),
        ({"pp": 2}, (), "pipeline"),
        ({"ubatching": True}, (), "microbatches"),
        ({"cache_dtype": "fp8"}, (), "fp8"),
        ({}, (FullAttentionSpec(), FullAttentionSpec()), "2 groups"),
        ({}, (MLAAttentionSpec(),), "MLAAttentionSpec"),
        ({}, (FullAttentionSpec(sliding_window=5),), "window"),
        ({}, (FullAttentionSpec(attention_chunk_size=5),), "window"),
        ({}, (FullAttentionSpec(head_size_v=8),), "values of 8 channels"),
        ({}, (FullAttentionSpec(dtype="torch.uint8"),), "uint8"),
    ],
)
def test_what_is_not_supported_is_said(
    changes: dict[str, Any], specs: tuple[Any, ...], why: str
) -> None:
    assert why in (why_unsupported(config(**changes), plan(*specs)) or "")


def test_a_draft_model_with_layers_of_its_own_is_not_supported() -> None:
    assert "draft" in (why_unsupported(config(speculative=1), plan(layers=3)) or "")
    assert why_unsupported(config(speculative=1), plan()) is None


def test_who_packs_otherwise_has_another_order() -> None:
    names = {
        order_name(given, memory(), version=version, processor=processor)
        for given, version, processor in (
            (config(), "0.32.0", "x86_64-AVX2"),
            (config(), "0.33.0", "x86_64-AVX2"),
            (config(), "0.32.0", "x86_64-AVX512"),
            (config(isa="amx"), "0.32.0", "x86_64-AVX512"),
            (config(isa=""), "0.32.0", "x86_64-AVX512"),
        )
    }
    assert len(names) == 5
    # Where a GPU computes, the host's processor does not matter.
    assert "vllm-0.32-hnc-cpu_attn" in names


def test_long_names_differ_and_fit() -> None:
    given = [config(isa="x" * 90 + end) for end in "ab"]
    long = [order_name(one, memory(), version="1", processor="") for one in given]
    assert len(set(long)) == 2
    assert {len(name) for name in long} == {limits.MAX_LAYOUT_ORDER_CHARS}


def test_what_gives_the_same_weights_another_kv_is_named() -> None:
    assert kv_facts(config().model_config) == ()
    changed = config(quantization="fp8", hf_overrides={"rope_theta": 5}).model_config
    assert kv_facts(changed) == (
        ("weights quantised", "fp8"), ("overrides", "{'rope_theta': 5}"),
    )  # fmt: skip
    rope = SimpleNamespace(rope_scaling={"rope_type": "longrope"}, architectures=[])
    assert kv_facts(config(hf_config=rope).model_config) == (("longest prompt", "100"),)
    elsewhere = config(hf_config_path="/other", quantization_config={"bits": 4}).model_config
    assert kv_facts(elsewhere) == (
        ("quantisation", "{'bits': 4}"), ("configuration", "/other"),
    )  # fmt: skip


def test_kv_kept_in_another_type_than_it_was_computed_in_is_another() -> None:
    layout = facts(config()).layout
    given = [config(dtype=dtype) for dtype in ("torch.float32", "torch.bfloat16")]
    made = [engine_identity(c, layout, version="0.32.1", rank=0, revision=None) for c in given]
    assert [identity.facts for identity in made] == [(), (("computed in", "bfloat16"),)]
    assert made[0].fingerprint() != made[1].fingerprint()


def test_memory_that_is_not_keys_and_values_is_not_shared() -> None:
    odd = facts(config(), memory(content=CHANNELS))
    assert odd.layout is None and "not understood" in odd.reason


def test_workers_must_agree() -> None:
    good = facts(config())
    assert same_layout([good, good]) == good
    assert same_layout([good, WorkerFacts(None, "odd")]).reason == "odd"
    other = facts(config(isa="amx"))
    assert same_layout([good, other]).reason == "workers have KV of different layouts"
