"""The engine's KV memory as bytes: one view per layer and block, or a copy if necessary.

Called by the worker's half of the connector. On a CPU a block's layer is one contiguous piece of
memory, and the pool reads and writes the memory directly. Elsewhere a block's layer is copied
through pinned host memory, in the order of the device's own work. Tensors belong to the engine;
this module computes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

_DIMS = "bhnc"
"""Blocks, heads, tokens, content: vLLM's order of a layer's dimensions."""


class UnfitMemoryError(ValueError):
    """The engine's KV has an unknown form."""


class Window(Protocol):
    """Selected blocks of all layers, in the caller's order; used for one transfer.

    1. After ``capture`` of a layer, ``view`` returns the bytes that each block's layer had then, in
       the memory's ``order``, until the engine writes to the block again.
    2. Bytes written to ``view`` are in the engine after ``restore`` of the layer, for the first
       ``count`` blocks; no other block changes.
    """

    def capture(self, layer: int) -> None:
        """Begin to copy a layer out of the engine; called by the engine's thread."""

    def view(self, layer: int, index: int) -> memoryview:
        """Return the bytes of a block's layer, after the copy of ``capture``; any thread."""

    def restore(self, layer: int, count: int) -> None:
        """Copy a layer of the first blocks into the engine; called by the engine's thread."""


class KvMemory(Protocol):
    """All layers' blocks.

    1. Layers are numbered in the natural order of their names: 2 before 10.
    2. A block's layer is ``layer_bytes`` long, and ``order`` names its dimensions, outermost first.

    Attributes:
        layer_names: the engine's names of layers, in storage order.
        layer_bytes: bytes of one layer of a block.
        order: the byte order of a layer.
    """

    layer_names: tuple[str, ...]
    layer_bytes: int
    order: str

    def window(self, block_ids: Sequence[int]) -> Window:
        """Open blocks for a transfer."""


class ProcessKvMemory:
    """Blocks in this process's own memory; see KvMemory."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.layer_names = tuple(tensors)
        first = next(iter(tensors.values()))
        self.order = inner_order(first)
        self.layer_bytes = _block_bytes(first)
        self._tensors = tuple(tensors.values())  # The tensors own the memory.
        self._layers = [_flat(tensor) for tensor in self._tensors]
        self._strides = [t.stride(0) * t.element_size() for t in self._tensors]

    def window(self, block_ids: Sequence[int]) -> Window:
        """Open blocks for a transfer."""
        return _HostWindow(self, tuple(block_ids))

    def block(self, layer: int, block_id: int) -> memoryview:
        """Return the memory of one block's layer."""
        start = block_id * self._strides[layer]
        return self._layers[layer][start : start + self.layer_bytes]


class _HostWindow:
    """See Window; nothing is copied."""

    def __init__(self, memory: ProcessKvMemory, block_ids: tuple[int, ...]) -> None:
        self._memory = memory
        self._block_ids = block_ids

    def capture(self, layer: int) -> None:
        """Do nothing: the block is read in place."""

    def view(self, layer: int, index: int) -> memoryview:
        """Return the block's own memory."""
        return self._memory.block(layer, self._block_ids[index])

    def restore(self, layer: int, count: int) -> None:
        """Do nothing: the block was written in place."""


