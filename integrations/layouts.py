"""The layout of another engine's blocks, as far as a model's config.json and the engine tell.

Used where the engine's memory can't be seen: by the node that stands for it (integrations/remote).
What runs inside an engine reads the layout off its tensors, and both must come to the same result;
the node takes over what an engine of ours in the cluster says (NodeRole.ENGINE) rather than this
guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierkv.kvcore.layout import BlockLayout, KvDtype

VLLM_ORDER: Final = "vllm-untold"
"""For a vLLM that nobody of ours runs in: its order depends on release, backend and CPU."""

_OPAQUE_TOKENS: Final = 64


def config_layout(
    config: Mapping[str, Any], *, block_tokens: int, dtype: str, order: str
) -> BlockLayout | None:
    """Derive a layout from a model's configuration; None where its KV is none of the plain kind.

    Args:
        config: config.json; of a model of several kinds of input, its text part counts.
        block_tokens: tokens of the engine's blocks.
        dtype: element type of the engine's KV; empty or ``auto``: the model's own.
        order: name of the order of a layer's bytes.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    if config.get("kv_lora_rank"):  # Its KV is one compressed vector per token.
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
    """Return a layout for an engine whose KV nobody shares: only the length of a block counts."""
    return BlockLayout(
        layers=1,
        kv_heads=1,
        head_dim=1,
        dtype=KvDtype.FLOAT32,
        block_tokens=block_tokens or _OPAQUE_TOKENS,
        order=f"{kind}-opaque",
    )
