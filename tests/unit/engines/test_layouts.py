"""The layout of another engine's blocks, from config.json alone."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.integrations.layouts import config_layout, opaque_layout
from tierkv.kvcore.layout import BlockLayout, KvDtype

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "dtype": "bfloat16",
}


def layout(config: dict[str, Any], dtype: str = "", block_tokens: int = 32) -> BlockLayout | None:
    return config_layout(config, block_tokens=block_tokens, dtype=dtype, order="o-1")


def test_a_plain_model_has_its_configurations_layout() -> None:
    want = BlockLayout(6, 2, 16, KvDtype.BFLOAT16, 32, order="o-1")
    assert layout(LLAMA) == layout(LLAMA, "auto") == layout({"text_config": LLAMA}) == want
    assert layout(LLAMA | {"head_dim": 24}) == BlockLayout(
        6, 2, 24, KvDtype.BFLOAT16, 32, order="o-1"
    )
    assert layout(LLAMA, "float32") == BlockLayout(6, 2, 16, KvDtype.FLOAT32, 32, order="o-1")
    old = {k: v for k, v in LLAMA.items() if k != "dtype"} | {"torch_dtype": "float16"}
    assert layout(old) == BlockLayout(6, 2, 16, KvDtype.FLOAT16, 32, order="o-1")


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lora_rank": 512},
        {"dtype": None},
        {"dtype": "fp8"},
        {"num_hidden_layers": 0},
        {"num_attention_heads": "many"},
    ],
)
def test_anything_else_has_none(change: dict[str, Any]) -> None:
    assert layout(LLAMA | change) is None


def test_opaque_layouts_of_kinds_differ() -> None:
    assert opaque_layout("vllm", 16).block_tokens == 16
    assert opaque_layout("vllm").fingerprint() != opaque_layout("sglang").fingerprint()
