"""What every access to an engine's KV does, numbered as in integrations/vllm/kv_memory.py."""

from __future__ import annotations

import pytest
import torch

from tierkv.integrations.vllm.kv_memory import KvMemory, ProcessKvMemory, StagedMemory, open_memory

BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 4, 6
LAYERS = 12
NAMES = [f"model.layers.{number}.attn" for number in range(LAYERS)]

Tensors = dict[str, torch.Tensor]


def plain() -> Tensors:
    return {name: torch.rand(BLOCKS, HEADS, TOKENS, CONTENT) for name in NAMES}


def permuted() -> Tensors:
    """Tokens outside heads in memory, as with some of vLLM's kernels."""
    shape = (BLOCKS, TOKENS, HEADS, CONTENT)
    return {name: torch.rand(shape).permute(0, 2, 1, 3) for name in NAMES}


def side_by_side() -> Tensors:
    """All layers of a block in one piece of memory."""
    whole = torch.rand(BLOCKS, LAYERS, HEADS, TOKENS, CONTENT)
    return {name: whole[:, number] for number, name in enumerate(NAMES)}


def in_pieces() -> Tensors:
    """No block's layer is one piece of memory."""
    shape = (BLOCKS, HEADS, TOKENS, 2 * CONTENT)
    return {name: torch.rand(shape)[..., ::2] for name in NAMES}


FORMS = {
    plain: (ProcessKvMemory, "hnc"),
    permuted: (ProcessKvMemory, "nhc"),
    side_by_side: (ProcessKvMemory, "hnc"),
    in_pieces: (StagedMemory, "hnc"),
}


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def tensors(request: pytest.FixtureRequest) -> Tensors:
    made: Tensors = request.param()
    return made


@pytest.fixture
def memory(tensors: Tensors, request: pytest.FixtureRequest) -> KvMemory:
    mixed = dict(sorted(tensors.items()))  # As text: 10 before 2.
    return open_memory(mixed, blocks=BLOCKS, block_tokens=TOKENS)


def bytes_of(memory: KvMemory, tensor: torch.Tensor, block: int) -> bytes:
    """The bytes of a block's layer in the order that the memory names."""
    dims = ["hnc".index(dim) for dim in memory.order]
    return tensor[block].permute(*dims).contiguous().numpy().tobytes()


def test_window_1_a_captured_layer_is_what_the_engine_had(
    memory: KvMemory, tensors: Tensors
) -> None:
    window = memory.window([3, 1])
    for layer in (1, LAYERS - 1):
        window.capture(layer)
        for index, block in enumerate((3, 1)):
            want = bytes_of(memory, tensors[NAMES[layer]], block)
            assert bytes(window.view(layer, index)) == want


def test_window_2_the_first_blocks_of_a_layer_are_restored_and_no_others(
    memory: KvMemory, tensors: Tensors
) -> None:
    name = NAMES[2]
    before = {other: tensor.clone() for other, tensor in tensors.items()}
    window = memory.window([4, 0, 2])
    fresh = [bytes([65 + index]) * memory.layer_bytes for index in range(2)]
    for index, data in enumerate(fresh):
        window.view(2, index)[:] = data
    window.restore(2, 2)
    assert [bytes_of(memory, tensors[name], block) for block in (4, 0)] == fresh
    for block in (1, 2, 3):
        assert torch.equal(tensors[name][block], before[name][block])
    for other in set(NAMES) - {name}:
        assert torch.equal(tensors[other], before[other])


def test_memory_1_layers_come_in_the_order_people_count_them(memory: KvMemory) -> None:
    assert list(memory.layer_names) == NAMES


def test_memory_2_a_layers_length_and_order_are_told(
    memory: KvMemory, request: pytest.FixtureRequest
) -> None:
    kind, order = FORMS[request.node.callspec.params["tensors"]]
    assert isinstance(memory, kind) and memory.order == order
    assert memory.layer_bytes == HEADS * TOKENS * CONTENT * 4
    assert len(memory.window([1]).view(0, 0)) == memory.layer_bytes
