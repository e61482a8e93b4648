"""Which KV of an engine is understood; tests/contract/test_kv_memory.py tests its bytes."""

from __future__ import annotations

import pytest
import torch

from tierkv.integrations.vllm.kv_memory import UnfitMemoryError, inner_order, open_memory

BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 4, 6


def test_a_single_head_has_the_same_order_either_way() -> None:
    assert inner_order(torch.empty(3, 1, 4, 6)) == "hnc"
    assert inner_order(torch.empty(3, 4, 1, 6).permute(0, 2, 1, 3)) == "hnc"


def test_what_is_not_understood_is_refused() -> None:
    good = torch.empty(BLOCKS, HEADS, TOKENS, CONTENT)
    for tensors, why in (
        ({}, "no KV"),
        ({"a": torch.empty(2, BLOCKS, HEADS, TOKENS, CONTENT)}, "has shape"),
        ({"a": torch.empty(BLOCKS + 1, HEADS, TOKENS, CONTENT)}, "has shape"),
        ({"a": torch.empty(BLOCKS, HEADS, 2 * TOKENS, CONTENT)}, "has shape"),
        ({"a": good, "b": torch.empty(BLOCKS, HEADS, TOKENS, 2 * CONTENT)}, "different shapes"),
        ({"a": good, "b": good}, "share"),
    ):
        with pytest.raises(UnfitMemoryError, match=why):
            open_memory(tensors, blocks=BLOCKS, block_tokens=TOKENS)
