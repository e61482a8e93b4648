"""The layout of another engine's blocks, from the model's config.json and the engine's answers.

Used where the engine's memory can't be seen: by the engine's node (integrations/remote). Code
inside an engine reads the layout off the engine's tensors, and both results must be equal. Where an
engine with TierKV's classes is in the cluster (NodeRole.ENGINE), the node takes over the engine's
report instead of this guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierkv.kvcore.layout import BlockLayout, KvDtype

VLLM_ORDER: Final = "vllm-untold"
"""For a vLLM without TierKV's classes: the order depends on release, backend and CPU."""

_OPAQUE_TOKENS: Final = 64


def config_layout(
    config: Mapping[str, Any], *, block_tokens: int, dtype: str, order: str
) -> BlockLayout | None:
    """Derive a layout from a model's configuration; None if the KV is not of the plain kind.

    Args:
        config: config.json; for a multimodal model the text part is used.
        block_tokens: tokens of the engine's blocks.
        dtype: element type of the engine's KV; empty or ``auto``: the model's own.
        order: name of the byte order within a layer.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    if config.get("kv_lora_rank"):  # The KV is one compressed vector per token.
        return None
    name = dtype if dtype not in ("", "auto") else config.get("dtype") or config.get("torch_dtype")
    try:
        heads = int(config["num_attention_heads"])
        return BlockLayout(
            layers=int(config["num_hidden_layers"]),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            dtype=KvDtype(str(name)),
            block_tokens=block_tokens,
            order=order,
        )
    except (KeyError, TypeError, ValueError):
        return None


def opaque_layout(kind: str, block_tokens: int = 0) -> BlockLayout:
    """Return a layout for an engine with unshared KV: only ``block_tokens`` has a meaning."""
    return BlockLayout(
        layers=1,
        kv_heads=1,
        head_dim=1,
        dtype=KvDtype.FLOAT32,
        block_tokens=block_tokens or _OPAQUE_TOKENS,
        order=f"{kind}-opaque",
    )
