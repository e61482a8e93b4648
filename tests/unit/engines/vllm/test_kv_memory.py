"""The engine's KV as bytes: in place where a block is one piece of memory, else through a copy."""

from __future__ import annotations

import pytest
import torch

from tierkv.integrations.vllm.kv_memory import (
    ProcessKvMemory,
    StagedMemory,
    UnfitMemoryError,
    inner_order,
    open_memory,
)

BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 4, 6


def layers(count: int = 2, *, permuted: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shape = (BLOCKS, TOKENS, HEADS, CONTENT) if permuted else (BLOCKS, HEADS, TOKENS, CONTENT)
    made = {f"model.layers.{i}.attn": torch.rand(shape) for i in range(count)}
    return {n: t.permute(0, 2, 1, 3) if permuted else t for n, t in made.items()}


def open_all(tensors: dict[str, torch.Tensor]) -> ProcessKvMemory | StagedMemory:
    memory = open_memory(tensors, blocks=BLOCKS, block_tokens=TOKENS)
    assert isinstance(memory, (ProcessKvMemory, StagedMemory))
    return memory


@pytest.mark.parametrize("permuted", [False, True])
def test_host_memory_is_written_and_read_in_place(permuted: bool) -> None:
    tensors = layers(permuted=permuted)
    memory = open_all(tensors)
    assert isinstance(memory, ProcessKvMemory)
    assert memory.order == ("nhc" if permuted else "hnc")
    assert memory.layer_bytes == HEADS * TOKENS * CONTENT * 4
    name = memory.layer_names[1]
    inner = tensors[name].permute(0, 2, 1, 3) if permuted else tensors[name]
    window = memory.window([3, 1])
    window.capture(1)
    assert bytes(window.view(1, 0)) == inner[3].contiguous().numpy().tobytes()
    window.view(1, 1)[:] = bytes(memory.layer_bytes)
    assert not inner[1].any()
    assert inner[0].all() and inner[2].all()


def test_blocks_of_all_layers_side_by_side_are_in_place_too() -> None:
    whole = torch.rand(BLOCKS, 2, HEADS, TOKENS, CONTENT)
    memory = open_all({f"layers.{i}": whole[:, i] for i in range(2)})
    assert isinstance(memory, ProcessKvMemory)
    assert bytes(memory.window([4]).view(1, 0)) == whole[4, 1].numpy().tobytes()


def test_memory_in_pieces_goes_through_a_copy() -> None:
    tensors = {n: torch.rand(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., ::2] for n in ("a.0", "a.1")}
    memory = open_all(tensors)
    assert isinstance(memory, StagedMemory)
    window = memory.window([2, 0])
    window.capture(0)
    assert bytes(window.view(0, 0)) == tensors["a.0"][2].contiguous().numpy().tobytes()
    incoming = memory.window([1, 4])
    fresh = torch.rand(2, HEADS, TOKENS, CONTENT)
    before = tensors["a.1"][4].clone()
    for index in range(2):
        incoming.view(1, index)[:] = fresh[index].numpy().tobytes()
    incoming.restore(1, 1)
    assert torch.equal(tensors["a.1"][1], fresh[0])
    assert torch.equal(tensors["a.1"][4], before)  # Only the first was good.


def test_layers_are_stored_in_the_order_people_count_them() -> None:
    memory = open_all(layers(12))
    assert memory.layer_names[2] == "model.layers.2.attn"
    assert memory.layer_names[11] == "model.layers.11.attn"


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