class StagedMemory:
    """Blocks elsewhere, copied through host memory; see KvMemory.

    Copies have the plain order of the dimensions, whatever the order in the engine's memory.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.layer_names = tuple(tensors)
        first = next(iter(tensors.values()))
        self.order = "hnc"
        self.layer_bytes = _block_bytes(first)
        self.tensors = tuple(tensors.values())

    def window(self, block_ids: Sequence[int]) -> Window:
        """Open blocks for a transfer."""
        return _StagedWindow(self, tuple(block_ids))


class _StagedWindow:
    """See Window. One buffer per layer, created on demand."""

    def __init__(self, memory: StagedMemory, block_ids: tuple[int, ...]) -> None:
        # Only engines with KV outside of host memory need torch here.
        import torch

        self._memory = memory
        self._count = len(block_ids)
        device = memory.tensors[0].device
        self._ids = torch.tensor(block_ids, dtype=torch.long, device=device)
        self._buffers: list[Any] = [None] * len(memory.tensors)
        self._views: list[memoryview | None] = [None] * len(memory.tensors)
        self._copied: list[Any] = [None] * len(memory.tensors)

    def capture(self, layer: int) -> None:
        """Gather the layer's blocks and copy them to the host, behind the work queued so far."""
        tensor = self._memory.tensors[layer]
        buffer = self._buffer(layer)
        buffer.copy_(tensor.index_select(0, self._ids), non_blocking=True)
        if tensor.is_cuda:
            import torch  # As above.

            self._copied[layer] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._copied[layer].record()

    def view(self, layer: int, index: int) -> memoryview:
        """Return the buffer's part of a block; waits for the copy."""
        if self._copied[layer] is not None:
            self._copied[layer].synchronize()
        self._buffer(layer)
        whole = self._views[layer]
        assert whole is not None
        size = self._memory.layer_bytes
        return whole[index * size : (index + 1) * size]

    def restore(self, layer: int, count: int) -> None:
        """Copy the buffer's first blocks to the device, behind the work queued so far."""
        tensor = self._memory.tensors[layer]
        good = self._buffer(layer)[:count].to(tensor.device, non_blocking=True)
        tensor.index_copy_(0, self._ids[:count], good)

    def _buffer(self, layer: int) -> Any:
        if self._buffers[layer] is None:
            tensor = self._memory.tensors[layer]
            shape = (self._count, *tensor.shape[1:])
            buffer = tensor.new_empty(shape, device="cpu", pin_memory=tensor.is_cuda)
            self._views[layer] = _flat(buffer)
            self._buffers[layer] = buffer
        return self._buffers[layer]


def open_memory(tensors: Mapping[str, Any], *, blocks: int, block_tokens: int) -> KvMemory:
    """Choose the access to an engine's KV.

    Args:
        tensors: for each layer ``[blocks, heads, tokens, content]``, any strides.
        blocks: number of blocks.
        block_tokens: tokens of one block.

    Raises:
        UnfitMemoryError: a shape, or a mixture of shapes, is not supported.
    """
    if not tensors:
        raise UnfitMemoryError("the engine has no KV")
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if len(shape) != 4 or shape[0] != blocks or shape[2] != block_tokens:
            raise UnfitMemoryError(
                f"{name} has shape {shape}, not [{blocks} blocks, heads, {block_tokens} tokens, *]"
            )
    shapes = {(tuple(t.shape), t.stride(), str(t.dtype), str(t.device)) for t in tensors.values()}
    if len(shapes) > 1:
        raise UnfitMemoryError("layers have KV of different shapes, types or devices")
    if len({t.data_ptr() for t in tensors.values()}) != len(tensors):
        raise UnfitMemoryError("layers share their KV")
    tensors = {name: tensors[name] for name in sorted(tensors, key=_by_number)}
    first = next(iter(tensors.values()))
    if first.device.type == "cpu" and _is_dense(first):
        return ProcessKvMemory(tensors)
    return StagedMemory(tensors)


def inner_order(tensor: Any) -> str:
    """Return the order of a block's dimensions in memory, for example ``hnc``, outermost first."""
    inner = [1, 2, 3]
    # Dimensions of length one have no order of their own: they count as outermost.
    inner.sort(key=lambda dim: (tensor.shape[dim] > 1, -tensor.stride(dim)))
    return "".join(_DIMS[dim] for dim in inner)


def _is_dense(tensor: Any) -> bool:
    """True if each block is one piece of memory, separate from all other blocks."""
    expected = 1
    for dim in sorted((1, 2, 3), key=lambda dim: tensor.stride(dim)):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            return False
        expected *= int(tensor.shape[dim])
    return bool(tensor.stride(0) >= expected)


def _block_bytes(tensor: Any) -> int:
    return int(tensor.shape[1] * tensor.shape[2] * tensor.shape[3] * tensor.element_size())


def _flat(tensor: Any) -> memoryview:
    """View a host tensor as bytes; the caller keeps the tensor alive."""
    span = (tensor.shape[0] - 1) * tensor.stride(0) * tensor.element_size() + _block_bytes(tensor)
    raw = (ctypes.c_char * span).from_address(tensor.data_ptr())
    return np.frombuffer(raw, dtype=np.uint8).data


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names of layers in natural order: 2 before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]
